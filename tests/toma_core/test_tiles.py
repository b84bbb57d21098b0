"""Test that images with equal latents share a plan, within a call and between calls, and that latents are compared
without waiting for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.loop import loop
from tests.toma_core.plans import UNET_BLOCK, plan_for
from toma_core import Evaluation, RunState, Schedule, StepMode, StepPlan, ToMAConfig
from toma_core.config import Granularity
from toma_core.merge import MergePlan
from toma_core.reasons import Reason
from toma_core.tiles import TileBatch

GRID = (4, 8)
SETTINGS = {"min_tokens": 4, "window_size": 4}


def drawn(*seeds: int, shape: tuple[int, ...] = (4, 6, 6)) -> Tensor:
    return torch.stack([torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds])


def run_of(**settings: object) -> RunState:
    return RunState(Schedule(ToMAConfig(**{**SETTINGS, **settings})))  # type: ignore[arg-type]


def planned(run: RunState, x: Tensor, piece: TileBatch, scope: str = "a") -> MergePlan:
    evaluation = Evaluation(run, StepPlan(0, StepMode.MERGED, 0.5, 0, 0), (None,), ("cond", "uncond"), tile=piece)
    plan = plan_for(x, GRID, scope, evaluation)
    assert plan is not None
    return plan


def alone(x: Tensor) -> MergePlan:
    return run_of().plan(x, GRID, "a", StepPlan(0, StepMode.MERGED, 0.5, 0, 0), (None,))


def same(plan: MergePlan, image: int, other: MergePlan, of: int = 0) -> bool:
    names = "dest_slots", "merge_weights", "unmerge_weights"
    return all(torch.equal(getattr(plan, name)[image], getattr(other, name)[of]) for name in names)


def tokens(*seeds: int) -> Tensor:
    return drawn(*seeds, shape=(32, 5))


def test_images_that_show_the_same_have_the_plan_of_the_first() -> None:
    x = tokens(1, 2, 3, 4)
    plan = planned(run_of(), x, TileBatch(drawn(7, 7, 8, 7)))
    for image, first in enumerate((0, 0, 2, 0)):
        assert same(plan, image, alone(x[first : first + 1])), image


def test_a_later_call_reuses_equal_images_in_any_order() -> None:
    run, x = run_of(), tokens(1, 2)
    earlier = TileBatch(drawn(7, 8))
    planned(run, x, earlier)
    later = tokens(3, 4, 5)
    plan = planned(run, later, TileBatch(drawn(8, 9, 7), (earlier,)))
    assert same(plan, 0, alone(x[1:]))
    assert same(plan, 1, alone(later[1:2])), "no earlier call has it"
    assert same(plan, 2, alone(x[:1]))


def test_all_earlier_calls_are_searched() -> None:
    """Tiles may come in another order for the second condition, so any earlier call may have the tile's plan."""
    run, x, later = run_of(), tokens(1, 2, 3), tokens(4, 5, 6)
    earlier = tuple(TileBatch(drawn(seed)) for seed in (7, 8, 9))
    for place, piece in enumerate(earlier[:2]):
        planned(run, x[place : place + 1], piece)
    for shows, plan in ((8, alone(x[1:2])), (7, alone(x[:1])), (9, alone(later[2:]))):
        assert same(planned(run, later[shows - 7 : shows - 6], TileBatch(drawn(shows), earlier)), 0, plan), shows
    assert same(planned(run, later[:1], TileBatch(drawn(6), earlier)), 0, alone(later[:1])), "no call has this image"


def test_a_block_with_another_number_of_images_is_not_merged() -> None:
    tile, step_plan = TileBatch(drawn(7, 8)), StepPlan(0, StepMode.MERGED, 0.5, 0, 0)
    evaluation = Evaluation(run_of(), step_plan, (None,), ("cond",), tile=tile, images=2)
    for batch in (1, 3, 4):
        assert evaluation.obstacle(torch.randn(batch, 32, 5), UNET_BLOCK, Granularity.STACK) == Reason.IMAGES_CHANGED()
        assert plan_for(torch.randn(batch, 32, 5), GRID, "a", evaluation) is None
    assert plan_for(tokens(1, 2), GRID, "a", evaluation) is not None


def test_a_plan_is_made_once_for_a_call_and_scope() -> None:
    run, piece, x = run_of(), TileBatch(drawn(7)), tokens(1)
    assert planned(run, x, piece) is planned(run, tokens(2), piece)
    assert planned(run, x, piece, "b") is not planned(run, x, piece)
    assert run.stats.selections == 2
    assert planned(run, x, TileBatch(drawn(7))) is not planned(run, x, piece), (
        "another call, that is not told of the first"
    )


def test_the_last_one_can_be_drawn_and_no_other_is_held() -> None:
    run = run_of()
    for seed in range(5):
        planned(run, tokens(seed), TileBatch(drawn(seed)))
    assert len(run._plans) == 1
    run.draw()
    assert set(run.stats.maps) == {GRID}


@loop("broken", [float("nan"), float("inf")])
def test_broken_images_go_by_their_own_tokens(broken: float) -> None:
    latent, x = drawn(7, 8), tokens(1, 2)
    latent[1, 0, 0, 0] = broken
    assert same(planned(run_of(), x, TileBatch(latent)), 1, alone(x[1:]))


def test_a_single_number_distinguishes_two_images() -> None:
    latent, x = drawn(7, 7), tokens(1, 2)
    latent[1, 3, 5, 5] += 1e-6
    assert same(planned(run_of(), x, TileBatch(latent)), 1, alone(x[1:]))


def test_nothing_is_read_from_the_device() -> None:
    """The tensors are on the meta device, where reading a value raises an error."""
    run, x = run_of(), torch.empty(2, 32, 5, device="meta")
    earlier = TileBatch(torch.empty(2, 4, 6, 6, device="meta"))
    planned(run, x, earlier)
    assert planned(
        run, x, TileBatch(torch.empty(2, 4, 6, 6, device="meta"), (earlier, earlier))
    ).destinations.shape == (
        2,
        16,
    )
