"""Test that images with equal latents share a plan, within a call and between calls."""

import random

import torch
from torch import Tensor

from tests.loop import loop
from tests.toma_core.plans import UNET_BLOCK, image_of, plan_for, randn, run_of, same, step_of
from toma_core import Evaluation, RunState
from toma_core.config import Granularity
from toma_core.merge import MergePlan
from toma_core.reasons import Reason
from toma_core.tiles import TileBatch

GRID = (4, 8)


def drawn(*seeds: int, shape: tuple[int, ...] = (4, 6, 6)) -> Tensor:
    return torch.stack([randn(seed, *shape) for seed in seeds])


def planned(run: RunState, x: Tensor, piece: TileBatch, scope: str = "a") -> MergePlan:
    evaluation = Evaluation(run, step_of(), (None,), ("cond", "uncond"), tile=piece)
    plan = plan_for(x, GRID, scope, evaluation)
    assert plan is not None
    return plan


def alone(x: Tensor) -> MergePlan:
    return run_of().plan(x, GRID, "a", step_of(), (None,))


def tokens(*seeds: int) -> Tensor:
    return drawn(*seeds, shape=(32, 5))


@loop("seed", range(20))
def test_equal_images_have_the_plan_of_the_first_in_this_call_or_an_earlier_one(seed: int) -> None:
    """A call shows one to four of six images. One image holds NaN or infinity. With NaN it does not equal itself. Two
    others differ in one number."""
    chance, run, latents = random.Random(seed), run_of(), drawn(*range(6))  # noqa: S311 - cases, no secrets
    latents[4], latents[5, 0, 0, 0] = latents[3], (float("nan"), float("inf"))[seed % 2]
    latents[4, 3, 5, 5] += 1e-6
    calls, first = list[TileBatch](), dict[int, MergePlan]()
    for call in range(4):
        shows = chance.choices(range(6), k=chance.randint(1, 4))
        x = tokens(*range(10 * call, 10 * call + len(shows)))
        calls.append(TileBatch(latents[shows], tuple(calls)))
        plan = planned(run, x, calls[-1])
        for n, image in enumerate(shows):
            own = alone(x[n : n + 1])
            expected = own if image == 5 and seed % 2 == 0 else first.setdefault(image, own)
            assert same(image_of(plan, n), expected), (call, n)


def test_a_block_with_another_number_of_images_is_not_merged() -> None:
    evaluation = Evaluation(run_of(), step_of(), (None,), ("cond",), tile=TileBatch(drawn(7, 8)), images=2)
    for batch in (1, 3, 4):
        assert evaluation.obstacle(torch.randn(batch, 32, 5), UNET_BLOCK, Granularity.STACK) == Reason.IMAGES_CHANGED()
        assert plan_for(torch.randn(batch, 32, 5), GRID, "a", evaluation) is None
    assert plan_for(tokens(1, 2), GRID, "a", evaluation) is not None


def test_a_plan_is_made_once_for_a_call_and_scope_and_the_last_one_is_drawn() -> None:
    run, piece, x = run_of(), TileBatch(drawn(7)), tokens(1)
    assert planned(run, x, piece) is planned(run, tokens(2), piece)
    assert planned(run, x, piece, "b") is not planned(run, x, piece)
    assert run.stats.selections == 2
    assert planned(run, x, TileBatch(drawn(7))) is not planned(run, x, piece), "the calls do not know each other"
    for seed in range(5):
        planned(run, tokens(seed), TileBatch(drawn(seed)))
    assert len(run._plans) == 2, "one of each scope"
    run.draw()
    assert set(run.stats.maps) == {GRID}


def test_nothing_is_read_from_the_device() -> None:
    """The tensors are on the meta device, where reading a value raises an error."""
    run, x, latent = run_of(), torch.empty(2, 32, 5, device="meta"), torch.empty(2, 4, 6, 6, device="meta")
    earlier = TileBatch(latent)
    planned(run, x, earlier)
    assert planned(run, x, TileBatch(latent, (earlier, earlier))).destinations.shape == (2, 16)
