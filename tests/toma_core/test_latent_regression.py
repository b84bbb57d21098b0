"""Test how the change of a cached tensor is regressed on the change of the latent, against plain least squares."""

import torch
from torch import Tensor

from tests.loop import loop
from tests.toma_core.plans import image_of
from toma_core.latent_regression import REST_WEIGHT, LatentChange, Regression, Rotation
from toma_core.merge import MergePlan, gather_destinations, unmerge, weigh
from toma_core.prediction import picture_tokens
from toma_core.selection import cosine_similarity, in_parts, select
from toma_core.windows import make_budget, make_windows

CHANNELS, WIDTH = 3, 10


def made(
    grid: tuple[int, ...] = (16, 16), images: int = 2, ratio: float = 0.5, dtype: torch.dtype = torch.float32
) -> MergePlan:
    """Return a plan for random tokens. Grids whose sides are not multiples of 4 have windows of several sizes."""
    *frames, height, width = grid
    windows = make_windows(height, width, 4, False, *frames)
    budget = make_budget(windows.counts, ratio, windows.frames)
    x = windows.split(torch.randn(images, windows.tokens, 8))
    return weigh(x, select(in_parts(cosine_similarity, x), windows, budget), windows, budget, 100.0, dtype)


def change_of(plan: MergePlan) -> LatentChange:
    shape = len(plan.dest_slots), CHANNELS, *([plan.windows.frames] if plan.windows.frames > 1 else [])
    sides = 2 * plan.windows.height, 2 * plan.windows.width
    return LatentChange(torch.randn(*shape, *sides), torch.randn(*shape, *sides))


def features_of(change: LatentChange, plan: MergePlan) -> Tensor:
    """Return the features of each token, (B, N, F): the change of the latent, the latent, and 1."""
    parts = [picture_tokens(t, plan.windows.grid, t) for t in (change.latent - change.before, change.latent)]
    parts = [t / t.square().mean((1, 2), keepdim=True).sqrt() for t in parts]
    return torch.cat([*parts, torch.ones(*parts[0].shape[:2], 1)], 2)


def regression_of(change: LatentChange, plan: MergePlan) -> Regression:
    found = change.regression(plan)
    assert found is not None
    assert change.regression(plan) is found  # all blocks share one regression
    return found


@loop("grid", [(16, 16), (18, 14), (3, 8, 12)])
def test_it_is_ridge_regression_and_shares_the_rest(grid: tuple[int, ...]) -> None:
    plan = made(grid)
    change = change_of(plan)
    cached, fresh = torch.randn(2, plan.tokens, WIDTH), torch.randn(2, plan.num_destinations, WIDTH)
    got, features = regression_of(change, plan).propagate(cached, fresh), features_of(change, plan)
    for n in range(2):
        there = plan.destinations[n]
        f, c = features[n, there], fresh[n] - cached[n, there]
        F, D = f.shape[1] - 1, len(f)
        # Ridge regression is least squares with one additional row for each feature, whose target is 0.
        ridge = (0.1 * F / D * f[:, :-1].square().sum(0).mean()).sqrt() * torch.eye(F, F + 1)
        A = torch.linalg.lstsq(torch.cat([f, ridge]), torch.cat([c, torch.zeros(F, WIDTH)]), driver="gelsd").solution
        one = image_of(plan, n)
        rest = REST_WEIGHT * unmerge((c - f @ A)[None], one)[0]
        rest[there] = c - f @ A
        torch.testing.assert_close(got[n], cached[n] + features[n] @ A + rest, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(got[n, there], fresh[n], rtol=1e-4, atol=1e-4)


@loop("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_latents_explain_reaches_every_token(dtype: torch.dtype) -> None:
    plan = made((32, 32), dtype=dtype)
    change = change_of(plan)
    answer = features_of(change, plan) @ torch.randn(2 * 4 * CHANNELS + 1, WIDTH)
    cached = torch.randn(2, plan.tokens, WIDTH)
    fresh = gather_destinations(cached + answer, plan).to(dtype)
    got = regression_of(change, plan).propagate(cached.to(dtype), fresh)
    assert got.dtype is dtype
    assert (got.float() - cached - answer).norm() < 0.06 * answer.norm()
    shared = unmerge(gather_destinations(answer, plan), made((32, 32)))
    assert (shared - answer).norm() > 0.5 * answer.norm()


def test_keys_are_explained_before_their_rotation() -> None:
    plan, heads, pairs = made((32, 32)), 2, 4
    change = change_of(plan)
    turns = torch.arange(plan.tokens)[:, None] * torch.logspace(0, -2, pairs)
    R = torch.stack([turns.cos(), -turns.sin(), turns.sin(), turns.cos()], -1).view(1, 1, -1, pairs, 2, 2)
    there = plan.destinations[:, None, :, None, None, None].expand(-1, -1, -1, pairs, 2, 2)
    merged = R.expand(2, -1, -1, -1, -1, -1).gather(2, there)
    answer = features_of(change, plan) @ torch.randn(2 * 4 * CHANNELS + 1, heads * 2 * pairs)
    rotated = (R[0, 0, :, None] @ answer.view(2, -1, heads, pairs, 2, 1)).flatten(2)
    cached = torch.randn_like(rotated)
    fresh = gather_destinations(cached + rotated, plan)
    rotation = Rotation.of(R.movedim(2, 1), merged.movedim(2, 1), fresh)
    regression = regression_of(change, plan)
    with_it, without = (regression.propagate(cached, fresh, each) for each in (rotation, None))
    assert (with_it - cached - rotated).norm() < 0.06 * rotated.norm()
    assert (without - cached - rotated).norm() > 0.3 * rotated.norm()
    torch.testing.assert_close(gather_destinations(with_it, plan), fresh, rtol=1e-4, atol=1e-4)
    several = R.expand(-1, 2, -1, -1, -1, -1)
    assert Rotation.of(several.movedim(2, 1), merged.movedim(2, 1), fresh) is None
    assert Rotation.of(R.movedim(2, 1), merged.movedim(2, 1), fresh[..., :12]) is None, "the heads are not filled"


def test_without_enough_destinations_or_tokens_of_the_latent_there_is_none() -> None:
    few = made((8, 8), ratio=0.5)  # 32 destinations for 24 features
    assert change_of(few).regression(few) is None
    latent = torch.randn(2, CHANNELS, 5, 16, 24)
    assert LatentChange(latent, latent + 1).regression(made((3, 8, 12))) is None


@loop("scale", [0.0, 1.0])
def test_a_latent_that_has_not_changed_gives_finite_numbers(scale: float) -> None:
    plan, latent = made(), scale * torch.randn(2, CHANNELS, 32, 32)
    regression = regression_of(LatentChange(latent, latent), plan)
    cached, fresh = torch.randn(2, plan.tokens, WIDTH), torch.randn(2, plan.num_destinations, WIDTH)
    assert regression.propagate(cached, fresh).isfinite().all()
    assert torch.equal(regression.propagate(cached, gather_destinations(cached, plan)), cached)
