"""Decide the `StepMode` of an evaluation, a model call and a chain: the schedule's mode, adjusted to the run's
state."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from .cache import Keys
from .coverage import Origin
from .reasons import Message, Reason
from .run import RunState
from .schedule import StepMode, StepPlan, step_at

# Caches are used only if at most this share of the latent's noise is new. In long runs the limit is lower: at 0.4,
# `euler_ancestral` had more than twice the error of `euler` (benchmarks/results/fidelity/trials.md).
MAX_NEW_NOISE, _IN_LONG_RUNS = 0.4, 0.3
# If a run begins flat (`Schedule.begins_flat`), new noise is ignored while at most this share of the latent comes from
# predictions.
_SMALL_SHARE = 0.03


@dataclass(frozen=True)
class Facts:
    """What is known about an evaluation before the model runs."""

    sigma: float  # the sampler's sigma
    step: int | None = None  # 0-based; None if unknown
    model_sigma: float | None = None  # the model's sigma, if it differs from the sampler's
    unreported: int = 0  # how often the sigma has changed while the sampler reported no steps
    conditions: Mapping[Hashable, Hashable] = field(default_factory=dict)  # `Origin.state` by key
    awaits_prediction: bool = False  # merge plans need a predicted picture, and there is none yet
    unshared: bool = False  # conditions run on several devices, with no predicted picture to make equal plans from
    gradients: bool = False  # gradients are computed, so nothing may be merged or cached
    new_noise: float = 0.0  # share of the latent's noise that is new (`innovation`); inf if unknown
    enlarges: bool = False  # the sampler enlarges errors of the model's predictions
    another: bool = False  # these conditions had a different latent before, at the same step and sigma
    unknown: Message | None = None  # names a part of the model that may change from step to step

    @property
    def given(self) -> float:
        """The noise level that the model gets."""
        return self.sigma if self.model_sigma is None else self.model_sigma


def decide(run: RunState, facts: Facts) -> StepPlan:
    """Return the plan of an evaluation, for all conditions that are evaluated together."""
    schedule, step = run.schedule, facts.step
    if facts.unreported and step_at(schedule.sigmas, facts.given) == len(schedule.sigmas) - 1:
        step = len(schedule.sigmas) - 1  # the count of steps lags behind if the sampler has skipped a step
    plan = schedule.decide(facts.sigma, step)
    if plan.mode is StepMode.FULL:
        return plan
    if run.cache.disabled and not run.disabled_by:
        run.disable(Reason.KV_CACHE_DISABLED())
    if facts.gradients:
        run.stats.full_because(plan.step, Reason.GRADIENTS())
        return plan.with_mode(StepMode.FULL)
    if reason := _obstacle(run, facts):
        return _full(run, plan, reason)
    if plan.mode.caches:
        plan = plan.with_mode(_cached_mode(run, plan, facts))
    # A refresh does not wait for a prediction, because it needs no merge plan.
    return plan.with_mode(StepMode.FULL) if facts.awaits_prediction and plan.mode.merges else plan


def _obstacle(run: RunState, facts: Facts) -> Message | None:
    """Return what prevents an evaluation from merging and from refreshing the caches; None if nothing does."""
    if run.disabled_by:
        return run.disabled_by
    if facts.unshared and not facts.awaits_prediction:
        return Reason.SEVERAL_DEVICES()
    if not run.kv_cache:
        return None
    if facts.enlarges or facts.another:
        return Reason.NEW_NOISE()
    return facts.unknown or (Reason.TILES() if run.tiles else None)


def _cached_mode(run: RunState, plan: StepPlan, facts: Facts) -> StepMode:
    """Return the mode of an evaluation for which the schedule has a refresh or a merge with caches.

    Guidance takes the difference between conditions, so either all conditions use caches or none does. If the entries
    of one condition cannot be used, the evaluation is a refresh.
    """
    held = _begin(run, plan, facts)
    reason = Reason.NOT_CACHED()
    schedule = run.schedule
    small = schedule.begins_flat and schedule.predicted_share(plan.step) <= _SMALL_SHARE
    limit = math.inf if small else _IN_LONG_RUNS if schedule.is_long else MAX_NEW_NOISE
    # An unknown share of new noise, which is infinite or NaN, counts as too large.
    if not (facts.new_noise <= limit and math.isfinite(facts.new_noise)):
        held, reason = False, Reason.NEW_NOISE() if held else reason
    if plan.mode is not StepMode.REFRESH:
        if held:
            return StepMode.MERGED_CACHED
        run.stats.full_because(plan.step, reason)
    run.coverage.refresh()
    return StepMode.REFRESH


def _begin(run: RunState, plan: StepPlan, facts: Facts) -> bool:
    """Begin an evaluation in `run.coverage`; return whether the entries of all conditions may be used."""
    schedule, given = run.schedule, facts.given
    # `Coverage` expects a noise level that falls. In unsampling the noise level rises, so take its inverse.
    falling = 1 / max(given, 1e-9) if schedule.rises else given
    # If another node changes noise levels or the sampler reports no steps, also derive the step from the noise level.
    # Otherwise do not derive it, because a schedule may return to an earlier noise level.
    in_doubt = facts.unreported or given != facts.sigma
    other_steps = step_at(schedule.sigmas, given) if in_doubt else plan.step, facts.unreported
    origin = Origin(plan.step, falling, None, other_steps)
    return run.coverage.begin(facts.conditions, origin, schedule.cache_steps)


def decide_call(run: RunState, plan: StepPlan, cond_keys: tuple[Hashable, ...], layout: Hashable) -> StepPlan:
    """Return the plan of a model call and of all later calls of its evaluation. A merged call becomes a refresh if the
    caches of these conditions do not fit `layout`, the shapes of the call's latents and chains."""
    if plan.mode is not StepMode.MERGED_CACHED or run.coverage.fits(cond_keys, layout):
        return plan
    run.coverage.refresh()
    run.stats.full_because(plan.step, Reason.NOT_CACHED())
    return plan.with_mode(StepMode.REFRESH)


def decide_tiles(run: RunState, plan: StepPlan, several_devices: bool) -> StepPlan:
    """Return the plan of a call on tiles of the latent. Such a call uses no cache."""
    if several_devices:
        return _full(run, plan, Reason.SEVERAL_DEVICES())
    return _full(run, plan, Reason.TILES()) if run.kv_cache else plan


def chain_merges(run: RunState, plan: StepPlan, keys: Keys) -> bool:
    """Return whether a chain with these keys may be merged: False if it needs cached entries and some are missing."""
    return plan.mode is not StepMode.MERGED_CACHED or run.cache.holds(keys)


def out_of_memory(run: RunState, plan: StepPlan, video: bool) -> StepPlan | None:
    """Drop plans and caches after memory ran out. Return the plan with which to repeat the evaluation: full, like all
    later evaluations. Return None if repeating would not help: no cache was dropped, and the latent is a picture or the
    evaluation was full."""
    dropped = run.kv_cache and run.coverage.disable()
    if not dropped and (not video or run.disabled_by or plan.mode is StepMode.FULL):
        return None
    run.disable(Reason.KV_CACHE_DISABLED() if dropped else Reason.OUT_OF_MEMORY())
    return plan.with_mode(StepMode.FULL)


def _full(run: RunState, plan: StepPlan, reason: Message) -> StepPlan:
    """Return the plan as a full step that caches nothing; record the reason if the schedule merges the step."""
    if plan.mode.merges:
        run.stats.full_because(plan.step, reason)
    return plan.with_mode(StepMode.FULL)
