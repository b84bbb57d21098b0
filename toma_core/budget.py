"""Budgets that follow the picture: windows with little in them leave destinations to those with much.

Not in the paper, where every window keeps the same share. A flat window is represented by a few of its tokens, a busy
one hardly by half of them. How many each gets is decided before any is selected, from how much its tokens differ, so
that selection stays one pass over all windows, and the number of all destinations is the one that was asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .selection.objective import in_parts, normalized
from .windows import Budget, Windows, repeated

# A window gets at most so many times its equal share.
MOST = 2.0
# Less spread than this is rounding, in any dtype that pictures come in.
NOTHING = 1e-5


@dataclass(frozen=True, eq=False)
class AdaptiveBudget(Budget):
    """A `Budget` of its own for each image: compact (B, D), expand (B, W * K), valid (B, W, K), all there.

    counts: the equal shares that were moved; slots: K, the most that a window may have.
    """

    compact: Tensor
    expand: Tensor
    valid: Tensor

    @property
    def slots(self) -> int:
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
    """How much the tokens of each window differ, from 0 (all alike) to 1: the variance of their directions.

    x: (B, W, S, C) in window layout, any float dtype. Returns (B, W) fp32.
    """
    if windows.valid is None:
        return in_parts(_spread, x)
    share = windows.valid / windows.valid.sum(1, keepdim=True)
    return in_parts(_spread, x, share.expand(len(x), -1, -1))


def _spread(x: Tensor, share: Tensor | None = None) -> Tensor:
    x = normalized(x).nan_to_num_(nan=0.0)
    mean = x.mean(-2) if share is None else (x * share[..., None]).sum(-2)
    return 1 - mean.pow(2).sum(-1)


def most_slots(budget: Budget, windows: Windows) -> int:
    """The most destinations that a window may get of an equal budget."""
    return min(windows.slots, round(MOST * budget.slots))


def moved(budget: Budget, spread: Tensor, windows: Windows) -> AdaptiveBudget:
    """The destinations of an equal budget, shared out by how much there is in each window.

    spread: (B, W) from `spread`. Quantisation that errs least puts points where data varies in proportion to a power of
    its variance, 1/2 for two dimensions (Zador 1982). The next destination goes to the window that has fewest for what
    it is due, so that the sum is exact; each has one at least, and at most `MOST` of an equal share. Frames of a
    video share nothing: each has as many. No host sync.
    """
    device, frames = spread.device, windows.frames
    images, total = len(spread), budget.total // frames
    spread = spread.reshape(images * frames, -1)
    K = most_slots(budget, windows)
    place = torch.arange(K, device=device)
    sizes = windows.valid.sum(1) if windows.valid is not None else torch.full_like(windows.source[:, 0], windows.slots)
    sizes = sizes[: spread.shape[1]]
    # Rounding says how much there is in windows with nothing in them: they all have the same.
    due = spread.clamp_min(NOTHING).sqrt() * sizes
    claims = due[..., None] / (place + 0.5)
    claims = claims.masked_fill(place >= sizes[:, None], -1.0).masked_fill(place == 0, torch.inf)
    # Of claims that are alike the first ones are met, on every device.
    chosen = claims.flatten(1).sort(dim=1, descending=True, stable=True).indices[:, :total]
    taken = torch.zeros(claims.shape, dtype=torch.bool, device=device).flatten(1).scatter_(1, chosen, True)
    return dealt(budget, taken.view(claims.shape).sum(-1).view(images, -1), windows)


def dealt(budget: Budget, counts: Tensor, windows: Windows) -> AdaptiveBudget:
    """An equal budget's destinations, so many in each window: counts (B, W), each frame's as many as were its own."""
    images, frames, K = len(counts), windows.frames, most_slots(budget, windows)
    counts, total = counts.reshape(images * frames, -1, 1), budget.total // frames
    place = torch.arange(K, device=counts.device)
    valid = place < counts
    # Slots in use come first in a stable order of what is not.
    compact = (~valid).flatten(1).to(torch.uint8).argsort(dim=1, stable=True)[:, :total]
    first = counts.cumsum(1) - counts
    expand = torch.where(valid, first + place, first).flatten(1)
    compact, expand = _in_row(compact, frames, expand.shape[1]), _in_row(expand, frames, total)
    return AdaptiveBudget(budget.counts, compact, expand, valid.reshape(images, -1, K))


def _in_row(places: Tensor, frames: int, step: int) -> Tensor:
    """Places in each frame as places in all of them, which lie `step` apart. (B * frames, n) -> (B, frames * n)"""
    if frames == 1:
        return places
    starts = step * torch.arange(frames, device=places.device)
    return (places.unflatten(0, (-1, frames)) + starts[:, None]).flatten(1)
