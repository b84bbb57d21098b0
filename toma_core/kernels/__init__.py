"""What a set of fast kernels does.

The plain PyTorch of `selection` and `merge` is what kernels are measured against, and what runs wherever they do not:
on CPUs, on AMD and Apple GPUs, without Triton, on windows of more than 16x16 tokens. `trial` chooses.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ..budget import AdaptiveBudget
from ..quant4 import Int4Tensor
from ..windows import Budget, Windows


class Kernels(Protocol):
    """What a set of fast kernels does, on (B, N, C) tokens whose windows are not laid out yet.

    None of them takes part in autograd. Weights and dtypes are those of `MergePlan`; scores and sums are fp32.
    """

    name: str

    def moved(self, x: Tensor, windows: Windows, budget: Budget) -> AdaptiveBudget:
        """`budget.moved` of an equal budget by the `budget.spread` of the tokens."""
        ...

    def pack(self, x: Tensor) -> Int4Tensor | Tensor:
        """See `packed.pack`."""
        ...

    def unpack(self, packed: Int4Tensor) -> Tensor:
        """See `Int4Tensor.unpack`."""
        ...

    def select_weigh(
        self, x: Tensor, windows: Windows, budget: Budget, sharpness: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Picks by greedy facility location, merge weights, and their transposed unmerge weights."""
        ...

    def weigh(
        self, x: Tensor, picks: Tensor, windows: Windows, budget: Budget, sharpness: float
    ) -> tuple[Tensor, Tensor]:
        """Merge weights and transposed unmerge weights for given picks, ascending and distinct in each window."""
        ...

    def merge(self, x: Tensor, weights: Tensor, windows: Windows, budget: Budget) -> Tensor:
        """(B, N, C) -> (B, D, C)"""
        ...

    def unmerge(self, y: Tensor, weights: Tensor, windows: Windows, budget: Budget) -> Tensor:
        """(B, D, C) -> (B, N, C)"""
        ...

    def restore(
        self, out: Tensor, reduced: Tensor, x: Tensor, weights: Tensor, windows: Windows, budget: Budget
    ) -> Tensor:
        """x + unmerge(out - reduced): out, reduced (B, D, C); x and the result (B, N, C)."""
        ...

    def unmerge_residual_cached(
        self,
        out: Tensor,
        reduced: Tensor,
        x: Tensor,
        kept: Tensor,
        destinations: Tensor,
        weights: Tensor,
        windows: Windows,
        budget: Budget,
        delta_weight: float,
    ) -> Tensor:
        """`detail.Detail.restore`. kept: (B, N, C); destinations: (B or 1, D) int64, their tokens."""
        ...
