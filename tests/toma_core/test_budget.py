"""Test that adaptive budgets have the exact total and valid index maps, and that detail gets more destinations."""

import torch

from tests.loop import loop
from tests.toma_core.plans import randn
from toma_core.config import KVCache, ToMAConfig
from toma_core.run import RunState
from toma_core.schedule import LASTING, Schedule, StepMode, StepPlan
from toma_core.selection import allocate, spread
from toma_core.windows import Budget, Windows, make_budget, make_windows


def picture(height: int, width: int, batch: int = 2, seed: int = 0, flat: float = 0.01) -> torch.Tensor:
    """Return random tokens (B, N, 6), with a standard deviation of `flat` in the left half of the grid."""
    x = randn(seed, batch, height, width, 6)
    x[:, :, : width // 2] = 1 + flat * x[:, :, : width // 2]
    return x.flatten(1, 2)


def of(x: torch.Tensor, windows: Windows, ratio: float) -> Budget:
    return allocate(make_budget(windows.counts, ratio), spread(windows.split(x), windows), windows)


@loop("ratio", [0.1, 0.5, 0.75, 0.95])
@loop("grid", [(16, 16), (13, 19), (8, 40), (5, 7)], ids=str)
def test_every_image_has_as_many_destinations_as_asked_for(grid: tuple[int, int], ratio: float) -> None:
    windows = make_windows(*grid, 8)
    even = make_budget(windows.counts, ratio)
    budget = of(picture(*grid), windows, ratio)
    counts = budget.valid.sum(-1)
    assert counts.sum(-1).tolist() == [even.total] * 2 == [budget.total] * 2
    assert int(counts.min()) >= 1
    assert bool((counts <= torch.tensor(windows.counts)).all())
    # The used slots of a window come before its unused slots. `expand` numbers the used slots in order.
    assert torch.equal(budget.valid, torch.arange(budget.slots) < counts[..., None])
    for image in range(2):
        assert torch.equal(budget.compact[image], budget.valid[image].flatten().nonzero()[:, 0])
        used = budget.expand[image][budget.valid[image].flatten()]
        assert used.tolist() == list(range(even.total))


def test_budgets_are_in_proportion_to_the_spread_or_its_root() -> None:
    windows = make_windows(8, 32, 8)
    for ratio, spreads, by_spread, counts in (
        (0.75, [0.5, 0.25, 0.125, 0.125], True, [32, 16, 8, 8]),
        (0.75, [0.16, 0.04, 0.01, 0.01], False, [32, 16, 8, 8]),
        # The first window has nearly all of the spread, but only 64 tokens, so it gets only 64 of the 128 destinations.
        (0.5, [1.0, 0.01, 0.01, 0.02], True, [64, 16, 16, 32]),
    ):
        budget = allocate(make_budget(windows.counts, ratio), torch.tensor([spreads]), windows, by_spread)
        assert budget.valid.sum(-1).tolist() == [counts]


@loop(("side", "size", "ratio", "most"), [(64, 32, 0.95, 202), (64, 64, 0.5, 2048), (16, 8, 0.5, 64), (8, 4, 0.95, 1)])
def test_no_window_has_more_slots_than_the_others_leave(side: int, size: int, ratio: float, most: int) -> None:
    windows = make_windows(side, side, size)
    spread_first = torch.tensor([[1.0, *[0.0] * (len(windows.counts) - 1)]])
    budget = allocate(make_budget(windows.counts, ratio), spread_first, windows)
    assert budget.slots == most == int(budget.valid.sum(-1).max())


@loop(("selection", "fewest", "most"), [(0, 1, 4), (LASTING, 5, 16)])
def test_flat_windows_are_left_to_the_latents_only_where_these_explain_them(
    selection: int, fewest: int, most: int
) -> None:
    config = ToMAConfig(full_step_interval=4, kv_cache=KVCache.ON)
    step, tokens = StepPlan(1, StepMode.MERGED_CACHED, 0.75, selection, 0), picture(16, 16, 1, flat=0.3)
    pictures = () if selection == LASTING else (tokens.unflatten(1, (16, 16)).movedim(-1, 1),)
    plan = RunState(Schedule(config)).plan(tokens, (16, 16), "a", step, (None,), pictures=pictures)
    assert plan.budget.valid is not None
    counts = plan.budget.valid.sum(-1)[0]
    assert bool(((fewest <= counts[[0, 2]]) & (counts[[0, 2]] <= most)).all())


def test_rounding_does_not_decide_who_gets_destinations() -> None:
    """If windows differ only by rounding, all get equal budgets."""
    windows = make_windows(32, 32, 8)
    flat = 1 + 1e-4 * randn(0, 1, 32 * 32, 12)
    assert spread(windows.split(flat), windows).unique().numel() > 1
    assert of(flat, windows, 0.5).valid.sum(-1).tolist() == [[32] * 16]


@loop("grid", [(13, 19), (16, 16)], ids=str)
def test_frames_of_a_video_share_nothing(grid: tuple[int, int]) -> None:
    """Each frame has the budget that it would have as a single picture."""
    frames = [picture(*grid, seed=seed) for seed in range(3)]
    windows = make_windows(*grid, 8, frames=3)
    even = make_budget(windows.counts, 0.5, 3)
    x = torch.cat(frames, 1)
    budget = allocate(even, spread(windows.split(x), windows), windows)
    alone = [of(frame, make_windows(*grid, 8), 0.5) for frame in frames]
    assert torch.equal(budget.valid, torch.cat([one.valid for one in alone], 1))
    K = torch.arange(budget.valid.numel()).view(budget.valid.shape)
    assert torch.equal(budget.pack(K), torch.stack([k[v] for k, v in zip(K, budget.valid, strict=True)]))
    y = torch.randn(2, even.total, 5)
    assert torch.equal(budget.pack(budget.unpack(y)), y)


@loop("poison", [0.0, float("nan"), float("inf")])
def test_whatever_the_tokens_hold(poison: float) -> None:
    windows = make_windows(13, 19, 8)
    x = picture(13, 19)
    x[0] = poison
    budget = of(x, windows, 0.5)
    assert budget.valid.sum((1, 2)).tolist() == [budget.total] * 2
    assert torch.equal(budget.valid[1], of(picture(13, 19), windows, 0.5).valid[1])


def test_spread_is_the_variance_of_directions() -> None:
    windows = make_windows(5, 7, 4)
    x = torch.randn(1, 35, 6)
    found = spread(windows.split(x), windows)
    for w, count in enumerate(windows.counts):
        unit = torch.nn.functional.normalize(x[0, windows.source[w, :count]], dim=-1)
        torch.testing.assert_close(found[0, w], (unit - unit.mean(0)).pow(2).sum(-1).mean())
