"""Merge N tokens to D, and back: the plan and its two matrix products (paper, section 4.2)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .config import UnmergeKind
from .kernels import Kernels
from .selection.objective import cosines, normalized
from .windows import Budget, Windows


@dataclass(frozen=True, eq=False)
class MergePlan:
    """How the N tokens of a grid become D destinations, and how results go back.

    windows, budget: the layout, shared by all images.
    picks: (B, W, K) int64, the slot of each destination in its window.
    merge_weights: (B, W, K, S), rows sum to 1: a destination is a weighted mean of its window's tokens.
    unmerge_weights: (B, W, S, K): with the transpose rows sum to 1, each token is a mix of destination results.
    kernels: fast kernels that do what `merge` and `unmerge` say; None for plain PyTorch.
    """

    windows: Windows
    budget: Budget
    picks: Tensor
    merge_weights: Tensor
    unmerge_weights: Tensor
    kernels: Kernels | None = None

    @property
    def tokens(self) -> int:
        """N, the tokens of one image before the merge."""
        return self.windows.tokens

    @property
    def kept(self) -> int:
        """D, the tokens of one image after the merge."""
        return self.budget.total

    @property
    def destinations(self) -> Tensor:
        """(B, D) int64, the grid index of each destination, in the order of the merged tokens."""
        picks = self.picks
        source = self.windows.source.expand(picks.shape[0], -1, -1)
        return self.budget.pack(source.gather(2, picks))

    def repeat(self, times: int) -> MergePlan:
        """The plan for a batch that holds the same images `times` times over, as for cond and uncond."""
        picks, merge_weights, unmerge_weights = (
            t.repeat(times, *[1] * (t.ndim - 1)) for t in (self.picks, self.merge_weights, self.unmerge_weights)
        )
        return replace(self, picks=picks, merge_weights=merge_weights, unmerge_weights=unmerge_weights)


def merge(x: Tensor, plan: MergePlan) -> Tensor:
    """X' = M X. (B, N, C) -> (B, D, C) in x's dtype."""
    if kernels := _kernels(plan, x):
        return kernels.merge(x, plan.merge_weights, plan.windows, plan.budget)
    return plan.budget.pack(plan.merge_weights @ plan.windows.split(x))


def unmerge(y: Tensor, plan: MergePlan) -> Tensor:
    """Y = A^T Y' (or the pseudo-inverse of M). (B, D, C) -> (B, N, C) in y's dtype."""
    if kernels := _kernels(plan, y):
        return kernels.unmerge(y, plan.unmerge_weights, plan.windows, plan.budget)
    return plan.windows.join(plan.unmerge_weights @ plan.budget.unpack(y))


def unmerge_update(out: Tensor, reduced: Tensor, x: Tensor, plan: MergePlan) -> Tensor:
    """X + A^T (Y' - X'). out, reduced: (B, D, C); x: (B, N, C). Returns (B, N, C)."""
    if kernels := _kernels(plan, out, reduced, x):
        return kernels.restore(out, reduced, x, plan.unmerge_weights, plan.windows, plan.budget)
    return x + unmerge(out - reduced, plan)


def _kernels(plan: MergePlan, *tensors: Tensor) -> Kernels | None:
    """The plan's kernels if they can take these tensors: of the dtype it was made for, and without gradients."""
    if plan.kernels is None or any(t.dtype is not plan.merge_weights.dtype for t in tensors):
        return None
    return None if torch.is_grad_enabled() and any(t.requires_grad for t in tensors) else plan.kernels


def weigh(
    x: Tensor, picks: Tensor, windows: Windows, budget: Budget, scale: float, kind: UnmergeKind, dtype: torch.dtype
) -> MergePlan:
    """Make the plan for given destinations (paper, equations 3 to 6).

    x: (B, W, S, C) features in window layout, any float dtype; picks: (B, W, K) int64. A = softmax over destinations
    of scale * cos(d_j, x_i), computed in fp32; M = A with rows normalised to sum 1. The weights are stored in `dtype`.
    """
    x = normalized(x)
    destinations = x.gather(2, picks[..., None].expand(-1, -1, -1, x.shape[-1]))
    logits = scale * cosines(destinations, x)
    if budget.valid is not None:
        logits = logits.masked_fill(~budget.valid[..., None], -torch.inf)
    A = logits.softmax(dim=2)
    if windows.valid is not None:
        A = A * windows.valid[:, None, :]
    # An unused slot has a row of zeros, and stays so.
    M = A / A.sum(-1, keepdim=True).clamp_min(torch.finfo(A.dtype).tiny)
    back = A.transpose(-1, -2) if kind is UnmergeKind.TRANSPOSE else pseudo_inverse(M, budget)
    return MergePlan(windows, budget, picks, M.to(dtype), back.to(dtype).contiguous())


def pseudo_inverse(M: Tensor, budget: Budget) -> Tensor:
    """M^+ = M^T (M M^T)^-1 per window. (..., K, S) fp32 -> (..., S, K).

    A small ridge keeps nearly equal destinations from blowing up; unused slots give columns of zeros.
    """
    gram = M @ M.transpose(-1, -2)
    used = M.shape[-2] if budget.valid is None else budget.valid.sum(-1).to(M.dtype)
    mean = gram.diagonal(dim1=-2, dim2=-1).sum(-1) / used
    ridge = 1e-4 * mean[..., None, None].clamp_min(torch.finfo(M.dtype).tiny)
    eye = torch.eye(M.shape[-2], device=M.device, dtype=M.dtype)
    if budget.valid is not None:
        gram = gram + torch.diag_embed((~budget.valid).to(M.dtype))
    # Not `solve`: it waits for the device to ask for errors, and with the ridge there are none.
    solution: Tensor = torch.linalg.solve_ex(gram + ridge * eye, M).result
    return solution.transpose(-1, -2)
