"""Budgets that follow the picture, by kernels: the same as PyTorch's, in windows and frames of every kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.toma_core.kernels.cases import DEVICE
from toma_core.budget import MIN_SPREAD, AdaptiveBudget, allocate, spread
from toma_core.windows import Budget, Windows, make_budget, make_windows

# Rows, columns, kind and size of windows, frames, ratio, images.
LAYOUTS = [
    (16, 16, "tile", 8, 1, 0.5, 2),
    (13, 19, "tile", 4, 1, 0.5, 1),
    (13, 19, "tile", 8, 3, 0.75, 2),
    (8, 40, "tile", 16, 1, 0.1, 1),
    (5, 7, "tile", 4, 1, 0.95, 2),
    (16, 16, "stripe", 4, 5, 0.6, 1),
    (52, 76, "tile", 4, 1, 0.5, 1),
]


def layout(case: tuple[Any, ...]) -> tuple[Windows, Budget, Tensor]:
    """Windows, an equal budget, and tokens: all alike in a part, nearly alike in another, busy in the rest."""
    height, width, kind, size, frames, ratio, images = case
    windows = make_windows(height, width, kind, size, frames=frames)
    x = torch.randn(images, windows.tokens, 70, generator=torch.Generator().manual_seed(height))
    half, quarter = windows.tokens // 2, windows.tokens // 4
    x[:, :half] = 1 + 0.05 * x[:, :half]
    x[:, :quarter] = 1.0
    return windows.to(torch.device(DEVICE)), make_budget(windows.counts, ratio, frames), x.to(DEVICE)


def same(ours: AdaptiveBudget, theirs: AdaptiveBudget) -> bool:
    return all(torch.equal(getattr(ours, name), getattr(theirs, name)) for name in ("compact", "expand", "valid"))


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_what_is_due_is_dealt_out_as_pytorch_does_it(case: tuple[Any, ...]) -> None:
    """Ties too, of which windows with nothing in them have many."""
    from toma_core.kernels.triton import share

    windows, budget, x = layout(case)
    much = spread(windows.split(x), windows)
    theirs = allocate(budget, much, windows)
    due = share.due(x, windows.source, windows.valid, MIN_SPREAD)
    sizes = torch.tensor(windows.counts, device=DEVICE).float()
    assert torch.equal(due[:, 1], sizes.expand(len(x), -1))
    torch.testing.assert_close((due[:, 0] / sizes) ** 2, much.clamp_min(MIN_SPREAD), rtol=1e-4, atol=2e-6)
    exact = torch.stack([much.clamp_min(MIN_SPREAD).sqrt() * sizes, due[:, 1]], 1)
    ours = share.shared_out(exact, windows.frames, budget.total // windows.frames, theirs.slots)
    assert same(AdaptiveBudget(budget.counts, *ours), theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tokens_of_any_strides_and_dtype(dtype: torch.dtype, kernels: Any) -> None:
    windows, budget, x = layout((13, 19, "tile", 4, 1, 0.5, 2))
    x = x.to(dtype)
    strided = x.transpose(1, 2).contiguous().transpose(1, 2)
    ours = kernels.allocate(strided, windows, budget)
    assert same(ours, kernels.allocate(x, windows, budget))
    assert ours.valid.sum((1, 2)).tolist() == [budget.total] * 2
    theirs = allocate(budget, spread(windows.split(x), windows), windows)
    assert int((ours.valid.sum(-1) - theirs.valid.sum(-1)).abs().max()) <= 1


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_broken_tokens_leave_the_sum_as_it_is(value: float, kernels: Any) -> None:
    windows, budget, x = layout((16, 16, "tile", 4, 1, 0.5, 1))
    x[:, ::3] = value
    x[:, 1::5, 7] = value
    ours = kernels.allocate(x, windows, budget)
    counts = ours.valid.sum(-1)
    assert int(counts.sum()) == budget.total
    assert int(counts.min()) >= 1
    assert int(ours.compact.min()) >= 0
    assert int(ours.compact.max()) < ours.valid.numel()


def test_refused(kernels: Any) -> None:
    windows, budget, x = layout((16, 16, "tile", 8, 1, 0.5, 1))
    with pytest.raises(ValueError, match="expected tokens"):
        kernels.allocate(x[:, :-1], windows, budget)
