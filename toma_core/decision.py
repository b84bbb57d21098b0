"""Decide what one evaluation of the model does: the schedule's plan, adjusted by the state of the run."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from .reasons import Message, Reason
from .run import RunState
from .schedule import StepMode, StepPlan


def decide(
    run: RunState,
    sigma: float,
    signatures: Mapping[Hashable, Hashable] | None = None,
    step: int | None = None,
    *,
    given: float | None = None,
    unreported: int = 0,
    awaits_prediction: bool = False,
    unshared: bool = False,
    gradients: bool = False,
) -> StepPlan:
    """Return the plan of an evaluation, for all conditions that are evaluated together.

    sigma: of the sampler. step: if known. given: the sigma given to the model, if it differs. unreported: how often it
    has changed while the sampler reported no steps.
    signatures: signature -> state of each condition that takes part, see `ResidualCache.resolve_mode`.
    awaits_prediction: merge plans are made from a predicted picture, which does not exist yet.
    unshared: conditions are evaluated on several devices, which have no predicted picture to make equal plans from.
    gradients: are computed, so nothing may be merged or cached.
    """
    plan = run.schedule.decide(sigma, step)
    if plan.mode is StepMode.FULL:
        return plan
    if gradients:
        run.stats.full_because(plan.step, Reason.GRADIENTS())
        return plan.with_mode(StepMode.FULL)
    if run.disabled_by:
        return full(run, plan, run.disabled_by)
    if unshared and not awaits_prediction:
        return full(run, plan, Reason.SEVERAL_DEVICES())
    if run.kv_cache and run.cache.disabled:
        # These presets skip no block: merging without caches would change the picture.
        run.stats.not_merged("model", Reason.KV_CACHE_DISABLED())
        return full(run, plan, Reason.KV_CACHE_DISABLED())
    if run.tiles and plan.mode.merges:
        plan = without_cache(run, plan)
    elif plan.mode.caches:
        given = sigma if given is None else given
        # The cache expects falling noise; unsampling adds it.
        falling = given if not run.schedule.rises else 1 / max(given, 1e-9)
        # The step is in doubt where another node changes noise levels or the sampler reports no steps. Elsewhere noise
        # levels do not count steps: a schedule may return to one.
        in_doubt = unreported or given != sigma
        other_steps = run.schedule.step_at(given) if in_doubt else plan.step, unreported
        mode = run.cache.resolve_mode(
            plan, falling, other_steps, signatures or {}, run.schedule.cache_steps, merges_plainly(run)
        )
        if mode is StepMode.REFRESH and plan.mode is not mode:
            run.stats.full_because(plan.step, Reason.NOT_CACHED())
        elif mode is StepMode.FULL and plan.mode is StepMode.MERGED_CACHED:
            run.stats.full_because(plan.step, Reason.CACHE_DISABLED())
        plan = plan.with_mode(mode)
    # A refresh needs no merge plan yet.
    return plan.with_mode(StepMode.FULL) if awaits_prediction and plan.mode.merges else plan


def full(run: RunState, plan: StepPlan, reason: Message) -> StepPlan:
    """Return the plan as a full step that caches nothing; note the reason if the schedule merges it."""
    if plan.mode.merges:
        run.stats.full_because(plan.step, reason)
    return plan.with_mode(StepMode.FULL)


def without_cache(run: RunState, plan: StepPlan) -> StepPlan:
    """Return the plan of a call that uses no cache, because it shows a tile of the latent."""
    if not plan.mode.merges:
        return plan.with_mode(StepMode.FULL)
    return plan.with_mode(StepMode.MERGED) if merges_plainly(run) else full(run, plan, Reason.TILES())


def merges_plainly(run: RunState) -> bool:
    """Return whether the settings are made for merging without caches: they skip blocks or cache nothing."""
    config = run.config
    return config.skip_first_blocks > 0 or config.skip_last_blocks > 0 or not run.config.uses_cache
