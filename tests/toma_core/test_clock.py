"""The clock claims a speed-up only where whole and merged steps of one run can be compared."""

from __future__ import annotations

import time

import pytest

from toma_core.clock import StepClock
from toma_core.stats import RunStats


def clock(*seconds: float) -> StepClock:
    """A clock whose steps took so long; the last one's end is never seen."""
    began = {0: 100.0}
    for step, value in enumerate(seconds):
        began[step + 1] = began[step] + value
    return StepClock(began)


def test_first_and_last_step_are_not_timed() -> None:
    assert clock(9.0, 2.0, 3.0).seconds() == {1: 2.0, 2: 3.0}
    assert StepClock().seconds() == {}


def test_only_the_first_evaluation_of_a_step_counts() -> None:
    running = StepClock()
    running.tick(0)
    first = running.began[0]
    time.sleep(0.002)
    running.tick(0)
    running.tick(1)
    assert running.began[0] == first
    assert running.began[1] > first + 0.001


def test_steps_that_were_skipped_or_run_backwards_are_not_timed() -> None:
    assert StepClock({0: 0.0, 1: 1.0, 3: 2.0, 4: 3.0}).seconds() == {3: 1.0}
    assert StepClock({0: 0.0, 3: 1.0, 2: 2.0}).seconds() == {}


def test_speedup_is_that_of_the_run_not_of_the_merged_steps() -> None:
    # Four merged steps of 1 s and four whole ones of 2 s: 12 s instead of 16 s.
    run = clock(9.0, 1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0)
    assert run.speedup({0, 1, 2, 3, 4}) == pytest.approx(16 / 12)
    assert run.speedup({5, 6, 7, 8, 9}) == pytest.approx(8 / 12), "slower is said too"


@pytest.mark.parametrize("merged", [set(), set(range(9)), {1}, set(range(8))])
def test_nothing_is_claimed_without_two_steps_of_each_kind(merged: set[int]) -> None:
    assert clock(9.0, 1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0).speedup(merged) is None


def test_nothing_is_claimed_where_steps_of_a_kind_differ() -> None:
    skipped = clock(9.0, 1.0, 1.0, 1.0, 1.0, 2.0, 0.1, 2.0, 0.1)
    assert skipped.speedup({0, 1, 2, 3, 4}) is None
    jittery = clock(9.0, 1.0, 1.1, 1.2, 1.0, 2.0, 2.2, 2.1, 2.0)
    assert jittery.speedup({0, 1, 2, 3, 4}) is not None


def test_one_slow_step_among_many_is_forgiven() -> None:
    slow = [9.0, 1.0, 1.0, 1.5, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0]
    assert clock(*slow).speedup(set(range(7))) is not None


def test_headline_says_a_speed_only_if_it_was_measured() -> None:
    stats = RunStats(total_steps=9, merged_steps={0: 0.5, 1: 0.5, 2: 0.5}, grids={(8, 8): 32})
    stats.merged("double.0")
    stats.whole("double.1", "fewer than 9 tokens")
    assert stats.headline() == "On: half of the tokens merged, 1 of 2 blocks, 3 of 9 steps"
    stats.clock = clock(9.0, 1.0, 1.0, 2.0, 2.0)
    assert stats.headline() == "On: half of the tokens merged, 1 of 2 blocks, 3 of 9 steps, 1.33x as fast"
    stats.detail_bytes = 1000  # full steps that also gather detail are slower than a run without ToMA
    assert stats.headline().endswith("steps")


def test_headline_says_why_nothing_was_merged() -> None:
    stats = RunStats()
    stats.whole("double.0", "fewer than 9 tokens")
    assert stats.headline() == "Nothing was merged: fewer than 9 tokens"
