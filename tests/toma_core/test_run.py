"""Test when plans are made, shared and dropped, and that nothing waits for the device."""

import gc
import random
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.loop import loop
from tests.toma_core.plans import randn, run_of, same, step_of
from toma_core.merge import MergePlan, merge, stacked, unmerge, weigh
from toma_core.schedule import StepMode, StepPlan

GRID = (7, 9)


def features(seed: int, batch: int = 1, grid: tuple[int, int] = GRID) -> torch.Tensor:
    return randn(seed, batch, grid[0] * grid[1], 6)


@loop("seed", range(30))
def test_plans_equal_those_of_a_run_without_sharing(seed: int) -> None:
    """A batch consists of chunks. Each chunk shows a random part of the latent; cond and uncond show the same part. All
    chunks of a part get the plan of its first chunk. Destinations and weights are made when they are due. Otherwise
    they come from an earlier call with the same blocks, part, grid, number of images and dtype."""
    chance, run, made = random.Random(seed), run_of(), dict[Any, tuple[MergePlan, int, int]]()  # noqa: S311 - cases
    selection = weighing = selections = weighings = 0
    for call in range(12):
        selection += chance.random() < 0.2
        weighing += chance.random() < 0.3
        scope, grid, images = chance.choice("ab"), chance.choice((GRID, (9, 7))), chance.choice((1, 2))
        keys = chance.choices((None, "left", "right"), k=chance.randint(1, 3))
        x = features(call, images * len(keys), grid).to(chance.choice((torch.float32, torch.bfloat16)))
        plan = run.plan(x, grid, scope, step_of(0.5, selection, weighing), tuple(keys))
        parts = dict(reversed([*zip(keys, x.chunk(len(keys)), strict=True)]))
        for key, part in parts.items():
            at = scope, key, grid, images, x.dtype
            old, selected, weighed = made.get(at, (None, -1, -1))
            if old is None or selected != selection:
                own = run_of().plan(part, grid, "alone", step_of(0.5, selection), (None,))
                selections += 1
            elif weighed != weighing:
                sharpness, tokens = run.config.sharpness, old.windows.split(part)
                own = weigh(tokens, old.dest_slots, old.windows, old.budget, sharpness, x.dtype)
            else:
                continue
            weighings += 1
            made[at] = own, selection, weighing
        assert same(plan, stacked([made[scope, key, grid, images, x.dtype][0] for key in keys])), call
        assert (run.stats.selections, run.stats.weighings) == (selections, weighings)


def test_unused_plans_are_dropped() -> None:
    """New plans replace earlier ones of their grid. The plan of an unused grid remains, because it will be drawn."""
    run, x = run_of(), features(0)
    run.plan(x, (9, 7), "a", step_of(), (None,))
    for selection in range(4):
        for window in range(3):
            frames = selection, window
            run.plan(x, GRID, "a", step_of(selection=selection), (frames,))
            run.plan(torch.cat([x, x]), GRID, "a", step_of(selection=selection), (frames, ("other", selection)))
    assert len(run._plans) == 1 + 4
    assert len(run._stacks) == 3
    run.draw()
    assert set(run.stats.maps) == {GRID, (9, 7)}


def test_plans_of_several_areas_are_put_together_once() -> None:
    run, x = run_of(), features(1, 3)
    plan_keys = ("l", "r", "l")
    first, again, newer, newest = (run.plan(x, GRID, "a", step_of(weighing=w), plan_keys) for w in (0, 0, 1, 1))
    assert again is first is not newer is newest


def test_windows_shift_at_every_other_selection() -> None:
    run = run_of()
    cuts = [run.plan(features(0), GRID, "a", step_of(selection=s), (None,)).windows.cuts for s in range(4)]
    assert cuts[0] == cuts[2] != cuts[1] == cuts[3]
    still = run_of(granularity="module")
    assert len({still.plan(features(0), GRID, "a", step_of(selection=s), (None,)).windows.cuts for s in range(4)}) == 1


@loop("pictures", [(), (randn(3, 1, 4, 14, 18),)], ids=("tokens", "picture"))
@loop("keys", [("left", "right"), ("left",)], ids=str)
def test_tokens_take_turns_where_what_is_cached_is_propagated(keys: tuple[str, ...], pictures: Any) -> None:
    """If tokens do not change, a step that propagates caches selects mostly tokens that the step before did not select.
    After a refresh, which computes all tokens, the first selection is repeated. Steps that propagate nothing always
    repeat the first selection."""
    run = run_of(kv_cache=True, full_step_interval=4)

    def kept(selection: int, mode: StepMode = StepMode.MERGED_CACHED) -> set[int]:
        step = StepPlan(0, mode, 0.5, selection)  # all selections here are even, so windows are equal
        plans = [run.plan(features(0), GRID, "a", step, (key,), pictures=pictures) for key in keys]
        assert all(same(plan, plans[0]) for plan in plans)
        return set(plans[0].destinations[0].tolist())

    first = kept(0)
    assert len(kept(2) & first) < 0.6 * len(first)
    assert len(kept(4) & first) > 0.6 * len(first)
    assert kept(6, StepMode.MERGED) == first != kept(8)
    run.computed((9, 7), keys)  # a refresh of another grid has no effect
    assert len(kept(10) & kept(12)) < 0.6 * len(first)
    run.computed(GRID, keys)
    assert kept(14) == first


def test_closing_drops_every_tensor_but_the_map_of_the_last_plan() -> None:
    """Scopes a and b have plans of the same grid. The plan that was made last is the second plan of a."""
    run, refs = run_of(), []
    for scope, selection, plan_keys in (("a", 0, (None,)), ("b", 0, (None,)), ("a", 1, (None, None))):
        plan = run.plan(features(1, len(plan_keys)), GRID, scope, step_of(selection=selection), plan_keys)
        refs += [weakref.ref(t) for t in (plan.dest_slots, plan.merge_weights, plan.unmerge_weights)]
    run.plan(features(3, 1, (5, 5)), (5, 5), "a", step_of(), (None,))
    last = plan.destinations[0]
    run.draw()
    stats = run.close()
    del plan
    gc.collect()
    assert all(ref() is None for ref in refs)
    assert stats is run.stats
    assert set(stats.maps) == {GRID, (5, 5)}
    assert torch.equal(stats.maps[GRID].destinations, last)


def test_threads_of_one_run_get_good_plans() -> None:
    """Several devices may share a run, with one thread each."""
    run, alone = run_of(), run_of()
    wanted = {scope: alone.plan(features(scope), GRID, scope, step_of(), (None,)) for scope in range(8)}
    start, failures = threading.Barrier(4), []

    def work(_: int) -> None:
        start.wait()
        for round_ in range(5):
            for scope, plan in wanted.items():
                run.stats.count_evaluation(round_, 0.5)
                if not same(run.plan(features(scope), GRID, scope, step_of(), (None,)), plan):
                    failures.append(scope)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    assert not failures
    assert run.stats.evaluations == 160
    assert run.stats.weighings >= 8


class NoWaiting(TorchDispatchMode):
    """Raises an error if a solver waits for the device. On the meta device, all other operations that wait fail
    anyway."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "check_errors" in str(func):
            raise RuntimeError(f"{func} waits for the device")
        return func(*args, **(kwargs or {}))


@loop("grid", [(8, 8), GRID, (1, 30)], ids=str)
@loop("cached", [False, True])
def test_planning_and_merging_never_wait_for_the_device(grid: tuple[int, int], cached: bool) -> None:
    """The tokens are on the meta device, where reading a value raises an error."""
    run = run_of(kv_cache=cached, full_step_interval=4)
    x = torch.empty(2, grid[0] * grid[1], 6, dtype=torch.bfloat16, device="meta")
    picture = torch.empty(2, 3, 2 * grid[0], 2 * grid[1], device="meta")
    with NoWaiting():
        for wait in (
            lambda: x.sum().item(),
            lambda: bool((x > 0).all()),
            lambda: x.nonzero(),
            lambda: x[x > 0],
            lambda: torch.linalg.solve(x[0, :6].float(), x[0, :6].float()),
        ):
            with pytest.raises(RuntimeError, match=r"on meta tensors|register_meta|waits for the device"):
                wait()
        for decision in (step_of(), step_of(weighing=1), step_of(selection=1)):
            for plan_keys, shown in (((None,), picture.chunk(1)), ((None, None), (picture[:1],) * 2),
                                     (("l", "r"), picture.chunk(2))):  # fmt: skip
                for pictures in ((), shown):
                    plan = run.plan(x, grid, "b", decision, plan_keys, pictures=pictures)
                    y = merge(x, plan)
                    assert (y.shape, y.dtype) == ((2, plan.num_destinations, 6), x.dtype)
                    assert plan.destinations.shape == y.shape[:2]
                    assert unmerge(y, plan).shape == x.shape


@pytest.mark.gpu
def test_planning_and_merging_never_wait_for_a_real_device() -> None:
    run = run_of()
    x = features(0, 2).cuda()
    run.plan(x, GRID, "a", step_of(), (None,))
    torch.cuda.set_sync_debug_mode("error")
    try:
        for decision in (step_of(), step_of(weighing=1), step_of(selection=1)):
            plan = run.plan(x, GRID, "b", decision, (None, None))
            unmerge(merge(x, plan), plan)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_blocks_of_several_ratios_keep_their_plans() -> None:
    """If the ratio of block b changes, the plan of block a, which has another ratio, remains."""
    run, x = run_of(), features(0)

    def decided(selection: int = 0, **ratios: float) -> StepPlan:
        return StepPlan(0, StepMode.MERGED, max(ratios.values()), selection, 0, ratios=ratios)

    first = decided(a=0.5, b=0.25)
    plans = {block: run.plan(x, GRID, "level", first.of(block), (None,)) for block in "ab"}
    assert {block: plan.num_destinations for block, plan in plans.items()} == {"a": 63 - 32, "b": 63 - 16}
    assert all(run.plan(features(1), GRID, "level", first.of(block), (None,)) is plans[block] for block in "ab")
    second = decided(a=0.5, b=0.75)
    assert run.plan(features(1), GRID, "level", second.of("b"), (None,)).num_destinations == 63 - 47
    assert run.plan(features(1), GRID, "level", second.of("a"), (None,)) is plans["a"]
    assert run.stats.selections == 3
    assert len(run._plans) == 2, "of the ratio that is gone there is none"
    run.plan(x, GRID, "level", decided(1, a=0.5, b=0.25).of("a"), (None,))
    assert len(run._plans) == 1
