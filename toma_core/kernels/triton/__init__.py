"""The kernels in Triton. Importing this package needs Triton: `trial.Dispatch` decides whether to."""

from __future__ import annotations

from torch import Tensor

from ...windows import Budget, Windows
from . import agreement, product, select
from .launch import INTERPRETED
from .select import MOST

__all__ = ["INTERPRETED", "MOST", "TritonKernels"]


class TritonKernels:
    """One launch each, two in `reuse`. Windows of at most MOST tokens; tensors on a CUDA device, or on the CPU if
    INTERPRETED."""

    name = "triton"

    def select_weigh(self, x: Tensor, windows: Windows, budget: Budget, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """See `kernels.Kernels`."""
        _require(x, windows.tokens)
        return select.select_weigh(x, windows.source, windows.valid, budget.valid, budget.slots, scale)

    def weigh(self, x: Tensor, picks: Tensor, windows: Windows, budget: Budget, scale: float) -> tuple[Tensor, Tensor]:
        """See `kernels.Kernels`."""
        _require(x, windows.tokens)
        return select.weigh(x, picks, windows.source, windows.valid, budget.valid, scale)

    def merge(self, x: Tensor, weights: Tensor, windows: Windows, budget: Budget) -> Tensor:
        """See `kernels.Kernels`."""
        _require(x, windows.tokens)
        return product.merge(x, weights, windows.source, budget.valid, budget.expand, budget.total)

    def unmerge(self, y: Tensor, weights: Tensor, windows: Windows, budget: Budget) -> Tensor:
        """See `kernels.Kernels`."""
        _require(y, budget.total)
        return product.unmerge(y, None, None, weights, windows.source, windows.valid, budget.expand, windows.tokens)

    def restore(
        self, out: Tensor, reduced: Tensor, x: Tensor, weights: Tensor, windows: Windows, budget: Budget
    ) -> Tensor:
        """See `kernels.Kernels`."""
        _require(out, budget.total)
        _require(reduced, budget.total, out)
        _require(x, windows.tokens, out)
        return product.unmerge(out, reduced, x, weights, windows.source, windows.valid, budget.expand, windows.tokens)

    def reuse(
        self,
        out: Tensor,
        reduced: Tensor,
        x: Tensor,
        kept: Tensor,
        destinations: Tensor,
        weights: Tensor,
        windows: Windows,
        budget: Budget,
        trust: float,
    ) -> Tensor:
        """See `kernels.Kernels`. Two launches: what is still there, and the rest."""
        _require(out, budget.total)
        _require(reduced, budget.total, out)
        _require(x, windows.tokens, out)
        _require(kept, windows.tokens, out)
        if destinations.shape[1] != budget.total:
            raise ValueError(f"expected destinations of (batch, {budget.total}), got {tuple(destinations.shape)}")
        sums = agreement.agreement(out, reduced, kept, destinations)
        return product.reuse(
            out, reduced, x, kept, sums, destinations, weights, windows.source, windows.valid, budget.expand, trust
        )


def _require(t: Tensor, tokens: int, like: Tensor | None = None) -> None:
    """Raise ValueError unless t is (B, tokens, C), with the B and C of `like`: kernels read what they are told to."""
    batch, _, channels = t.shape if like is None else like.shape
    if t.shape != (batch, tokens, channels):
        raise ValueError(f"expected tokens of {(batch, tokens, channels)}, got {tuple(t.shape)}")
