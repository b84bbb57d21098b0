"""One call of a model on merged tokens if the caches hold what it begins with, else on all tokens.

That is decided when the chains are known and the model has not run yet.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from torch import Tensor

from ...toma_core import Evaluation
from .chain import BlockHook, ChainSite
from .model_hooks import Hook, HookPair, installed
from .sampling_run import SamplingRun


def merged_call(
    call: Callable[[], Any],
    select: Callable[[Evaluation], Iterable[HookPair]],
    sampling: SamplingRun,
    evaluation: Evaluation,
    x: Tensor,
) -> Any:
    """Return what `call` returns with the hooks that `select` chooses for latents x of (B, C, ..., H, W)."""
    for served in (False, True):
        with installed(select(evaluation)) as hooks:
            layout = _layout(x, evaluation, hooks)
            if served or sampling.serves(evaluation, layout):
                result = call()
                if evaluation.refreshes:
                    sampling.refreshed(evaluation, layout, _unreached(hooks))
                return result
        evaluation = sampling.refresh_instead(evaluation)


def _layout(x: Tensor, evaluation: Evaluation, hooks: Sequence[Hook]) -> Hashable:
    """Return what caches of a call depend on beside its conditions: the latents, and the chains."""
    chains = [site.active for site in _sites(hooks) if site.active is not None]
    images = len(x) // len(evaluation.cond_keys)
    return x.shape[1:], images, x.dtype, x.device, tuple((*chain.names, chain.grids) for chain in chains)


def _unreached(hooks: Sequence[Hook]) -> list[str]:
    """Return the names of the chains that the model did not come to, or not to the end of."""
    missed = [site.active for site in _sites(hooks) if not site.reached or site.pair]
    return [chain.name for chain in missed if chain is not None]


def _sites(hooks: Sequence[Hook]) -> list[ChainSite]:
    return [hook.site for hook in hooks if isinstance(hook, BlockHook) and hook.chain is hook.site]
