"""The kernels in Triton. Importing this package needs Triton: `kernels.Dispatch` decides whether to."""

from __future__ import annotations

from torch import Tensor

from ...windows import Budget, Windows
from .launch import INTERPRETED
from .ops import operators
from .select import MOST

__all__ = ["INTERPRETED", "MOST", "TritonKernels"]


class TritonKernels:
    """One launch each, two in `reuse`. Windows of at most MOST tokens; tensors on a CUDA device, or on the CPU if
    INTERPRETED."""

    name = "triton"

    def select_weigh(self, x: Tensor, windows: Windows, budget: Budget, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """See `kernels.Kernels`."""
        _require(x, windows.tokens)
        plan: tuple[Tensor, Tensor, Tensor] = operators.select_weigh.default(
            x, windows.source, windows.valid, budget.valid, budget.slots, scale
        )
        return plan

    def weigh(self, x: Tensor, picks: Tensor, windows: Windows, budget: Budget, scale: float) -> tuple[Tensor, Tensor]:
        """See `kernels.Kernels`."""
        _require(x, windows.tokens)
        weights: tuple[Tensor, Tensor] = operators.weigh.default(
            x, picks, windows.source, windows.valid, budget.valid, scale
        )
        return weights

    def merge(self, x: Tensor, weights: Tensor, windows: Windows, budget: Budget) -> Tensor:
        """See `kernels.Kernels`."""
        _require(x, windows.tokens)
        merged: Tensor = operators.merge.default(x, weights, windows.source, budget.valid, budget.expand, budget.total)
        return merged

    def unmerge(self, y: Tensor, weights: Tensor, windows: Windows, budget: Budget) -> Tensor:
        """See `kernels.Kernels`."""
        _require(y, budget.total)
        spread: Tensor = operators.unmerge.default(
            y, None, None, weights, windows.source, windows.valid, budget.expand, windows.tokens
        )
        return spread

    def restore(
        self, out: Tensor, reduced: Tensor, x: Tensor, weights: Tensor, windows: Windows, budget: Budget
    ) -> Tensor:
        """See `kernels.Kernels`."""
        _require(out, budget.total)
        _require(reduced, budget.total, out)
        _require(x, windows.tokens, out)
        restored: Tensor = operators.unmerge.default(
            out, reduced, x, weights, windows.source, windows.valid, budget.expand, windows.tokens
        )
        return restored

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
        sums = operators.agreement.default(out, reduced, kept, destinations)
        restored: Tensor = operators.reuse.default(
            out, reduced, x, kept, sums, destinations, weights, windows.source, windows.valid, budget.expand, trust
        )
        return restored

    def merge_hard(self, x: Tensor, owners: Tensor, windows: Windows, budget: Budget) -> Tensor:
        """See `kernels.Kernels`."""
        _require(x, windows.tokens)
        _require_owners(owners, len(x), windows.tokens)
        merged: Tensor = operators.merge_hard.default(
            x, owners, windows.source, windows.valid, budget.valid, budget.expand, budget.slots, budget.total
        )
        return merged

    def unmerge_hard(self, y: Tensor, owners: Tensor) -> Tensor:
        """See `kernels.Kernels`."""
        _require_owners(owners, len(y), owners.shape[1])
        copied: Tensor = operators.unmerge_hard.default(y, None, None, owners)
        return copied

    def restore_hard(self, out: Tensor, reduced: Tensor, x: Tensor, owners: Tensor) -> Tensor:
        """See `kernels.Kernels`."""
        _require(reduced, out.shape[1], out)
        _require(x, owners.shape[1], out)
        _require_owners(owners, len(out), owners.shape[1])
        restored: Tensor = operators.unmerge_hard.default(out, reduced, x, owners)
        return restored


def _require(t: Tensor, tokens: int, like: Tensor | None = None) -> None:
    """Raise ValueError unless t is (B, tokens, C), with the B and C of `like`: kernels read what they are told to."""
    batch, _, channels = t.shape if like is None else like.shape
    if t.shape != (batch, tokens, channels):
        raise ValueError(f"expected tokens of {(batch, tokens, channels)}, got {tuple(t.shape)}")


def _require_owners(owners: Tensor, batch: int, tokens: int) -> None:
    if owners.shape != (batch, tokens):
        raise ValueError(f"expected owners of {(batch, tokens)}, got {tuple(owners.shape)}")
