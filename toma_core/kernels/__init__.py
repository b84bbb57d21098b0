"""The interface of fast kernels. The plain PyTorch of `selection` and `merge` is their reference, and runs where they
do not: on CPUs, AMD and Apple GPUs, without Triton, in windows of more than 256 tokens. `dispatch` chooses."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ..budget import AdaptiveBudget
from ..quant4 import Int4Tensor
from ..windows import Budget, Windows


class Kernels(Protocol):
    """Operations on (B, N, C) tokens in grid order, without autograd. Weights are those of `MergePlan`; scores and sums
    are fp32."""

    name: str

    def allocate(self, x: Tensor, windows: Windows, budget: Budget) -> AdaptiveBudget:
        """See `budget.allocate`, by the `budget.spread` of tokens x."""
        ...

    def quantize(self, x: Tensor) -> Int4Tensor | Tensor:
        """See `quant4.quantize`."""
        ...

    def dequantize(self, quantized: Int4Tensor) -> Tensor:
        """See `Int4Tensor.dequantize`."""
        ...

    def select_weigh(
        self, x: Tensor, windows: Windows, budget: Budget, sharpness: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return destination slots by greedy facility location, merge weights and unmerge weights."""
        ...

    def weigh(
        self, x: Tensor, dest_slots: Tensor, windows: Windows, budget: Budget, sharpness: float
    ) -> tuple[Tensor, Tensor]:
        """Return merge and unmerge weights of given slots, ascending and distinct in each window."""
        ...

    def merge(self, x: Tensor, weights: Tensor, windows: Windows, budget: Budget) -> Tensor:
        """See `merge.merge`: (B, N, C) -> (B, D, C)."""
        ...

    def unmerge(self, y: Tensor, weights: Tensor, windows: Windows, budget: Budget) -> Tensor:
        """See `merge.unmerge`: (B, D, C) -> (B, N, C)."""
        ...

    def unmerge_residual(
        self, out: Tensor, reduced: Tensor, x: Tensor, weights: Tensor, windows: Windows, budget: Budget
    ) -> Tensor:
        """See `merge.unmerge_residual`: (B, D, C), (B, D, C), (B, N, C) -> (B, N, C)."""
        ...

    def unmerge_residual_cached(
        self,
        out: Tensor,
        reduced: Tensor,
        x: Tensor,
        cached: Tensor,
        destinations: Tensor,
        weights: Tensor,
        windows: Windows,
        budget: Budget,
        delta_weight: float,
    ) -> Tensor:
        """See `cache.unmerge_residual_cached`. cached: (B, N, C); destinations: (B or 1, D) int64, grid indices."""
        ...
