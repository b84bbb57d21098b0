"""Test that merged steps add the residual's change, which is known at destinations, to cached residuals."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.loop import loop
from tests.toma_core.cached_runs import GRID, at, block, features, merging, passed, run_of
from tests.toma_core.plans import plan_for
from toma_core import merge, reduce, restore, unmerge
from toma_core.merge import MergePlan, gather_destinations
from toma_core.pipeline import DELTA_WEIGHT, Cached


def merged(x: Tensor, plan: MergePlan) -> Tensor:
    """Return x after a block that runs on merged tokens (weighted means) without a residual cache."""
    reduced = merge(x, plan)
    return x + unmerge(block(reduced) - reduced, plan)


def still(fresh: Tensor, old: Tensor) -> Tensor:
    """Return the factor c, from 0 to 1, that minimises |fresh - c * old| for each image."""
    found = [torch.linalg.lstsq(o.reshape(-1, 1), f.reshape(-1, 1)).solution for f, o in zip(fresh, old, strict=True)]
    return torch.stack(found).clamp(0, 1)


def reused(later: Tensor, x: Tensor, plan: MergePlan) -> Tensor:
    """Return the tokens `later` after a merged step in plain PyTorch, with the cached residuals of x."""
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
    """If the residual at destinations is `factor` times the cached one, all are scaled by it, clamped to 0 to 1."""
    run, x = run_of(), features(0, 2)
    update = size * features(7, 2)
    passed(x, at(run, 0, "cond", "uncond"), body=lambda x: x + update)
    later = at(run, 1, "cond", "uncond")
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
    """The cache has no entry for the block or for one of the conditions, or an entry of another batch size or dtype."""
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


def test_propagated_residuals_are_within_the_limits_of_half_precision() -> None:
    """Beyond the largest fp16 number a value would be infinite, and NaN when a later step subtracts it."""
    run = run_of()
    plan = plan_for(features(0).half(), GRID, "scope", merging(run, 1, "a"))
    assert plan is not None
    x = torch.full((1, 64, 6), 65504.0, dtype=torch.float16)
    x.scatter_(1, plan.destinations[..., None].expand(-1, -1, 6), 65000.0)
    fresh = torch.full_like(x[:, : plan.num_destinations], 65504.0)
    moved = Cached(run.cache, (("block", "a"),), x).propagate(fresh, plan)
    assert moved.isfinite().all()
    assert run.cache.read((("block", "a"),), x) is moved
