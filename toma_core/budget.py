"""Adaptive budgets: windows in which tokens vary little give destinations to windows in which they vary much. The paper
has no adaptive budgets."""

from __future__ import annotations

import torch
from torch import Tensor

from .selection import in_parts, normalized
from .windows import Budget, Windows

MIN_SPREAD = 1e-5  # a variance below this is only rounding, in any dtype


def spread(x: Tensor, windows: Windows) -> Tensor:
    """Return the variance of token directions in each window, from 0 (all directions equal) to 1: (B, W) fp32.

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


def allocate(budget: Budget, spread: Tensor, windows: Windows, by_latents: bool = False) -> Budget:
    """Return a budget with the total of `budget` that gives windows of larger spread more destinations.

    spread: (B, W), from the function `spread`. Destinations per token are proportional to its square root, which gives
    quantisation in two dimensions the least error (Zador 1982). by_latents: whether cached tensors are propagated by
    the latent; destinations per token are then proportional to the spread itself, because in windows of low spread the
    latent usually explains most of the change of cached tensors. A window gets at least one destination and at most as
    many as it has tokens. Each frame of a video keeps its number of destinations. The host does not wait for the
    device.
    """
    device, frames = spread.device, windows.frames
    images, total = len(spread), budget.total // frames
    spread = spread.reshape(images * frames, -1)
    # K is the most destinations that one window can get, because every other window keeps at least one.
    K = min(windows.slots, total - spread.shape[1] + 1)
    rank = torch.arange(K, device=device)
    sizes = windows.valid.sum(1) if windows.valid is not None else torch.full_like(windows.source[:, 0], windows.slots)
    sizes = sizes[: spread.shape[1]]
    density = spread.clamp_min(MIN_SPREAD)
    due = (density if by_latents else density.sqrt()) * sizes
    claims = due[..., None] / (rank + 0.5)
    claims = claims.masked_fill(rank >= sizes[:, None], -1.0).masked_fill(rank == 0, torch.inf)
    # Give out destinations one at a time, each to the largest claim. The sort is stable, so that every device prefers
    # the first of equal claims.
    chosen = claims.flatten(1).sort(dim=1, descending=True, stable=True).indices[:, :total]
    taken = torch.zeros(claims.shape, dtype=torch.bool, device=device).flatten(1).scatter_(1, chosen, True)
    counts = taken.view(claims.shape).sum(-1, keepdim=True)
    valid = rank < counts
    # Put the slots in use first, without changing their order.
    compact = (~valid).flatten(1).to(torch.uint8).argsort(dim=1, stable=True)[:, :total]
    first = counts.cumsum(1) - counts
    expand = torch.where(valid, first + rank, first).flatten(1)
    compact = _across_frames(compact, frames, expand.shape[1])
    expand = _across_frames(expand, frames, total)
    return Budget(budget.counts, compact, expand, valid.reshape(images, -1, K))


def _across_frames(index: Tensor, frames: int, step: int) -> Tensor:
    """Turn indices within a frame into indices within the video: (B * frames, n) -> (B, frames * n). step: the number
    of indices per frame."""
    if frames == 1:
        return index
    starts = step * torch.arange(frames, device=index.device)
    return (index.unflatten(0, (-1, frames)) + starts[:, None]).flatten(1)
