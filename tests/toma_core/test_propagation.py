"""Test that merged steps add the change of the update at destinations to the cached updates of all tokens."""

from typing import Any

import torch
from torch import Tensor

from tests.loop import loop
from tests.toma_core.cached_runs import GRID, at, block, features, merging, passed, run_of
from tests.toma_core.plans import plan_for
from toma_core import merge, unmerge
from toma_core.merge import MergePlan, gather_destinations
from toma_core.pipeline import Cached


def merged(x: Tensor, plan: MergePlan | None) -> Tensor:
    """Return x after a block that runs on merged tokens (weighted means) without caches."""
    assert plan is not None
    reduced = merge(x, plan)
    return x + unmerge(block(reduced) - reduced, plan)


def propagated(later: Tensor, update: Tensor, plan: MergePlan | None) -> Tensor:
    """Return the update of the tokens `later` in a merged step, computed in plain PyTorch from a cached update."""
    assert plan is not None
    reduced = gather_destinations(later, plan)
    return update + unmerge(block(reduced) - reduced - gather_destinations(update, plan), plan)


def test_a_full_step_is_the_block_itself_and_merged_ones_start_from_its_update() -> None:
    run, x = run_of(), features(0)
    out, plan = passed(x, at(run, 0, "cond"))
    assert plan is None
    assert torch.equal(out, block(x))
    update = block(x) - x
    for step in (1, 2):
        later = features(step)
        out, plan = passed(later, at(run, step, "cond"))
        update = propagated(later, update, plan)
        torch.testing.assert_close(out, later + update)


@loop("order", [("cond", "uncond"), ("uncond", "cond")])
def test_each_part_gets_its_own_in_one_batch_or_in_two_calls(order: tuple[str, str]) -> None:
    x, later, outs = {"cond": features(0), "uncond": features(1)}, features(2), []
    for batches in ([order], [order[:1], order[1:]]):
        run = run_of()
        passed(torch.cat([x["cond"], x["uncond"]]), at(run, 0, "cond", "uncond"))
        outs.append(
            [passed(later.expand(len(names), -1, -1), at(run, 1, *names, takes_part=order)) for names in batches]
        )
    together, *apart = (out for found in outs for out, _ in found)
    torch.testing.assert_close(torch.cat(apart), together)
    plan = outs[1][0][1]
    expected = [later + propagated(later, block(x[name]) - x[name], plan) for name in order]
    torch.testing.assert_close(together, torch.cat(expected))


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
def test_without_a_cache_that_fits_a_block_is_merged_plainly(name: str, cond_keys: Any, later: Tensor) -> None:
    """The block or a condition has no cached entry, or the entry has another batch size or dtype than the tokens. If
    one condition of a batch has no entry, no entry is used."""
    run = run_of()
    passed(features(0), at(run, 0, "cond"))
    out, plan = passed(later, merging(run, 1, *cond_keys), name)
    torch.testing.assert_close(out, merged(later, plan))


def test_the_next_full_step_replaces_everything() -> None:
    run = run_of()
    passed(features(0), at(run, 0, "cond"), "gone later")
    passed(features(1), at(run, 0, "cond"))
    x, later = features(2), features(3)
    passed(x, at(run, 3, "cond"))
    out, plan = passed(later, at(run, 4, "cond"))
    torch.testing.assert_close(out, later + propagated(later, block(x) - x, plan))
    torch.testing.assert_close(passed(later, at(run, 4, "cond"), "gone later")[0], merged(later, plan))


def test_propagated_updates_are_within_the_limits_of_half_precision() -> None:
    """A value beyond the largest fp16 number would become infinite, and NaN when a later step subtracts infinity from
    it."""
    run = run_of()
    plan = plan_for(features(0).half(), GRID, "scope", merging(run, 1, "a"))
    assert plan is not None
    x = torch.full((1, 64, 6), 65504.0, dtype=torch.float16)
    x.scatter_(1, plan.destinations[..., None].expand(-1, -1, 6), 65000.0)
    fresh = torch.full_like(x[:, : plan.num_destinations], 65504.0)
    moved = Cached(run.cache, (("block", "a"),), x).propagate(fresh, plan)
    assert moved.isfinite().all()
    assert run.cache.read((("block", "a"),), x) is moved
