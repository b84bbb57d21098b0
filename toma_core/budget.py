"""Adaptive budgets: windows with little variation leave destinations to those with much.

Not in the paper, where every window gets the same share. The counts are decided before any destination is selected,
from how much a window's tokens differ, so that selection stays one pass and the total is the one of the ratio.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .selection.objective import in_parts, normalized
from .windows import Budget, Windows, repeated

# Most destinations of a window, in equal shares.
MAX_SHARE = 2.0
# Spread below this is rounding in any dtype.
MIN_SPREAD = 1e-5


@dataclass(frozen=True, eq=False)
class AdaptiveBudget(Budget):
    """A `Budget` in which each image has its own counts; `counts` are the equal shares that were reallocated."""

    # (B, D), see `Budget`.
    compact: Tensor
    # (B, W * K)
    expand: Tensor
    # (B, W, K)
    valid: Tensor

    @property
    def slots(self) -> int:
        """K, the most destinations that a window may have."""
        return self.valid.shape[2]

    def pack(self, x: Tensor) -> Tensor:
        """See `Budget.pack`."""
        return _gathered(x.flatten(1, 2), self.compact)

    def unpack(self, x: Tensor) -> Tensor:
        """See `Budget.unpack`."""
        x = _gathered(x, self.expand)
        return x.view(x.shape[0], *self.valid.shape[1:], *x.shape[2:])

    def beside(self, others: list[Budget]) -> Budget:
        """See `Budget.beside`."""
        names = "compact", "expand", "valid"
        return AdaptiveBudget(self.counts, *(torch.cat([getattr(b, name) for b in (self, *others)]) for name in names))

    def repeat(self, times: int) -> Budget:
        """See `Budget.repeat`."""
        return AdaptiveBudget(self.counts, *(repeated(t, times) for t in (self.compact, self.expand, self.valid)))


def _gathered(x: Tensor, index: Tensor) -> Tensor:
    index = index.view(*index.shape, *[1] * (x.ndim - 2))
    return x.gather(1, index.expand(len(x), -1, *x.shape[2:]))


def spread(x: Tensor, windows: Windows) -> Tensor:
    """Return the variance of token directions in each window, from 0 (all alike) to 1: (B, W) fp32.

    x: (B, W, S, C) in window layout, any float dtype.
    """
    if windows.valid is None:
        return in_parts(_spread, x)
    share = windows.valid / windows.valid.sum(1, keepdim=True)
    return in_parts(_spread, x, share.expand(len(x), -1, -1))


def _spread(x: Tensor, share: Tensor | None = None) -> Tensor:
    x = normalized(x).nan_to_num_(nan=0.0)
    mean = x.mean(-2) if share is None else (x * share[..., None]).sum(-2)
    return 1 - mean.pow(2).sum(-1)


def max_slots(budget: Budget, windows: Windows) -> int:
    """Return the most destinations that a window may get of an equal budget."""
    return min(windows.slots, round(MAX_SHARE * budget.slots))


def allocate(budget: Budget, spread: Tensor, windows: Windows) -> AdaptiveBudget:
    """Return an equal budget's destinations, reallocated by the spread of windows: (B, W) from `spread`.

    Quantisation with the least error has a point density proportional to a power of the variance, 1/2 for two
    dimensions (Zador 1982). The next destination goes to the window that has fewest for its due share, so the sum is
    exact; a window has at least one, and at most `MAX_SHARE` equal shares. Each frame of a video keeps its total. No
    host sync.
    """
    device, frames = spread.device, windows.frames
    images, total = len(spread), budget.total // frames
    spread = spread.reshape(images * frames, -1)
    K = max_slots(budget, windows)
    rank = torch.arange(K, device=device)
    sizes = windows.valid.sum(1) if windows.valid is not None else torch.full_like(windows.source[:, 0], windows.slots)
    sizes = sizes[: spread.shape[1]]
    due = spread.clamp_min(MIN_SPREAD).sqrt() * sizes
    claims = due[..., None] / (rank + 0.5)
    claims = claims.masked_fill(rank >= sizes[:, None], -1.0).masked_fill(rank == 0, torch.inf)
    # Stable: of equal claims the first are met, on every device.
    chosen = claims.flatten(1).sort(dim=1, descending=True, stable=True).indices[:, :total]
    taken = torch.zeros(claims.shape, dtype=torch.bool, device=device).flatten(1).scatter_(1, chosen, True)
    return budget_of(budget, taken.view(claims.shape).sum(-1).view(images, -1), windows)


def budget_of(budget: Budget, counts: Tensor, windows: Windows) -> AdaptiveBudget:
    """Return the budget with `counts` (B, W) destinations in each window; frames sum to those of the equal budget."""
    images, frames, K = len(counts), windows.frames, max_slots(budget, windows)
    counts, total = counts.reshape(images * frames, -1, 1), budget.total // frames
    rank = torch.arange(K, device=counts.device)
    valid = rank < counts
    # A stable sort puts the slots in use first.
    compact = (~valid).flatten(1).to(torch.uint8).argsort(dim=1, stable=True)[:, :total]
    first = counts.cumsum(1) - counts
    expand = torch.where(valid, first + rank, first).flatten(1)
    compact, expand = _across_frames(compact, frames, expand.shape[1]), _across_frames(expand, frames, total)
    return AdaptiveBudget(budget.counts, compact, expand, valid.reshape(images, -1, K))


def _across_frames(index: Tensor, frames: int, step: int) -> Tensor:
    """Offset indices within frames by `step` a frame: (B * frames, n) -> (B, frames * n)."""
    if frames == 1:
        return index
    starts = step * torch.arange(frames, device=index.device)
    return (index.unflatten(0, (-1, frames)) + starts[:, None]).flatten(1)
