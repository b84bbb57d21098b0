"""Test which cached entries are valid, which evaluations are refreshes, and what a cache beyond its limit drops."""

from typing import Any

import pytest
import torch

from tests.loop import loop
from tests.toma_core.cached_runs import at, block, features, letter, modes, passed, run_of
from toma_core import StepMode, coverage, decide
from toma_core.decision import Facts
from toma_core.reasons import Reason


def test_what_is_not_covered_by_a_recent_refresh_is_one() -> None:
    assert modes(run_of(), *((n, f"{n}") for n in range(4))) == "rrrr", "another at every step"
    assert modes(run_of(), (0, "a"), (1, "b"), (2, "a"), (2, "b"), (3, "a"), (3, "b"), (4, "ab")) == "rrmmrrm"
    assert modes(run_of(), (0, "a"), (2, "a"), (4, "a"), (5, "a")) == "rmrm", "the scheduled one was skipped"
    assert modes(run_of(), (0, "a"), (8, "a"), (1, "a"), (1, "a")) == "rrrm", "a step that goes back"
    run = run_of()
    assert modes(run, (0, "ab"), (1, "b"), (1, "abc"), (2, "cba")) == "rmrm", "all are refreshed for c"
    assert run.stats.full_reasons == {Reason.NOT_CACHED(): {1}}


@pytest.mark.parametrize("facts", [{"new_noise": 0.9}, {"unknown": Reason.UNKNOWN_LATENT()}, {"another": True}])
def test_a_run_with_a_kv_cache_merges_nothing_without_it(facts: dict[str, Any]) -> None:
    """A run with too little memory skips some blocks. Steps that cannot use its KV cache must still merge nothing."""
    run = run_of(skip_first_blocks=0.15, full_step_interval=4)
    assert modes(run, (0, "c")) == "r"
    for step in (1, 2, 3):
        assert not decide(run, Facts(10.0 - step, conditions={"c": None}, **facts)).mode.merges


@loop(
    ("evaluations", "expected"),
    [
        # Sigmas may rise a little, but not above the sigma of the refresh.
        ([(10.0, 0), (8.0, 1), (9.0, 2), (3.0, 3), (4.0, 4), (9.0, 5)], "rmmrmr"),
        # If another node changes the model's sigma, that sigma counts. It must be near the model's sigma of the
        # refresh.
        ([(7.0, 3, 7.0), (6.0, 4, 6.0)], "rm"),
        ([(7.0, 3, 10.0), (6.0, 4, 6.0)], "rr"),
        ([(7.0, 3, 2.0), (6.0, 4, 6.0)], "rr"),
        # The state of a condition changes when, for example, a ControlNet begins.
        ([(10.0, 0, None, 0, {"c": "off"}), (9.0, 1, None, 0, {"c": "off"}), (8.0, 2, None, 0, {"c": "on"})], "rmr"),
        # A condition that is in `conditions` but is never evaluated needs no cached entries.
        ([(10.0, 0, None, 0, {"c": None, "ghost": None}), (9.0, 1, None, 0, {"c": None, "ghost": None})], "rm"),
        ([(9.0, 1)], "r"),
    ],
)
def test_what_a_refresh_covers(evaluations: list[tuple[Any, ...]], expected: str) -> None:
    run, found = run_of(), ""
    for facts in evaluations:
        given = Facts(*facts) if len(facts) == 5 else Facts(*facts, conditions={"c": None})
        found += letter(decide(run, given))
        run.coverage.store((("block", "c"),), features(0))
    assert found == expected


def test_a_condition_that_appears_in_a_refresh_that_another_node_skips_is_refreshed_next() -> None:
    run = run_of()
    modes(run, (0, "a"))
    for sigma in (9.0, 8.0):
        assert decide(run, Facts(sigma, conditions={"a": None, "b": None})).mode is StepMode.REFRESH


def test_the_oldest_goes_where_there_is_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coverage, "MAX_CACHE_BYTES", 2 * features(0).nbytes)
    run = run_of()
    assert modes(run, (0, "a"), (1, "b"), (2, "a"), (2, "b"), (2, "c"), (2, "b"), (2, "a")) == "rrmmrmr"
    assert not run.cache.disabled


def test_nothing_is_cached_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only caches of videos have a limit (`bounded`). Steps that would need the disabled cache are full."""
    monkeypatch.setattr(coverage, "MAX_CACHE_BYTES", 2 * features(0).nbytes)
    picture = run_of()
    for name in ("a", "b", "c"):
        passed(features(0), at(picture, 0, "cond"), name)
    assert len(picture.cache._entries) == 3
    run = run_of()
    run.cache.bounded = True
    for name in ("a", "b", "c"):
        out, _ = passed(features(0), at(run, 0, "cond"), name)
        assert torch.equal(out, block(features(0)))
    assert [at(run, step, "cond").step_plan.mode for step in (1, 3)] == [StepMode.FULL] * 2
    assert list(run.stats.full_reasons) == [Reason.KV_CACHE_DISABLED()]
    assert run.cache._entries == {}


def test_it_is_not_disabled_while_a_merged_step_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a merged step disabled the cache, a block could get keys of all tokens but values of destinations only."""
    run, keys = run_of(), (("", "key"),)
    run.cache.bounded = True
    monkeypatch.setattr(coverage, "MAX_CACHE_BYTES", 1)
    run.cache.put(keys, features(1))
    assert run.cache.read(keys, features(1)) is not None
    run.coverage.enforce_limit()
    assert run.cache.disabled
    assert run.cache.read(keys, features(1)) is None


def test_a_refresh_that_another_node_skips_keeps_the_cache_and_the_next_evaluation_refreshes() -> None:
    """If a step cache skips a refresh, blocks are not called, so nothing new is cached."""
    run, x = run_of(), features(0)
    passed(x, at(run, 0, "cond"))
    for step in (3, 4):
        assert at(run, step, "cond").step_plan.mode is StepMode.REFRESH
        torch.testing.assert_close(run.cache.read((("block", "cond"),), x), block(x) - x)
    passed(x, at(run, 4, "cond"))
    assert at(run, 5, "cond").step_plan.mode is StepMode.MERGED_CACHED


def test_a_refresh_that_is_broken_off_stores_nothing_more() -> None:
    """If one of several devices fails in a refresh, the others continue with their calls. These calls must cache
    nothing."""
    for stop in ("clear", "broken_off"):
        run, x = run_of(), features(0)
        evaluation = at(run, 0, "cond")
        passed(x, evaluation, "first")
        getattr(run.coverage, stop)()
        passed(x, evaluation, "second")
        assert run.cache.keys == ()
