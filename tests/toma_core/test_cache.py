"""The residual cache: residuals are cached by key, propagated by the change at destinations, and dropped when old."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.loop import loop
from tests.toma_core.plans import plan_for
from toma_core import (
    Evaluation,
    RunState,
    Schedule,
    StepMode,
    ToMAConfig,
    coverage,
    decide,
    merge,
    reduce,
    restore,
    unmerge,
)
from toma_core.decision import Facts
from toma_core.merge import MergePlan, gather_destinations
from toma_core.propagation import DELTA_WEIGHT, Cached
from toma_core.reasons import Reason

GRID = (8, 8)
SETTINGS = {"min_tokens": 4, "full_step_interval": 3, "weight_interval": 10}


def run_of(**settings: object) -> RunState:
    config = ToMAConfig(**{**SETTINGS, **settings})  # type: ignore[arg-type]
    return RunState(Schedule(config, tuple(float(10 - i) for i in range(10))))


def at(run: RunState, step: int, *cond_keys: str, takes_part: tuple[str, ...] = ()) -> Evaluation:
    """Return an evaluation. takes_part: its conditions, if they are not those of the call."""
    signatures = dict.fromkeys(takes_part or cond_keys)
    return Evaluation(run, decide(run, Facts(10.0 - step, conditions=signatures)), (None,) * len(cond_keys), cond_keys)


def merging(run: RunState, step: int, *cond_keys: str) -> Evaluation:
    """Return a merged evaluation regardless of caches, as for a block without a cache."""
    return Evaluation(run, run.schedule.decide(10.0 - step), (None,) * len(cond_keys), cond_keys)


def modes(run: RunState, *evaluations: tuple[int, str]) -> str:
    """Return a letter for each (step, conditions of a letter each): full, refresh, merged with caches or without."""
    said = []
    for step, conditions in evaluations:
        plan = at(run, step, *conditions).step_plan
        said.append("frmp"[list(StepMode).index(plan.mode)])
        if plan.mode is StepMode.REFRESH:
            run.coverage.store(tuple(("block", c) for c in conditions), torch.zeros(len(conditions), 64, 6))
    return "".join(said)


def block(x: Tensor) -> Tensor:
    """A block whose residual a mean of tokens cannot represent."""
    return x + x.roll(1, dims=1).sin()


def passed(
    x: Tensor, evaluation: Evaluation, name: str = "block", body: Callable[[Tensor], Tensor] = block
) -> tuple[Tensor, MergePlan]:
    plan = plan_for(x, GRID, "scope", evaluation)
    assert plan is not None
    detail = evaluation.cached(name, x)
    reduced = reduce(x, plan, detail)
    return restore(body(reduced), reduced, x, plan, detail), plan


def features(seed: int, batch: int = 1) -> Tensor:
    return torch.randn(batch, 64, 6, generator=torch.Generator().manual_seed(seed))


def merged(x: Tensor, plan: MergePlan) -> Tensor:
    """Compute plain merging, of means, without a cache."""
    reduced = merge(x, plan)
    return x + unmerge(block(reduced) - reduced, plan)


def still(fresh: Tensor, old: Tensor) -> Tensor:
    """Compute the least-squares factor of `old` for `fresh`, by image."""
    found = [torch.linalg.lstsq(o.reshape(-1, 1), f.reshape(-1, 1)).solution for f, o in zip(fresh, old, strict=True)]
    return torch.stack(found).clamp(0, 1)


def reused(later: Tensor, x: Tensor, plan: MergePlan) -> Tensor:
    """Compute the propagated residual of x from the residuals of later's destinations."""
    kept, reduced = block(x) - x, gather_destinations(later, plan)
    fresh, old = block(reduced) - reduced, gather_destinations(kept, plan)
    left = still(fresh, old)
    return later + left * kept + unmerge((1 - (1 - DELTA_WEIGHT) * left) * (fresh - left * old), plan)


def test_a_full_step_is_the_block_itself_and_merged_ones_start_from_its_residual() -> None:
    run, x = run_of(), features(0)
    out, plan = passed(x, at(run, 0, "cond"))
    assert torch.equal(out, block(x))
    for step in (1, 2):
        later = features(step)
        out, used = passed(later, at(run, step, "cond"))
        assert used is plan
        torch.testing.assert_close(out, reused(later, x, plan))


@loop(("factor", "size"), [(1.0, 1.0), (0.6, 1.0), (0.0, 1.0), (-2.0, 1.0), (3.0, 1.0), (1.0, 0.0)])
def test_as_much_is_reused_as_destinations_still_show(factor: float, size: float) -> None:
    """A smaller residual scales the cached one; a zero or opposite one removes it; the cached residual never grows."""
    run, x = run_of(), features(0, 2)
    cond_keys = ("cond", "uncond")
    first = at(run, 0, *cond_keys)
    plan, detail = plan_for(x, GRID, "scope", first), first.cached("block", x)
    update = size * features(7, 2)
    restore(x + update, x, x, plan, detail)
    later = at(run, 1, *cond_keys)
    plan, detail = plan_for(x, GRID, "scope", later), later.cached("block", x)
    assert plan is not None
    reduced, seen = reduce(x, plan, detail), factor * gather_destinations(update, plan)
    left = min(max(factor, 0.0), 1.0)
    moved = unmerge((1 - (1 - DELTA_WEIGHT) * left) * (seen - left * gather_destinations(update, plan)), plan)
    torch.testing.assert_close(restore(reduced + seen, reduced, x, plan, detail), x + left * update + moved)


@loop("order", [("cond", "uncond"), ("uncond", "cond")])
def test_each_part_gets_its_own_in_one_batch_or_in_two_calls(order: tuple[str, str]) -> None:
    run, x = run_of(), {"cond": features(0), "uncond": features(1)}
    _, plan = passed(torch.cat([x["cond"], x["uncond"]]), at(run, 0, "cond", "uncond"))
    one = plan_for(x["cond"], GRID, "scope", at(run, 0, "cond"))
    assert one is not None
    assert plan.dest_slots.shape[0] == 2
    later = features(2)
    out, _ = passed(torch.cat([later, later]), at(run, 1, *order))
    expected = [reused(later, x[name], one) for name in order]
    torch.testing.assert_close(out, torch.cat(expected))
    for name in order:
        torch.testing.assert_close(passed(later, at(run, 1, name))[0], reused(later, x[name], one))


def test_parts_in_the_cached_order_are_not_copied() -> None:
    run, update = run_of(), features(0, 2)
    run.coverage.store((("", "cond"), ("", "uncond")), update)
    assert run.cache.read((("", "cond"), ("", "uncond")), update) is update
    other = run.cache.read((("", "uncond"), ("", "cond")), update)
    assert other is not None
    assert torch.equal(other, update.flip(0))
    run.coverage.store((("", "cond"),), features(1))
    both = run.cache.read((("", "cond"), ("", "uncond")), update)
    assert both is not None
    assert torch.equal(both, torch.cat([features(1), update[1:]])), "the newer one"


@loop(
    ("name", "cond_keys", "later"),
    [
        ("other", ("cond",), features(5)),
        ("block", ("tile",), features(5)),
        ("block", ("cond", "tile"), features(5, 2)),
        ("block", ("cond",), features(5, 2)),
        ("block", ("cond",), features(5).bfloat16()),
    ],
)
def test_without_a_cache_that_fits_a_step_is_merged_plainly(name: str, cond_keys: Any, later: Tensor) -> None:
    """Of another block, condition, batch size or dtype. A condition without a cache leaves its batch without one."""
    run = run_of()
    passed(features(0), at(run, 0, "cond"))
    out, plan = passed(later, merging(run, 1, *cond_keys), name)
    torch.testing.assert_close(out, merged(later, plan))
    assert not torch.equal(merge(later, plan), gather_destinations(later, plan))


def test_the_next_full_step_replaces_everything() -> None:
    run = run_of()
    passed(features(0), at(run, 0, "cond"), "gone later")
    passed(features(1), at(run, 0, "cond"))
    x, later = features(2), features(3)
    _, plan = passed(x, at(run, 3, "cond"))
    torch.testing.assert_close(passed(later, at(run, 4, "cond"))[0], reused(later, x, plan))
    torch.testing.assert_close(passed(later, at(run, 4, "cond"), "gone later")[0], merged(later, plan))


def test_a_condition_without_a_cache_makes_a_step_a_refresh_for_all_and_the_next_is_merged() -> None:
    run, x = run_of(), features(0, 2)
    assert at(run, 0, "cond", "uncond").step_plan.mode is StepMode.REFRESH
    passed(x, at(run, 0, "cond", "uncond"))
    assert at(run, 1, "uncond").step_plan.mode is StepMode.MERGED_CACHED, "one less needs no cache"
    evaluation = at(run, 1, "cond", "late")
    assert evaluation.step_plan.mode is StepMode.REFRESH
    out, _ = passed(x, evaluation)
    assert torch.equal(out, block(x))
    later, following = features(4, 2), at(run, 2, "cond", "late")
    assert following.step_plan.mode is StepMode.MERGED_CACHED
    out, plan = passed(later, following)
    torch.testing.assert_close(out, reused(later, x, plan))
    assert run.stats.full_reasons == {Reason.NOT_CACHED(): {1}}


def test_what_is_not_covered_by_a_recent_refresh_is_one() -> None:
    """No order gives a plain merge; several signatures have separate caches."""
    assert modes(run_of(), *((n, f"{n}") for n in range(4))) == "rrrr", "another at every step"
    assert modes(run_of(), (0, "a"), (1, "b"), (2, "a"), (2, "b"), (3, "a"), (3, "b"), (4, "ab")) == "rrmmrrm"
    assert modes(run_of(), (0, "a"), (2, "a"), (4, "a"), (5, "a")) == "rmrm", "the scheduled one was skipped"
    assert modes(run_of(), (0, "a"), (8, "a"), (1, "a"), (1, "a")) == "rrrm", "a step that goes back"
    assert modes(run_of(), (0, "ab"), (1, "ab"), (1, "abc"), (2, "cba")) == "rmrm"


def test_settings_that_skip_blocks_merge_plainly_what_changes_at_every_step() -> None:
    """At most one step between two scheduled refreshes becomes a refresh."""
    run = run_of(skip_first_blocks=1)
    assert modes(run, *((n, f"{n}") for n in range(6))) == "rrprrp"
    assert Evaluation(run, at(run, 2, "x").step_plan).cached("block", features(0)) is None
    assert modes(run_of(skip_first_blocks=1), (0, "ab"), (1, "c"), (1, "d"), (1, "a")) == "rrrm"


def test_an_increasing_sigma_is_not_covered() -> None:
    run = run_of()

    def mode(sigma: float, step: int) -> StepMode:
        plan = decide(run, Facts(sigma, step, conditions={"c": None}))
        run.coverage.store((("block", "c"),), features(0))
        return plan.mode

    assert [mode(10.0, 0), mode(8.0, 1), mode(9.0, 2)] == [StepMode.REFRESH, *[StepMode.MERGED_CACHED] * 2]
    assert [mode(3.0, 3), mode(4.0, 4), mode(9.0, 5)] == [StepMode.REFRESH, StepMode.MERGED_CACHED, StepMode.REFRESH]


@loop("refreshed", [10.0, 7.0, 2.0])
def test_a_refresh_at_a_distant_noise_level_does_not_serve(refreshed: float) -> None:
    """Whichever step it was in: another node may change the noise level that the model is given."""
    run = run_of()
    assert decide(run, Facts(7.0, 3, refreshed, conditions={"c": None})).mode is StepMode.REFRESH
    run.coverage.store((("block", "c"),), features(0))
    near = decide(run, Facts(6.0, 4, 6.0, conditions={"c": None})).mode is StepMode.MERGED_CACHED
    assert near is (refreshed == 7.0)


def test_another_state_is_not_covered() -> None:
    """This occurs when a ControlNet begins."""
    run = run_of()
    for step, state, mode in ((0, "off", "refresh"), (1, "off", "merged cached"), (2, "on", "refresh")):
        assert decide(run, Facts(10.0 - step, conditions={"c": state})).mode.value == mode
        run.coverage.store((("block", "c"),), features(0))


def test_a_condition_that_is_named_and_never_evaluated_asks_for_nothing() -> None:
    run = run_of()
    assert decide(run, Facts(10.0, conditions={"c": None, "ghost": None})).mode is StepMode.REFRESH
    run.coverage.store((("block", "c"),), features(0))
    assert decide(run, Facts(9.0, conditions={"c": None, "ghost": None})).mode is StepMode.MERGED_CACHED
    assert decide(run_of(), Facts(9.0, conditions={"c": None})).mode is StepMode.REFRESH


def test_the_oldest_goes_where_there_is_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that alternate have separate caches within the limit."""
    monkeypatch.setattr(coverage, "MAX_CACHE_BYTES", 2 * features(0).nbytes)
    run = run_of()
    assert modes(run, (0, "a"), (1, "b"), (2, "a"), (2, "b"), (2, "c"), (2, "b"), (2, "a")) == "rrmmrmr"
    assert not run.cache.disabled


def test_devices_that_keep_at_once_lose_nothing() -> None:
    """The order of two threads is forced: both begin to cache before either finishes."""
    run = run_of()
    first, second = (
        at(run, 0, "cond", takes_part=("cond", "uncond")),
        at(run, 0, "uncond", takes_part=("cond", "uncond")),
    )
    for evaluation, seed in ((second, 1), (first, 0)):
        detail = evaluation.cached("block", features(seed))
        assert detail is not None
        detail.store(features(seed))
    kept = run.cache.read((("block", "cond"), ("block", "uncond")), features(0, 2))
    assert kept is not None
    assert torch.equal(kept, torch.cat([features(0), features(1)]))


def test_memory_is_counted_and_freed() -> None:
    run = run_of()
    for name in ("a", "b"):
        passed(features(0, 2), at(run, 0, "cond", "uncond"), name)
    one = features(0, 2).nbytes
    passed(features(0, 2), at(run, 3, "cond", "uncond"), "a")
    assert run.cache.peak_bytes == 2 * one
    held = [weakref.ref(update) for update, _, _ in run.cache._entries.values()]
    assert len(held) == 2
    assert run.close().cache_bytes == 2 * one
    assert [ref() for ref in held] == [None, None]


def test_nothing_is_cached_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are then full. The limit applies to videos only."""
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
    assert list(run.stats.full_reasons) == [Reason.CACHE_DISABLED()]
    skipping = run_of(skip_first_blocks=1)
    skipping.coverage.disable()
    assert [at(skipping, step, "cond").step_plan.mode for step in (1, 3)] == [StepMode.MERGED, StepMode.FULL]
    assert run.cache._entries == {}
    stats = run.close()
    assert stats.cache_disabled


def test_a_residual_is_held_and_counted_as_long_as_one_of_its_parts() -> None:
    run, first = run_of(), features(0, 2)
    held = weakref.ref(first)
    one = features(0).nbytes
    run.coverage.store((("", "a"), ("", "b")), first)
    del first
    run.coverage.store((("", "c"), ("", "d")), features(1, 2))
    assert held() is not None
    assert run.cache.peak_bytes == 4 * one, "memory of a part is that of the joint residual"
    run.coverage.store((("", "a"), ("", "b")), features(2, 2))
    assert held() is None
    assert run.cache.peak_bytes == 4 * one


@loop("packs", [False, True])
def test_parts_of_a_joint_residual_are_held_once(packs: bool) -> None:
    """Conditions are joined in one call, then split."""
    run, first = run_of(), torch.randn(2, 8, 64)
    run.coverage.store((("", "a"), ("", "b")), first.clone(), packs)
    held = run.cache.peak_bytes
    for step in range(2):
        for n, key in enumerate("ab"):
            moved = first[n : n + 1] * (step + 2)
            run.cache.put((("", key),), moved, packs)
            found = run.cache.read((("", key),), moved)
            assert found is not None
            torch.testing.assert_close(found, moved, rtol=0, atol=0.3 * (step + 2) if packs else 0.0)
    assert run.cache.peak_bytes == held
    both = run.cache.read((("", "b"), ("", "a")), first)
    assert both is not None
    torch.testing.assert_close(both, 3 * first.flip(0), rtol=0, atol=0.9 if packs else 0.0)


def test_it_is_not_disabled_while_a_merged_step_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a block would have keys of all tokens and values of some."""
    run = run_of()
    run.coverage.store((("", "key"),), features(0))
    run.cache.bounded = True
    monkeypatch.setattr(coverage, "MAX_CACHE_BYTES", 1)
    run.cache.put((("", "key"),), features(1))
    assert run.cache.read((("", "key"),), features(1)) is not None
    run.coverage.enforce_limit()
    assert run.cache.disabled
    assert run.cache.read((("", "key"),), features(1)) is None


def test_a_refresh_that_another_node_skips_keeps_the_cache_and_the_next_evaluation_refreshes() -> None:
    """With a step cache inside the model, the mode is decided but no block is called."""
    run, x = run_of(), features(0)
    passed(x, at(run, 0, "cond"))
    for step in (3, 4):
        assert at(run, step, "cond").step_plan.mode is StepMode.REFRESH
        torch.testing.assert_close(run.cache.read((("block", "cond"),), x), block(x) - x)
    passed(x, at(run, 4, "cond"))
    assert at(run, 5, "cond").step_plan.mode is StepMode.MERGED_CACHED


def test_propagated_residuals_are_within_the_limits_of_half_precision() -> None:
    """A token beyond the limits would be infinite, and NaN when a later step subtracts it."""
    run = run_of()
    plan = plan_for(features(0).half(), GRID, "scope", merging(run, 1, "a"))
    assert plan is not None
    x = torch.full((1, 64, 6), 65504.0)
    x = x.scatter(1, plan.destinations[..., None].expand(-1, -1, 6), 65000.0).half()
    fresh = torch.full((1, plan.num_destinations, 6), 65504.0, dtype=torch.float16)
    moved = Cached(run.cache, (("block", "a"),), x).propagate(fresh, plan)
    assert moved.isfinite().all()
    assert run.cache.read((("block", "a"),), x) is moved


@loop("quantized", [False, True])
def test_a_condition_that_takes_the_place_of_another_holds_its_own_memory_alone(quantized: bool) -> None:
    """Prompts that take turns beside one negative prompt: three conditions, not two pairs."""
    cache, (one, two) = RunState(Schedule(ToMAConfig())).cache, torch.randn(2, 2, 8, 64)
    cache.put((("a", "negative"), ("a", "first")), one, quantized)
    each = cache.held // 2
    cache.put((("a", "negative"), ("a", "second")), two, quantized)
    assert (cache.held, cache.peak_bytes) == (3 * each, 3 * each)
    for name, wanted in (("negative", two[:1]), ("first", one[1:]), ("second", two[1:])):
        found = cache.read((("a", name),), wanted)
        assert found is not None
        assert torch.allclose(found, wanted, atol=0.4 if quantized else 0)
    cache.drop([("a", "second")])
    assert cache.held == 2 * each
