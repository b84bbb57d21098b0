"""Test that every token is in exactly one window, and that every budget is exact."""

import itertools

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tests.loop import loop
from toma_core.windows import Budget, Windows, make_budget, make_windows


def check_partition(windows: Windows) -> None:
    tokens = windows.frames * windows.height * windows.width
    real = torch.ones_like(windows.source, dtype=torch.bool) if windows.valid is None else windows.valid
    assert windows.tokens == tokens == sum(windows.counts)
    assert windows.source.shape == (len(windows.counts), max(windows.counts))
    assert sorted(windows.source[real].tolist()) == list(range(tokens))
    assert real.sum(1).tolist() == list(windows.counts)
    assert windows.source.flatten()[windows.inverse].tolist() == list(range(tokens))
    assert real.flatten()[windows.inverse].all()
    # Padding slots repeat the first token of their window.
    assert (windows.source == windows.source[:, :1])[~real].all()


@given(st.integers(1, 40), st.integers(1, 40), st.integers(2, 16) | st.integers(17, 64), st.booleans())
def test_any_grid_is_partitioned_into_rectangles(height: int, width: int, size: int, shifted: bool) -> None:
    """No side of a window is longer than `size`. Sides of windows that are not shifted differ by at most one token."""
    windows = make_windows(height, width, size, shifted)
    check_partition(windows)
    x = torch.arange(2 * windows.tokens * 3).view(2, windows.tokens, 3)
    assert torch.equal(windows.join(windows.split(x)), x)
    added = windows.add(x, 1000 * windows.split(x))
    assert torch.equal(added, 1001 * x)
    assert added.is_contiguous()
    rows, columns = ([b - a for a, b in itertools.pairwise(cuts)] for cuts in windows.cuts)
    assert (windows.tiles is not None) == (len({*rows}) == len({*columns}) == 1)
    if windows.tiles is not None:
        assert windows.valid is None
        grid = torch.arange(windows.tokens).view(windows.tiles).transpose(1, 2)
        assert torch.equal(grid.flatten(0, 1).flatten(1), windows.source)
    for cuts, lengths, side in zip(windows.cuts, (rows, columns), (height, width), strict=True):
        assert (cuts[0], cuts[-1]) == (0, side)
        assert 1 <= min(lengths) <= max(lengths) <= size
        assert shifted or max(lengths) - min(lengths) <= 1
    rectangles = itertools.product(*map(itertools.pairwise, windows.cuts))
    for slots, ((top, bottom), (left, right)) in zip(windows.source.tolist(), rectangles, strict=True):
        assert {*slots} == {row * width + column for row in range(top, bottom) for column in range(left, right)}


def test_shifting_moves_the_cuts_by_half_a_window() -> None:
    assert make_windows(32, 24, 8, True).cuts == ((0, 4, 12, 20, 28, 32), (0, 4, 12, 20, 24))
    assert make_windows(8, 8, 8, True).cuts == ((0, 8), (0, 8)), "one window has no border to move"


def test_one_window_needs_no_copy() -> None:
    windows = make_windows(5, 7, 8)
    x = torch.randn(2, 35, 3)
    assert windows.counts == (35,)
    assert windows.split(x).data_ptr() == x.data_ptr() == windows.join(windows.split(x)).data_ptr()


def test_empty_grids_and_impossible_ratios_are_refused() -> None:
    for grid in ((0, 4), (4, 0), (-1, 4)):
        with pytest.raises(ValueError, match="at least one row and one column"):
            make_windows(*grid, 8)
    for ratio in (-0.1, 1.0, 1.5, float("nan")):
        with pytest.raises(ValueError, match=r"ratio must be in \[0, 1\)"):
            make_budget((4, 4), ratio)


def test_layouts_made_in_inference_mode_serve_training_later() -> None:
    """One process may first sample in inference mode and then train outside of it. Cached layouts must serve both."""
    grid = (11, 23)
    with torch.inference_mode():
        budget = make_budget(make_windows(*grid, 4).counts, 0.41)
    windows = make_windows(*grid, 4)
    x = torch.randn(1, 253, 2, requires_grad=True)
    windows.join(windows.split(x)).sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))
    y = torch.randn(1, budget.total, 2, requires_grad=True)
    budget.pack(budget.unpack(y)).sum().backward()
    assert torch.equal(y.grad, torch.ones_like(y))


@loop("shifted", [False, True], ids=["still", "shifted"])
@loop(("height", "width"), [(8, 12), (13, 9)])
def test_windows_of_a_video_are_those_of_each_frame(height: int, width: int, shifted: bool) -> None:
    one = make_windows(height, width, 4, shifted)
    windows = make_windows(height, width, 4, shifted, 3)
    check_partition(windows)
    assert (windows.grid, one.grid) == ((3, height, width), (height, width))
    assert windows.tokens == 3 * one.tokens
    assert torch.equal(windows.source, torch.cat([one.source + frame * one.tokens for frame in range(3)]))
    assert (windows.tiles is None) == (one.tiles is None)
    x = torch.randn(2, windows.tokens, 3)
    assert torch.equal(windows.join(windows.split(x)), x)
    assert torch.equal(windows.add(x, windows.split(x)), 2 * x)
    for ratio in (0.0, 0.33, 0.5, 0.9):  # frames have equal budgets, even without a whole number of tokens per frame
        assert make_budget(windows.counts, ratio, 3).counts == make_budget(one.counts, ratio).counts * 3


def check_budget(counts: tuple[int, ...], ratio: float) -> Budget:
    budget = make_budget(counts, ratio)
    tokens = sum(counts)
    wanted = tokens - round(ratio * tokens)
    shares = [count * wanted / tokens for count in counts]
    floored = [share < 1 for share in shares]
    assert all(1 <= num_dest <= count for num_dest, count in zip(budget.counts, counts, strict=True))
    assert all(abs(num_dest - share) <= 1 for num_dest, share in zip(budget.counts, shares, strict=True))
    assert wanted <= budget.total <= wanted + sum(floored)
    if not any(floored):
        assert budget.total == wanted
    elif budget.total > wanted:
        # Each window has at least one destination. If the total is then larger than wanted, all shares above 1 are
        # rounded down.
        assert all(num_dest == max(1, int(share)) for num_dest, share in zip(budget.counts, shares, strict=True))
    return budget


def check_slots(budget: Budget) -> None:
    slots = budget.slots
    used = [w * slots + k for w, num_dest in enumerate(budget.counts) for k in range(num_dest)]
    if budget.compact is None:
        assert set(budget.counts) == {slots}
        assert budget.expand is None
        assert budget.valid is None
    else:
        assert budget.expand is not None
        assert budget.valid is not None
        assert budget.compact.tolist() == used
        assert budget.valid.flatten().nonzero().flatten().tolist() == used
        starts = (0, *itertools.accumulate(budget.counts))
        padded = [[s + k * (k < n) for k in range(slots)] for s, n in zip(starts, budget.counts, strict=False)]
        assert budget.expand.view(-1, slots).tolist() == padded
    x = torch.arange(2 * budget.total * 3).view(2, budget.total, 3)
    assert budget.unpack(x).shape == (2, len(budget.counts), slots, 3)
    assert torch.equal(budget.pack(budget.unpack(x)), x)


@given(st.lists(st.integers(1, 80), min_size=1, max_size=40).map(tuple), st.floats(0, 0.999))
@example((1,), 0.95)
@example((1, 1, 1), 0.5)
@example((64, 1, 1, 1), 0.95)
@example((3, 3, 3), 1 / 3)
@example((6, 3, 1), 0.5)
@example((1,) * 8, 0.5)
def test_any_budget_is_exact(counts: tuple[int, ...], ratio: float) -> None:
    check_slots(check_budget(counts, ratio))
