"""Call the model once, with hooks in its blocks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from contextlib import ExitStack
from typing import Any

from torch import Tensor

from ...toma_core import Evaluation
from .chain import BlockHook, ChainSite
from .compat import OwnError, own_code, warn, warned, without_replays
from .model_hooks import Hook, HookPair, installed
from .sampling_run import SamplingRun


def merged_call(
    call: Callable[[], Any],
    select: Callable[[Evaluation], Iterable[HookPair]],
    sampling: SamplingRun,
    evaluation: Evaluation,
    x: Tensor,
    positions: Hashable = (),
) -> Any:
    """Install the hooks that `select` chooses for latents x of (B, C, ..., H, W), and return the result of `call`.

    Whether the call uses caches depends on the chains that `select` makes. So this is decided after `select`, before
    the model runs. If this pack's code fails until then, the call is full. positions: see `conditions.positions_of`.
    """
    with ExitStack() as installation:
        try:
            with own_code():
                hooks = installation.enter_context(installed(select(evaluation)))
                layout = positions, *_layout(hooks, evaluation, x)
                decided = sampling.decide_call(evaluation, layout)
                if decided.step_plan.mode is not evaluation.step_plan.mode:
                    installation.close()
                    evaluation = decided
                    hooks = installation.enter_context(installed(select(evaluation)))
                if not evaluation.refreshes:
                    sampling.run.cache.read_ahead(evaluation.cond_keys)
        except OwnError as error:
            installation.close()
            warn(error)
            sampling.full_instead(error.reason)
            return call()
        with without_replays():
            result = call()
        with warned(), own_code():
            sampling.run.cache.free_staging(x.device)
            sites = _sites(hooks)
            missed = [site.chain.name for site in sites if site.chain is not None and (not site.reached or site.pair)]
            left = [site for site in sites if site.reached and (not site.pair or not evaluation.refreshes)]
            if left or not sites:  # otherwise another node has skipped all chains
                sampling.ended(evaluation, x, layout, missed)
        return result


def _sites(hooks: Iterable[Hook]) -> list[ChainSite]:
    return [hook.site for hook in hooks if isinstance(hook, BlockHook) and hook.site is hook.own_site]


def _layout(hooks: Iterable[Hook], evaluation: Evaluation, x: Tensor) -> tuple[Hashable, ...]:
    """Return the properties of a call on which its caches depend, besides its conditions and positions."""
    chains = [site.chain for site in _sites(hooks) if site.chain is not None]
    images = len(x) // len(evaluation.cond_keys)
    return x.shape[1:], images, x.dtype, x.device, tuple((*chain.names, chain.grids) for chain in chains)
