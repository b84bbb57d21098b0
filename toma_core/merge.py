"""Merge N tokens to D, and back: the plan and its two matrix products (paper, section 4.2)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from .kernels import Kernels
from .kernels.rows import joined
from .selection.objective import chosen_similarity, in_parts
from .windows import Budget, Windows, repeated

# So many windows side by side are merged as one where kernels do not: the zeros between them then cost less time than
# the gathers that they save (measured on a CPU; at 8 they cost more).
_SIDE_BY_SIDE = 4


@dataclass(frozen=True, eq=False)
class MergePlan:
    """How the N tokens of a grid become D destinations, and how results go back.

    windows, budget: the layout, shared by all images but for a `AdaptiveBudget`.
    picks: (B, W, K) int64, the slot of each destination in its window.
    merge_weights: (B, W, K, S), rows sum to 1: a destination is a weighted mean of its window's tokens.
    unmerge_weights: (B, W, S, K), rows sum to 1: each token is a mix of destination results.
    kernels: fast kernels that do what `merge` and `unmerge` say; None for plain PyTorch.
    strips: the matrices of whole rows of windows, see `_strips`, if there are no kernels and the layout allows it.
    """

    windows: Windows
    budget: Budget
    picks: Tensor
    merge_weights: Tensor
    unmerge_weights: Tensor
    kernels: Kernels | None = None
    strips: tuple[Tensor, Tensor] | None = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "strips", _strips(self) if self.kernels is None else None)

    @property
    def tokens(self) -> int:
        """N, the tokens of one image before the merge."""
        return self.windows.tokens

    @property
    def kept(self) -> int:
        """D, the tokens of one image after the merge."""
        return self.budget.total

    @cached_property
    def destinations(self) -> Tensor:
        """(B, D) int64, the grid index of each destination, in the order of the merged tokens."""
        picks = self.picks
        source = self.windows.source.expand(picks.shape[0], -1, -1)
        return self.budget.pack(source.gather(2, picks))

    def repeat(self, times: int) -> MergePlan:
        """The plan for a batch that holds the same images `times` times over, as for cond and uncond."""
        if self.kernels is None or len(self.picks) > 1:
            return stacked([self] * times)
        # Kernels read one image's part as often as they are told to; a product in PyTorch would copy it every time.
        picks, M, back = (repeated(t, times) for t in (self.picks, self.merge_weights, self.unmerge_weights))
        budget = self.budget.repeat(times)
        return replace(self, budget=budget, picks=picks, merge_weights=M, unmerge_weights=back)


def stacked(plans: list[MergePlan]) -> MergePlan:
    """One plan for the concatenation of several batches on the same layout."""
    M, back = (joined([getattr(p, name) for p in plans]) for name in ("merge_weights", "unmerge_weights"))
    budget, picks = plans[0].budget.beside([p.budget for p in plans[1:]]), torch.cat([p.picks for p in plans])
    return replace(plans[0], budget=budget, picks=picks, merge_weights=M, unmerge_weights=back)


def merge(x: Tensor, plan: MergePlan) -> Tensor:
    """X' = M X. (B, N, C) -> (B, D, C) in x's dtype."""
    if kernels := kernels_for(plan, x):
        return kernels.merge(x, plan.merge_weights, plan.windows, plan.budget)
    if plan.strips is not None and len(x) == len(plan.picks):
        M, back = plan.strips
        return torch.bmm(M, _rows(x, back)).view(len(x), plan.kept, -1)
    return plan.budget.pack(plan.merge_weights @ plan.windows.split(x))


def pick(x: Tensor, plan: MergePlan) -> Tensor:
    """The destinations themselves, not means of what they stand for. (B, N, C) -> (B, D, C)"""
    return x.gather(1, plan.destinations[..., None].expand(len(x), -1, x.shape[-1]))


def unmerge(y: Tensor, plan: MergePlan) -> Tensor:
    """Y = A^T Y'. (B, D, C) -> (B, N, C) in y's dtype."""
    if kernels := kernels_for(plan, y):
        return kernels.unmerge(y, plan.unmerge_weights, plan.windows, plan.budget)
    if plan.strips is not None and len(y) == len(plan.picks):
        M, back = plan.strips
        return torch.bmm(back, _rows(y, M)).view(len(y), plan.tokens, -1)
    return plan.windows.join(plan.unmerge_weights @ plan.budget.unpack(y))


def unmerge_residual(out: Tensor, reduced: Tensor, x: Tensor, plan: MergePlan) -> Tensor:
    """X + A^T (Y' - X'). out, reduced: (B, D, C); x: (B, N, C). Returns (B, N, C)."""
    if kernels := kernels_for(plan, out, reduced, x):
        return kernels.restore(out, reduced, x, plan.unmerge_weights, plan.windows, plan.budget)
    return add_unmerged(x, out - reduced, plan)


def add_unmerged(x: Tensor, update: Tensor, plan: MergePlan) -> Tensor:
    """X + A^T Y' in plain PyTorch, without a pass for the sum where the layout allows it. (B, N, C), (B, D, C)"""
    if plan.strips is not None and len(x) == len(plan.picks):
        M, back = plan.strips
        return torch.baddbmm(_rows(x, back), back, _rows(update, M)).view(x.shape)
    return plan.windows.add(x, plan.unmerge_weights @ plan.budget.unpack(update))


def _strips(plan: MergePlan) -> tuple[Tensor, Tensor] | None:
    """M and A^T of whole rows of windows, (B * R, D / R, N / R) and (B * R, N / R, D / R).

    A row of windows is one run of tokens, which a product reads in place. Between its windows the matrices are zero.
    None where windows differ in size or budget, or where more than `_SIDE_BY_SIDE` stand in a row.
    """
    windows, tiles = plan.windows, plan.windows.tiles
    if windows.contiguous or tiles is None or tiles[2] > _SIDE_BY_SIDE or plan.budget.compact is not None:
        return None
    rows, high, across, wide = tiles
    M = plan.merge_weights.unflatten(1, (rows, across)).unflatten(-1, (high, wide))
    M = torch.diag_embed(M.movedim(2, -1), dim1=2, dim2=5)
    back = plan.unmerge_weights.unflatten(1, (rows, across)).unflatten(3, (high, wide))
    back = torch.diag_embed(back.movedim(2, -1), dim1=3, dim2=5)
    return M.flatten(4).flatten(2, 3).flatten(0, 1), back.flatten(5).flatten(2, 4).flatten(0, 1)


def _rows(x: Tensor, matrices: Tensor) -> Tensor:
    """(B, R * n, C) -> (B * R, n, C) for matrices of (B * R, n, ...): a view where images lie next to each other."""
    return x.reshape(*matrices.shape[:2], x.shape[-1])


def kernels_for(plan: MergePlan, *tensors: Tensor) -> Kernels | None:
    """The plan's kernels if they can take these tensors: of the dtype it was made for, and without gradients."""
    if plan.kernels is None or any(t.dtype is not plan.merge_weights.dtype for t in tensors):
        return None
    return None if torch.is_grad_enabled() and any(t.requires_grad for t in tensors) else plan.kernels


def weigh(
    x: Tensor, picks: Tensor, windows: Windows, budget: Budget, sharpness: float, dtype: torch.dtype
) -> MergePlan:
    """Make the plan for given destinations (paper, equations 3 to 6).

    x: (B, W, S, C) features in window layout, any float dtype; picks: (B, W, K) int64. A = softmax over destinations
    of scale * cos(d_j, x_i), computed in fp32; M = A with rows normalised to sum 1. The weights are stored in `dtype`.
    """
    similarity = in_parts(chosen_similarity, x, picks)
    if budget.valid is not None:
        similarity = similarity.masked_fill(~budget.valid[..., None], -torch.inf)
    A = (sharpness * similarity).softmax(dim=2)
    if windows.valid is not None:
        A = A * windows.valid[:, None, :]
    # An unused slot has a row of zeros, and stays so.
    M = A / A.sum(-1, keepdim=True).clamp_min(torch.finfo(A.dtype).tiny)
    back = A.transpose(-1, -2).to(dtype).contiguous()
    return MergePlan(windows, budget, picks, M.to(dtype), back)
