"""The kernels in Triton, which importing this package needs; `dispatch.Dispatch` decides whether to."""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor

from ...quant4 import Int4Tensor
from ...windows import Budget, Windows
from . import product, quant4, select
from .launch import INTERPRETED, Launch
from .select import MAX_SLOTS

__all__ = ["INTERPRETED", "MAX_SLOTS", "TritonKernels"]


class TritonKernels:
    """Operations on (B, N, C) tokens in grid order, without autograd, in one launch each.

    Windows have at most MAX_SLOTS tokens, tensors lie on a CUDA device, or on the CPU if INTERPRETED. Weights are those
    of `MergePlan`; scores and sums are fp32. Launches are prepared once for each layout and kind of tensors, and live
    as long as this object: one run.
    """

    name = "triton"

    def __init__(self) -> None:
        self._launches: dict[tuple[Hashable, ...], Launch] = {}

    def quantize(self, x: Tensor) -> Int4Tensor | Tensor:
        """See `quant4.quantize`."""
        return quant4.quantize(x)

    def dequantize(self, quantized: Int4Tensor) -> Tensor:
        """See `Int4Tensor.dequantize`."""
        return quant4.dequantize(quantized)

    def select_weigh(
        self, x: Tensor, windows: Windows, budget: Budget, sharpness: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return destination slots by greedy facility location, merge weights and unmerge weights."""
        _require(x, windows.tokens)
        return select.select_weigh(x, windows.source, windows.valid, budget.valid, budget.slots, sharpness)

    def weigh(
        self, x: Tensor, dest_slots: Tensor, windows: Windows, budget: Budget, sharpness: float
    ) -> tuple[Tensor, Tensor]:
        """Return merge and unmerge weights of given slots, ascending and distinct in each window."""
        _require(x, windows.tokens)
        return select.weigh(x, dest_slots, windows.source, windows.valid, budget.valid, sharpness)

    def merge(self, x: Tensor, weights: Tensor, windows: Windows, budget: Budget) -> Tensor:
        """See `merge.merge`: (B, N, C) -> (B, D, C)."""
        used, expand = budget.valid, budget.expand
        key = (windows, _shared(budget), "merge", *_kind(x), *_kind(weights))
        launch = self._launches.get(key)
        if launch is None:
            _require(x, windows.tokens)
            launch = product.merge(x, weights, used, expand, windows.source, budget.total)
            self._launches[key] = launch
        return launch(x, weights, used, expand)

    def unmerge(self, y: Tensor, weights: Tensor, windows: Windows, budget: Budget) -> Tensor:
        """See `merge.unmerge`: (B, D, C) -> (B, N, C)."""
        key = (windows, _shared(budget), "unmerge", *_kind(y), *_kind(weights))
        launch = self._launches.get(key)
        if launch is None:
            _require(y, budget.total)
            layout = windows.source, windows.valid, windows.tokens
            launch = self._launches[key] = product.unmerge(y, weights, budget.expand, None, None, *layout)
        return launch(y, weights, budget.expand)

    def unmerge_residual(
        self, out: Tensor, reduced: Tensor, x: Tensor, weights: Tensor, windows: Windows, budget: Budget
    ) -> Tensor:
        """See `merge.unmerge_residual`: (B, D, C), (B, D, C), (B, N, C) -> (B, N, C)."""
        key = (windows, _shared(budget), "residual", *_kind(out), *_kind(reduced), *_kind(x), *_kind(weights))
        launch = self._launches.get(key)
        if launch is None:
            _require(out, budget.total)
            _require(reduced, budget.total, out)
            _require(x, windows.tokens, out)
            layout = windows.source, windows.valid, windows.tokens
            launch = self._launches[key] = product.unmerge(out, weights, budget.expand, reduced, x, *layout)
        return launch(out, weights, budget.expand, reduced, x)


def _shared(budget: Budget) -> Hashable:
    """Return the budget if all images share it, else the sizes that a launch depends on."""
    # Asked at each launch: faster than the property `adaptive`.
    return (budget.slots, budget.total) if budget.valid is not None and budget.valid.ndim == 3 else budget


def _kind(t: Tensor) -> tuple[Hashable, ...]:
    """Return all that a launch depends on."""
    return t.shape, t.stride(), t.dtype, t.get_device()


def _require(t: Tensor, tokens: int, like: Tensor | None = None) -> None:
    """Raise ValueError unless t is (B, tokens, C), with the B and C of `like`: kernels check no bounds."""
    batch, _, channels = t.shape if like is None else like.shape
    if t.shape != (batch, tokens, channels):
        raise ValueError(f"expected tokens of {(batch, tokens, channels)}, got {tuple(t.shape)}")
