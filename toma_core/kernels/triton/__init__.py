"""The kernels in Triton, which importing this package needs; `dispatch.Dispatch` decides whether to."""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor

from ...budget import MIN_SPREAD, AdaptiveBudget, max_slots
from ...quant4 import Int4Tensor
from ...windows import Budget, Windows
from . import agreement, product, quant4, select, share
from .launch import INTERPRETED, Launch
from .select import MAX_SLOTS

__all__ = ["INTERPRETED", "MAX_SLOTS", "TritonKernels"]


class TritonKernels:
    """See `kernels.Kernels`. One launch each, two in `unmerge_residual_cached` and `allocate`. Windows of at most
    MAX_SLOTS tokens; tensors on a CUDA device, or on the CPU if INTERPRETED.

    Launches are prepared once for each layout and kind of tensors, and live as long as this object: one run.
    """

    name = "triton"

    def __init__(self) -> None:
        self._launches: dict[tuple[Hashable, ...], Launch] = {}

    def allocate(self, x: Tensor, windows: Windows, budget: Budget) -> AdaptiveBudget:
        """See `kernels.Kernels`."""
        _require(x, windows.tokens)
        due = share.due(x, windows.source, windows.valid, MIN_SPREAD)
        total, slots = budget.total // windows.frames, max_slots(budget, windows)
        return AdaptiveBudget(budget.counts, *share.shared_out(due, windows.frames, total, slots))

    def quantize(self, x: Tensor) -> Int4Tensor | Tensor:
        """See `kernels.Kernels`."""
        return quant4.quantize(x)

    def dequantize(self, quantized: Int4Tensor) -> Tensor:
        """See `kernels.Kernels`."""
        return quant4.dequantize(quantized)

    def select_weigh(
        self, x: Tensor, windows: Windows, budget: Budget, sharpness: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `kernels.Kernels`."""
        _require(x, windows.tokens)
        return select.select_weigh(x, windows.source, windows.valid, budget.valid, budget.slots, sharpness)

    def weigh(
        self, x: Tensor, dest_slots: Tensor, windows: Windows, budget: Budget, sharpness: float
    ) -> tuple[Tensor, Tensor]:
        """See `kernels.Kernels`."""
        _require(x, windows.tokens)
        return select.weigh(x, dest_slots, windows.source, windows.valid, budget.valid, sharpness)

    def merge(self, x: Tensor, weights: Tensor, windows: Windows, budget: Budget) -> Tensor:
        """See `kernels.Kernels`."""
        used, expand = budget.valid, budget.expand
        key = (windows, _shared(budget), "merge", *_kind(x), *_kind(weights))
        launch = self._launches.get(key)
        if launch is None:
            _require(x, windows.tokens)
            launch = product.merge(x, weights, used, expand, windows.source, budget.total)
            self._launches[key] = launch
        return launch(x, weights, used, expand)

    def unmerge(self, y: Tensor, weights: Tensor, windows: Windows, budget: Budget) -> Tensor:
        """See `kernels.Kernels`."""
        key = (windows, _shared(budget), "unmerge", *_kind(y), *_kind(weights))
        launch = self._launches.get(key)
        if launch is None:
            _require(y, budget.total)
            launch = self._launches[key] = product.unmerge(y, weights, budget.expand, None, None, *_layout(windows))
        return launch(y, weights, budget.expand)

    def unmerge_residual(
        self, out: Tensor, reduced: Tensor, x: Tensor, weights: Tensor, windows: Windows, budget: Budget
    ) -> Tensor:
        """See `kernels.Kernels`."""
        key = (windows, _shared(budget), "residual", *_kind(out), *_kind(reduced), *_kind(x), *_kind(weights))
        launch = self._launches.get(key)
        if launch is None:
            _require_update(out, reduced, x, windows, budget)
            launch = product.unmerge(out, weights, budget.expand, reduced, x, *_layout(windows))
            self._launches[key] = launch
        return launch(out, weights, budget.expand, reduced, x)

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
        """See `kernels.Kernels`."""
        given = (*_kind(out), *_kind(reduced), *_kind(x), *_kind(cached), *_kind(destinations), *_kind(weights))
        key = (windows, _shared(budget), delta_weight, *given)
        key_of_first = (*key, "agreement")
        launch, first = self._launches.get(key), self._launches.get(key_of_first)
        if launch is None or first is None:
            _require_update(out, reduced, x, windows, budget)
            _require(cached, windows.tokens, out)
            if destinations.shape[1] != budget.total:
                raise ValueError(f"expected destinations of (batch, {budget.total}), got {tuple(destinations.shape)}")
            first = self._launches[key_of_first] = agreement.agreement(out, reduced, cached, destinations)
        sums = first(out, reduced, cached, destinations)
        if launch is None:
            reused = (cached, sums, destinations)
            launch = product.unmerge(out, weights, budget.expand, reduced, x, *_layout(windows), reused, delta_weight)
            self._launches[key] = launch
        return launch(out, weights, budget.expand, reduced, x, cached, sums, destinations)


def _layout(windows: Windows) -> tuple[Tensor, Tensor | None, int]:
    return windows.source, windows.valid, windows.tokens


def _shared(budget: Budget) -> Hashable:
    """Return the budget if all images share it, else the sizes that a launch depends on."""
    return (budget.slots, budget.total) if budget.valid is not None and budget.valid.ndim == 3 else budget


def _kind(t: Tensor) -> tuple[Hashable, ...]:
    """Return all that a launch depends on."""
    return t.shape, t.stride(), t.dtype, t.get_device()


def _require(t: Tensor, tokens: int, like: Tensor | None = None) -> None:
    """Raise ValueError unless t is (B, tokens, C), with the B and C of `like`: kernels check no bounds."""
    batch, _, channels = t.shape if like is None else like.shape
    if t.shape != (batch, tokens, channels):
        raise ValueError(f"expected tokens of {(batch, tokens, channels)}, got {tuple(t.shape)}")


def _require_update(out: Tensor, reduced: Tensor, x: Tensor, windows: Windows, budget: Budget) -> None:
    _require(out, budget.total)
    _require(reduced, budget.total, out)
    _require(x, windows.tokens, out)
