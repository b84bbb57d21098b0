from typing import Any

import torch
from torch import Tensor

from tests.loop import loop
from tests.toma_core.plans import randn, run_of, same, step_of
from toma_core.merge import MergePlan
from toma_core.prediction import picture_tokens, similarity_features
from toma_core.run import RunState
from toma_core.schedule import StepMode, StepPlan
from toma_core.selection import cosine_similarity


def picture(batch: int = 2, height: int = 8, width: int = 8) -> Tensor:
    return randn(0, batch, 3, height, width)


def plan_of(run: RunState, x: Tensor, keys: tuple[Any, ...] = (None,), pictures: Any = (), **step: Any) -> MergePlan:
    return run.plan(x, (8, 8), "a", step_of(**step), keys, pictures=pictures)


def predicting() -> RunState:
    return run_of(kv_cache=True, full_step_interval=4)


@loop(("side", "channels"), [(4, 12), (8, 3), (2, 12)])
def test_a_token_is_described_by_the_cells_that_it_covers(side: int, channels: int) -> None:
    """A token has at most four numbers per channel. Each is a pixel of the picture, or the mean of several pixels."""
    clean = picture()
    tokens = picture_tokens(clean, (side, side), clean)
    assert tokens.shape == (2, side**2, channels)
    cells = torch.nn.functional.avg_pool2d(clean, max(1, 4 // side)).unflatten(2, (side, -1)).unflatten(4, (side, -1))
    expected = cells.movedim((2, 4), (1, 2)).flatten(3).flatten(1, 2)
    torch.testing.assert_close(tokens.sort().values, expected.sort().values)


@loop("grid", [(4, 4), (3, 5)])
def test_frames_of_a_video_are_pictures_one_behind_another(grid: tuple[int, int]) -> None:
    video = torch.stack([picture(), picture() + 1, 2 * picture()], 2)
    frames = [picture_tokens(video[:, :, frame], grid, video) for frame in range(3)]
    assert torch.equal(picture_tokens(video, (3, *grid), video), torch.cat(frames, 1))
    assert torch.equal(picture_tokens(video[:, :, :1], grid, video), frames[0])


@loop("grid", [(5, 5), (3, 3), (1, 1), (9, 5)])
def test_grids_that_are_rounded_up(grid: tuple[int, int]) -> None:
    """The token grid of a picture with odd sides is rounded up. Every pixel of the picture must affect some token."""
    clean = picture(1, 9, 9).requires_grad_()
    tokens = picture_tokens(clean, grid, clean)
    assert tokens.shape[1] == grid[0] * grid[1]
    tokens.sum().backward()
    assert clean.grad is not None
    assert bool((clean.grad > 0).all())


@loop("scale", [1.0, 1e-3, 1e4])
def test_tokens_of_one_direction_and_other_lengths_are_told_apart(scale: float) -> None:
    dark, bright = torch.full((3, 4, 4), 0.2), torch.full((3, 4, 4), 0.8)
    clean = scale * torch.stack([torch.cat([dark, bright], 2), torch.cat([bright, bright], 2)])
    features = similarity_features(clean, (4, 8), clean)
    assert torch.equal(features[..., :-1], picture_tokens(clean, (4, 8), clean))
    # The last feature is the same for all tokens of an image: the root mean square of the tokens' lengths.
    torch.testing.assert_close(features[:, 0, -1] / scale, torch.tensor([1.02, 1.92]).sqrt())
    likeness = cosine_similarity(features)
    torch.testing.assert_close(likeness[0, 0, 1], torch.tensor(1.0))
    assert 0.5 < float(likeness[0, 0, 4]) < 0.95
    assert bool((cosine_similarity(picture_tokens(clean, (4, 8), clean)) > 0.999).all())


def test_plans_see_brightness() -> None:
    """Each window has a dark and a bright half of one colour, and two destinations. Each half must get one of them."""
    clean = torch.tensor([0.2, 0.2, 0.8, 0.8] * 2).expand(1, 3, 8, 8)
    step = StepPlan(1, StepMode.MERGED_CACHED, 0.875, 0, 0)
    plan = predicting().plan(torch.randn(1, 64, 5), (8, 8), "a", step, (None,), pictures=(clean,))
    shown = clean[0, 0].flatten()[plan.destinations[0]].view(4, 2)
    assert all(set(window) == {0.2, 0.8} for window in shown.double().round(decimals=3).tolist())


@loop("poison", [float("nan"), float("inf"), -float("inf")])
def test_a_broken_pixel_spoils_its_own_token_only(poison: float) -> None:
    clean = picture(1)
    broken = clean.clone()
    broken[0, 1, 0, 0] = poison
    features = similarity_features(broken, (4, 4), broken)
    assert features[0, 1:].isfinite().all()
    torch.testing.assert_close(features[0, 0, -1], features[0, 5, -1])
    torch.testing.assert_close(
        features[0, 5, -1], similarity_features(clean, (4, 4), clean)[0, 5, -1], rtol=0.1, atol=0
    )


def test_black_and_bright_pictures() -> None:
    """All features of a black picture are 0. The features of a bright picture are finite in fp16."""
    black = similarity_features(torch.zeros(1, 3, 4, 4), (4, 4), torch.zeros(()))
    assert black.shape == (1, 16, 4)
    assert not black.any()
    bright = 6e4 * torch.ones(1, 16, 4, 4)
    assert similarity_features(bright, (2, 2), torch.zeros((), dtype=torch.float16)).isfinite().all()


def test_a_plan_is_of_the_picture_whatever_the_tokens_and_shared_by_all_blocks() -> None:
    run, x, clean = predicting(), torch.randn(2, 64, 5), picture()
    plan = plan_of(run, x, pictures=(clean,))
    assert run.plan(2 - x, (8, 8), "b", step_of(), (None,), pictures=(clean,)) is plan
    assert same(plan, plan_of(predicting(), torch.rand(2, 64, 5), pictures=(clean,)))
    assert same(plan, plan_of(predicting(), x, ("left", "right"), (clean[:1], clean[1:]))), "each area has its picture"
    assert run.stats.selections == 1
    assert plan_of(run, x.bfloat16(), pictures=(clean,)).merge_weights.dtype is torch.bfloat16
    reweighed = plan_of(run, x, pictures=(clean + 0.5,), weighing=1)
    assert torch.equal(plan.destinations, reweighed.destinations)
    assert not torch.equal(plan.merge_weights, reweighed.merge_weights)
    more = torch.randn(4, 64, 5)
    assert same(plan_of(predicting(), more, pictures=(clean,)), plan_of(predicting(), more)), "no picture of the batch"
