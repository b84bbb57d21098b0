"""One call of the model with hooks in its blocks: select them, decide, install them, and note what was cached."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from torch import Tensor

from ...toma_core import Evaluation
from .chain import BlockHook, ChainSite
from .compat import without_replays
from .model_hooks import Hook, HookPair, installed
from .sampling_run import SamplingRun


def merged_call(
    call: Callable[[], Any],
    select: Callable[[Evaluation], Iterable[HookPair]],
    sampling: SamplingRun,
    evaluation: Evaluation,
    x: Tensor,
) -> Any:
    """Return what `call` returns with the hooks that `select` chooses for latents x of (B, C, ..., H, W).

    Whether the caches serve the call is decided when its chains are known and the model has not run.
    """
    with installed(select(evaluation)) as hooks:
        layout = _layout(hooks, evaluation, x)
        decided = sampling.decide_call(evaluation, layout)
        if decided.step_plan.mode is evaluation.step_plan.mode:
            return _call_installed(call, hooks, sampling, evaluation, x, layout)
    with installed(select(decided)) as hooks:
        return _call_installed(call, hooks, sampling, decided, x, layout)


def _sites(hooks: Iterable[Hook]) -> list[ChainSite]:
    """Return the sites at which a chain begins."""
    return [hook.site for hook in hooks if isinstance(hook, BlockHook) and hook.chain is hook.site]


def _layout(hooks: Iterable[Hook], evaluation: Evaluation, x: Tensor) -> Hashable:
    """Return what caches of a call depend on beside the conditions: its latents x, and its chains."""
    chains = [site.active for site in _sites(hooks) if site.active is not None]
    images = len(x) // len(evaluation.cond_keys)
    return x.shape[1:], images, x.dtype, x.device, tuple((*chain.names, chain.grids) for chain in chains)


def _call_installed(
    call: Callable[[], Any],
    hooks: Sequence[Hook],
    sampling: SamplingRun,
    evaluation: Evaluation,
    x: Tensor,
    layout: Hashable,
) -> Any:
    """Return what `call` returns, and note in the ledger which of its chains have written their caches."""
    with without_replays():
        result = call()
    sites = _sites(hooks)
    missed = [site for site in sites if not site.reached or site.pair]
    if len(missed) < len(sites) or not sites:  # else another node has skipped the model
        sampling.ended(evaluation, x, layout, [site.active.name for site in missed if site.active is not None])
    return result
