"""Test to which step a sigma belongs, the mode and ratios of a step, and when a plan is made again."""

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.loop import loop
from toma_core.config import KVCache, ToMAConfig
from toma_core.reasons import Reason
from toma_core.schedule import Schedule, StepMode, StepPlan, step_at

# The sigmas at which four steps begin, as with SDXL. The last step ends at sigma 0.
SIGMAS = (14.6, 5.0, 2.0, 0.5)


@loop(
    ("sigmas", "calls", "steps"),
    [
        # The model is evaluated at the sigma of each step, at two sigmas above the schedule and at three below it.
        (SIGMAS, (20.0, 14.7, *SIGMAS, 0.49, 0.001, 0.0), [0, 0, 0, 1, 2, 3, 3, 3, 3]),
        # heun: each step but the last has a second evaluation, at the sigma of the next step.
        (SIGMAS, (14.6, 5.0, 5.0, 2.0, 2.0, 0.5, 0.5), [0, 1, 1, 2, 2, 3, 3]),
        # dpmpp_2s and dpmpp_sde: the second evaluation is at a sigma between two steps.
        (SIGMAS, (14.6, 8.5, 5.0, 3.2, 2.0, 1.0, 0.5), [0, 0, 1, 1, 2, 2, 3]),
        # In unsampling, sigmas rise. Step 0 is the step that runs first.
        (SIGMAS[::-1], (0.5, 1.0, 2.0, 5.0, 14.6, 20.0), [0, 0, 1, 2, 3, 3]),
    ],
)
def test_steps_of_samplers(sigmas: tuple[float, ...], calls: tuple[float, ...], steps: list[int]) -> None:
    schedule = Schedule(ToMAConfig(), sigmas)
    assert [step_at(sigmas, sigma) for sigma in calls] == [schedule.decide(sigma).step for sigma in calls] == steps
    for step, sigma in enumerate(sigmas):
        rounded = [torch.nextafter(torch.tensor(sigma), torch.tensor(end)).item() for end in (-math.inf, math.inf)]
        assert sigma not in rounded
        assert [step_at(sigmas, each) for each in rounded] == [step, step]


@loop("settings", [{}, {"full_step_interval": 2}, {"full_step_interval": 2, "granularity": "module"}])
def test_without_a_schedule_every_evaluation_is_step_0_and_merged(settings: dict[str, Any]) -> None:
    config = ToMAConfig(**settings, kv_cache=KVCache.ON)
    assert config.uses_cache is (settings == {"full_step_interval": 2})
    schedule = Schedule(config)
    assert [step_at(schedule.sigmas, sigma) for sigma in (1e9, 1.0, 0.0)] == [0, 0, 0]
    mode = StepMode.MERGED_CACHED if config.uses_cache else StepMode.MERGED
    assert schedule.decide(1.0) == StepPlan(0, mode, 0.5, 0, 0)


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=30, unique=True), st.lists(st.floats(0, 120), min_size=1))
def test_steps_never_leave_the_schedule_or_run_back(levels: list[float], calls: list[float]) -> None:
    schedule = Schedule(ToMAConfig(), tuple(sorted(levels, reverse=True)))
    steps = [step_at(schedule.sigmas, sigma) for sigma in sorted(calls, reverse=True)]
    assert steps == sorted(steps)
    assert steps[0] >= 0
    assert steps[-1] < len(levels)


def test_active_from_start_to_just_before_end() -> None:
    """The range includes its start sigma but not its end sigma, so two runs that split a schedule do not overlap."""
    schedule = Schedule(ToMAConfig(), SIGMAS, sigma_start=5.0, sigma_end=0.5)
    assert [schedule.in_range(sigma) for sigma in SIGMAS] == [False, True, True, False]
    assert [schedule.decide(sigma).ratio for sigma in (*SIGMAS, 8.5, 1.0, 0.1)] == [0.0, 0.5, 0.5, 0.0, 0.0, 0.5, 0.0]
    assert schedule.span == (1, 2)
    everywhere = Schedule(ToMAConfig(), SIGMAS)
    assert [everywhere.decide(sigma).ratio for sigma in (1e12, *SIGMAS, 0.0)] == [0.5] * 6
    assert everywhere.span == (0, 3)
    between = Schedule(ToMAConfig(), SIGMAS, sigma_start=1.5, sigma_end=0.9)
    assert between.span == (0, 0)
    assert [between.decide(sigma).ratio for sigma in (*SIGMAS, 1.0)] == [0.0] * 4 + [0.5], "a range without a step"


HALF_RUN = {"finishes": True, "continues_run": True}


def sigmas_of(steps: int) -> tuple[float, ...]:
    return tuple(float(steps - step) for step in range(steps))


def plans_of(
    config: ToMAConfig, *ratio_schedule: tuple[float, dict[str, float]], steps: int = 10, **given: Any
) -> list[StepPlan]:
    schedule = Schedule(config, sigmas_of(steps), ratio_schedule=ratio_schedule, **given)
    return [schedule.decide(sigma) for sigma in schedule.sigmas]


def modes(plans: list[StepPlan]) -> str:
    """Return the mode of each step as a letter: full (f), refresh (r), merged with caches (c) or without (m)."""
    assert all(plan.ratio == (0.0 if plan.mode is StepMode.FULL else 0.5) for plan in plans)
    assert all(plan.merged_ratio == (plan.ratio if plan.mode.merges else 0.0) for plan in plans)
    return "".join("frcm"[list(StepMode).index(plan.mode)] for plan in plans)


@loop(
    ("settings", "given", "expected"),
    [
        ({}, {}, "mmmmmmmmmm"),
        ({}, {"sigma_start": 8.0, "sigma_end": 3.0}, "ffmmmmmfff"),
        ({"full_step_interval": 3}, {}, "rccrccrccr"),
        ({"full_step_interval": 3}, {"sigma_end": 2.0}, "rccrccrcff"),
        ({"full_step_interval": 2}, {"sigma_start": 9.0}, "frcrcrcrcr"),
        # If the run finishes the picture and has full steps, its last step is full, for any interval and any range.
        ({}, {"finishes": True}, "mmmmmmmmmm"),
        ({"full_step_interval": 4}, {"finishes": True}, "rcccrcccrf"),
        ({"full_step_interval": 4}, {"finishes": True, "sigma_start": 8.0}, "ffrcccrccf"),
        # Steps that would be refreshes with a residual cache are full steps without one.
        ({"full_step_interval": 3, "granularity": "module"}, {}, "fmmfmmfmmf"),
        ({"full_step_interval": 4, "granularity": "module"}, {"finishes": True}, "fmmmfmmmff"),
        ({"full_step_interval": 4, "granularity": "module"}, {"finishes": True, "sigma_start": 8.0}, "fffmmmfmmf"),
        # Long runs begin with two full steps, unless they continue a run that has already formed the composition.
        ({"full_step_interval": 4}, {"finishes": True, "steps": 12}, "rcccrcccrccf"),
        ({"full_step_interval": 4}, {"finishes": True, "steps": 14}, "rrcccrcccrcccf"),
        ({"full_step_interval": 4}, {"finishes": True, "steps": 14, "continues_run": True}, "rcccrcccrcccrf"),
        ({"full_step_interval": 4}, {"finishes": True, "steps": 14, "sigma_start": 12.0}, "ffrcccrcccrccf"),
        # A run of two steps continues another run. With a KV cache its last step is merged, or it would merge none.
        ({"full_step_interval": 4, "kv_cache": True}, {**HALF_RUN, "steps": 2}, "rc"),
        ({"full_step_interval": 4, "kv_cache": True}, {"finishes": True, "steps": 2}, "rf"),
        ({"full_step_interval": 2, "kv_cache": True}, {**HALF_RUN, "steps": 2}, "rf"),
        ({"full_step_interval": 4, "kv_cache": True}, {**HALF_RUN, "steps": 3}, "rcf"),
        ({"full_step_interval": 4, "kv_cache": True}, {**HALF_RUN, "steps": 1}, "f"),
    ],
)
def test_modes(settings: dict[str, Any], given: dict[str, Any], expected: str) -> None:
    """The range excludes its end sigma. Full steps are counted from the first step of the range."""
    assert modes(plans_of(ToMAConfig(**{"kv_cache": True, **settings}), **given)) == expected


def test_in_long_runs_ratios_change_at_full_steps() -> None:
    plans = plans_of(
        ToMAConfig(full_step_interval=4, kv_cache=KVCache.ON), (8.5, {"a": 0.25}), (0.0, {"a": 0.5}), steps=14
    )
    assert [plan.ratio for plan in plans] == [0.25] * 5 + [0.5] * 9
    assert [step for step, plan in enumerate(plans) if plan.mode is StepMode.REFRESH] == [0, 1, 5, 9, 13]


# The manual sigmas of ComfyUI's template for the turbo LoRA of Qwen-Image 2.1.
QWEN_TURBO = (1.0, 0.978, 0.954, 0.927, 0.895, 0.845, 0.705, 0.415)
LTX = (1.0, 0.99375, 0.9875, 0.98125, 0.975, 0.909375, 0.725, 0.421875)


@loop(("every", "full"), [(4, [0, 6, 7]), (2, [0, 4, 5, 6, 7])])
def test_full_steps_are_the_last_where_a_run_begins_flat(every: int, full: list[int]) -> None:
    """If the first sigmas are nearly equal, all full steps but the first move to the end of the run."""
    config = ToMAConfig(full_step_interval=every, kv_cache=KVCache.ON)

    def full_of(sigmas: tuple[float, ...], **given: Any) -> list[int]:
        plans = [Schedule(config, sigmas, **given).decide(sigma) for sigma in sigmas]
        return [plan.step for plan in plans if not plan.merged_ratio]

    assert full_of(LTX, finishes=True) == full
    assert Schedule(config, LTX, finishes=True).cache_steps == 8
    by_interval = sorted({*range(0, 8, every), 7})
    even = tuple(3 * t / (1 + 2 * t) for t in (1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125))
    assert full_of(even, finishes=True) == by_interval
    assert full_of((1.0, 0.999, *LTX[1:]), finishes=True) == sorted({*range(0, 9, every), 8})
    assert full_of(QWEN_TURBO, finishes=True) == by_interval
    assert full_of(LTX) == list(range(0, 8, every)), "another run goes on from here"
    assert full_of(LTX, finishes=True, sigma_start=0.99) != full
    assert Schedule(config, even, finishes=True).cache_steps == every


def test_generations_count_from_the_first_merged_step() -> None:
    decisions = plans_of(ToMAConfig(selection_interval=4, weight_interval=2))
    assert [d.selection for d in decisions] == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]
    assert [d.weighing for d in decisions] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    decisions = plans_of(ToMAConfig(selection_interval=4, weight_interval=2), sigma_start=7.0)
    assert [d.selection for d in decisions] == [0, 0, 0, 0, 0, 0, 0, 1, 1, 1]
    assert [d.weighing for d in decisions] == [0, 0, 0, 0, 0, 1, 1, 2, 2, 3]


counts = st.integers(1, 12)


@given(
    st.builds(
        ToMAConfig,
        ratio=st.floats(0.01, 0.95),
        full_step_interval=st.sampled_from([0, 2, 3]),
        selection_interval=counts,
        weight_interval=counts,
    ),
    st.lists(st.floats(0, 11), min_size=2, max_size=2).map(sorted),
)
def test_decisions_are_legal(config: ToMAConfig, ends: list[float]) -> None:
    range_of = dict(zip(("sigma_end", "sigma_start"), ends, strict=True))
    decisions = plans_of(config, **range_of)
    assert [d.step for d in decisions] == list(range(10))
    for before, after in itertools.pairwise(decisions):
        assert after.selection >= before.selection >= 0
        assert after.weighing >= before.weighing >= 0
    for sigma, decision in zip(range(10, 0, -1), decisions, strict=True):
        assert 0 <= decision.ratio <= config.ratio
        assert not decision.ratio or range_of["sigma_end"] < sigma <= range_of["sigma_start"]


def test_blocks_have_ratios_by_sigma() -> None:
    """The first sigma range of the profile, above 6.5, covers steps 0 to 3."""
    decisions = plans_of(ToMAConfig(), (6.5, {"a": 0.75, "b": 0.25}), (0.0, {"a": 0.5}))
    assert [d.ratio for d in decisions] == [0.75] * 4 + [0.5] * 6
    assert [d.of("a").ratio for d in decisions] == [0.75] * 4 + [0.5] * 6
    assert [d.of("b").ratio for d in decisions] == [0.25] * 4 + [0.0] * 6
    assert {d.of("elsewhere").ratio for d in decisions} == {0.0}
    assert [len(d.in_use) for d in decisions] == [2] * 4 + [1] * 6
    assert decisions[0].joins("a", "a")
    assert not decisions[0].joins("a", "b")
    assert plans_of(ToMAConfig())[0].of("a").ratio == 0.5
    assert plans_of(ToMAConfig())[0].joins("a", "b")


def test_one_ratio_everywhere_decides_as_the_setting_does() -> None:
    config = ToMAConfig(ratio=0.4, full_step_interval=3, selection_interval=3)
    same = plans_of(config, (4.5, {"a": 0.4}), (0.0, {"a": 0.4}), finishes=True)
    assert [dataclasses.replace(plan.of("a"), ratios=None) for plan in same] == plans_of(config, finishes=True)


def test_blocks_keep_their_ratio_between_full_steps() -> None:
    """A full step has the ratios of the merged steps after it: step 6, at sigma 4, has those of sigmas below 3.5."""
    config = ToMAConfig(full_step_interval=3, kv_cache=KVCache.ON)
    decisions = plans_of(config, (7.5, {"a": 0.75}), (3.5, {"a": 0.25}), (0.0, {"b": 0.5}))
    assert [d.of("a").ratio for d in decisions] == [0.75] * 3 + [0.25] * 3 + [0.0] * 4
    assert [d.of("b").ratio for d in decisions] == [0.0] * 6 + [0.5] * 4
    assert [d.mode is StepMode.REFRESH for d in decisions] == [step % 3 == 0 for step in range(10)]
    assert modes(plans_of(config, (6.5, {}), (0.0, {"a": 0.5}))) == "fffrccrccr", "a sigma range without merging"


def test_every_ratio_has_a_kind() -> None:
    """Kernels for all `kinds` are compiled at the first plan, so no ratio may be missing."""
    ratio_schedule = ((6.5, {"a": 0.75, "b": 0.25, "c": 0.0}), (0.0, {"a": 0.5}))
    config = ToMAConfig(selection_interval=1)
    kinds = Schedule(config, sigmas_of(10), ratio_schedule=ratio_schedule).kinds
    assert sorted({(d.ratio, d.selection % 2) for d in kinds}) == [(r, s) for r in (0.25, 0.5, 0.75) for s in (0, 1)]


def test_a_profile_without_merging_in_a_sigma_range_is_named() -> None:
    interval, profile = Reason.SETTING(setting="full_step_interval", value=3), Reason.PROFILE()
    for every, low, why in ((3, None, (interval,)), (3, {"a": 0.0}, (interval, profile)), (0, {}, (profile,))):
        bands = ((0.0, {"a": 0.5}),) if low is None else ((4.0, {"a": 0.5}), (0.0, low))
        assert (
            Schedule(
                ToMAConfig(full_step_interval=every, kv_cache=KVCache.ON), sigmas_of(10), ratio_schedule=bands
            ).why_full()
            == why
        )


@loop(
    ("steps", "settings", "few"),
    [
        (1, {"full_step_interval": 4}, True),
        (2, {"full_step_interval": 2}, True),
        (3, {"full_step_interval": 2}, False),
        (1, {}, False),
        (2, {"full_step_interval": 2, "start_percent": 0.5}, False),
    ],
)
def test_too_few_steps_are_the_reason_where_every_step_is_full(steps: int, settings: dict[str, Any], few: bool) -> None:
    schedule = Schedule(ToMAConfig(**settings), sigmas_of(steps), finishes=True)
    assert (schedule.why_full() == (Reason.TOO_FEW_STEPS(),)) is few


def test_the_share_of_predictions_grows_to_all() -> None:
    schedule = Schedule(ToMAConfig(), (1.0, 0.99, 0.6))
    shares = [schedule.predicted_share(step) for step in range(4)]
    assert shares == pytest.approx([0.01, 0.4, 1.0, 1.0])
    assert Schedule(ToMAConfig(), (1.0, 1.0, 0.6)).predicted_share(0) == 0.0, "the same noise level twice"
    assert Schedule(ToMAConfig(), (0.2, 0.9)).predicted_share(0) == 1.0, "unsampling"
    assert Schedule(ToMAConfig()).predicted_share(0) == 1.0
