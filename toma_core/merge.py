"""Merge N tokens to D and back: the plan and its two matrix products (paper, section 4.2)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .kernels.layout import joined
from .selection import cosine_similarity, in_parts
from .windows import Budget, Windows, WithTensors

if TYPE_CHECKING:
    from .kernels.triton import TritonKernels

# PyTorch merges a row of at most this many windows as one product, which also multiplies zeros (`strips`). On a CPU
# this takes less time than gathering each window if a row has 4 windows, but more time if it has 8.
_MAX_IN_ROW = 4


@dataclass(frozen=True, eq=False)
class MergePlan(WithTensors):
    """How the N tokens of a grid become D destinations, and how destinations' updates go back to the tokens."""

    windows: Windows  # shared by all images
    budget: Budget  # shared by all images unless it is adaptive
    dest_slots: Tensor  # (B, W, K) int64, the slot of each destination in its window
    merge_weights: Tensor  # (B, W, K, S), rows sum to 1: a merged token is a weighted mean of its window's tokens
    unmerge_weights: Tensor  # (B, W, S, K), rows sum to 1: a token's update mixes the destinations' updates
    kernels: TritonKernels | None = None  # None for plain PyTorch

    @property
    def tokens(self) -> int:
        return self.windows.tokens  # N

    @property
    def num_destinations(self) -> int:
        return self.budget.total  # D

    @cached_property
    def destinations(self) -> Tensor:
        """(B, D) int64, the grid index of each destination, in the order of the merged tokens."""
        source = self.windows.source.expand(self.dest_slots.shape[0], -1, -1)
        return self.budget.pack(source.gather(2, self.dest_slots))

    @cached_property
    def strips(self) -> tuple[Tensor, Tensor] | None:
        """Merge weights M, (B * R, D / R, N / R), and unmerge weights A^T, (B * R, N / R, D / R), of the R rows of
        windows, with zeros between windows. The tokens of a row are one span of memory, which PyTorch multiplies
        without a copy. None if the plan has kernels, if windows are contiguous or differ in size or budget, or if a row
        has more than `_MAX_IN_ROW` windows."""
        tiles = self.windows.tiles
        if self.kernels is not None or self.windows.contiguous or tiles is None or self.budget.compact is not None:
            return None
        rows, high, across, wide = tiles
        if across > _MAX_IN_ROW:
            return None
        M = self.merge_weights.unflatten(1, (rows, across)).unflatten(-1, (high, wide))
        M = torch.diag_embed(M.movedim(2, -1), dim1=2, dim2=5)
        back = self.unmerge_weights.unflatten(1, (rows, across)).unflatten(3, (high, wide))
        back = torch.diag_embed(back.movedim(2, -1), dim1=3, dim2=5)
        return M.flatten(4).flatten(2, 3).flatten(0, 1), back.flatten(5).flatten(2, 4).flatten(0, 1)


def stacked(plans: list[MergePlan]) -> MergePlan:
    """Return one plan for the concatenation of several batches with the same windows, such as cond and uncond."""
    first = plans[0]
    # Kernels can read one image's weights for all images; a product in PyTorch would copy them for every image.
    once = first.kernels is not None and len(first.dest_slots) == 1 and all(plan is first for plan in plans)

    def together(parts: list[Tensor]) -> Tensor:
        return parts[0].expand(len(parts), *parts[0].shape[1:]) if once else joined(parts)

    stack = first.changed(lambda name, _: together([getattr(plan, name) for plan in plans]))
    if not first.budget.adaptive:
        return stack
    budget = first.budget.changed(lambda name, _: together([getattr(plan.budget, name) for plan in plans]))
    return replace(stack, budget=budget)


def merge(x: Tensor, plan: MergePlan) -> Tensor:
    """Return M x: (B, N, C) -> (B, D, C) in x's dtype."""
    if kernels := kernels_for(plan, x):
        return kernels.merge(x, plan.merge_weights, plan.windows, plan.budget)
    if plan.strips is not None and len(x) == len(plan.dest_slots):
        M, _ = plan.strips
        return torch.bmm(M, _rows(x, M)).view(len(x), plan.num_destinations, -1)
    return plan.budget.pack(plan.merge_weights @ plan.windows.split(x))


def gather_destinations(x: Tensor, plan: MergePlan) -> Tensor:
    """Return the destination tokens themselves, not weighted means: (B, N, C) -> (B, D, C)."""
    return x.gather(1, plan.destinations[..., None].expand(len(x), -1, x.shape[-1]))


def unmerge(y: Tensor, plan: MergePlan) -> Tensor:
    """Return A^T y: (B, D, C) -> (B, N, C) in y's dtype."""
    if kernels := kernels_for(plan, y):
        return kernels.unmerge(y, plan.unmerge_weights, plan.windows, plan.budget)
    if plan.strips is not None and len(y) == len(plan.dest_slots):
        _, back = plan.strips
        return torch.bmm(back, _rows(y, back)).view(len(y), plan.tokens, -1)
    return plan.windows.join(plan.unmerge_weights @ plan.budget.unpack(y))


def unmerge_residual(out: Tensor, reduced: Tensor, x: Tensor, plan: MergePlan) -> Tensor:
    """Return x + A^T (out - reduced), (B, N, C). out, reduced: (B, D, C); x: (B, N, C)."""
    if kernels := kernels_for(plan, out, reduced, x):
        return kernels.unmerge(out, plan.unmerge_weights, plan.windows, plan.budget, reduced, x)
    return add_unmerged(x, out - reduced, plan)


def add_unmerged(x: Tensor, update: Tensor, plan: MergePlan) -> Tensor:
    """Return x + A^T update, (B, N, C), in one pass where the layout allows it. update: (B, D, C)."""
    if kernels_for(plan, update):
        return unmerge_residual(update, torch.zeros_like(update), x, plan)
    if plan.strips is not None and len(x) == len(plan.dest_slots):
        _, back = plan.strips
        return torch.baddbmm(_rows(x, back), back, _rows(update, back)).view(x.shape)
    return plan.windows.add(x, plan.unmerge_weights @ plan.budget.unpack(update))


def _rows(x: Tensor, matrices: Tensor) -> Tensor:
    """Return x, (B, R * n, C), as (B * R, n, C) for B * R matrices: a view if images are contiguous."""
    return x.reshape(len(matrices), -1, x.shape[-1])


def kernels_for(plan: MergePlan, *tensors: Tensor) -> TritonKernels | None:
    """Return the plan's kernels; None if a tensor has another dtype than the weights, or needs gradients."""
    if plan.kernels is None or any(t.dtype is not plan.merge_weights.dtype for t in tensors):
        return None
    return None if torch.is_grad_enabled() and any(t.requires_grad for t in tensors) else plan.kernels


def weigh(
    x: Tensor, dest_slots: Tensor, windows: Windows, budget: Budget, sharpness: float, dtype: torch.dtype
) -> MergePlan:
    """Return the plan for given destinations (paper, equations 3 to 6), with weights of `dtype`. x: (B, W, S, C)
    features in window layout, any float dtype; dest_slots: (B, W, K) int64."""
    similarity = in_parts(cosine_similarity, x, dest_slots)  # cos(d_j, x_i), (B, W, K, S) fp32
    if budget.valid is not None:
        similarity = similarity.masked_fill(~budget.valid[..., None], -torch.inf)
    A = (sharpness * similarity).softmax(dim=2)  # over destinations
    if windows.valid is not None:
        A = A * windows.valid[:, None, :]
    M = A / A.sum(-1, keepdim=True).clamp_min(torch.finfo(A.dtype).tiny)  # unused slots: 0 / tiny
    back = A.transpose(-1, -2).to(dtype).contiguous()
    return MergePlan(windows, budget, dest_slots, M.to(dtype), back)


@dataclass(frozen=True)
class MergeMap:
    """The last plan of one token grid, on the CPU. For a video, it is the plan of the first frame."""

    height: int
    width: int
    owner: Tensor  # (N,) int64, the grid index of the destination that each token merges into
    destinations: Tensor  # (D,) int64, grid indices
    cuts: tuple[tuple[int, ...], tuple[int, ...]]  # row and column borders of the windows
    frames: int = 1


def draw_map(plan: MergePlan) -> MergeMap:
    """Return the map of a plan's first image. Call this at the end of a run, because it copies from device to host."""
    windows, frames = plan.windows, plan.windows.frames
    count = len(windows.counts) // frames
    nearest = plan.unmerge_weights[0, :count].float().argmax(-1)  # the destination with a token's largest weight
    merged = windows.source[:count].gather(1, plan.dest_slots[0, :count].gather(1, nearest))
    owner = merged.flatten()[windows.inverse[: windows.tokens // frames]].cpu()
    rows, columns = windows.cuts
    cuts = tuple(row for row in rows if row <= windows.height), columns
    destinations = plan.destinations[0, : plan.num_destinations // frames].cpu()
    return MergeMap(windows.height, windows.width, owner, destinations, cuts, frames)
