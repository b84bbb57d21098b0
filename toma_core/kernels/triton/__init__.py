"""The kernels in Triton. Importing this package needs Triton: `trial.Dispatch` decides whether to."""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor

from ...budget import NOTHING, AdaptiveBudget, most_slots
from ...quant4 import Int4Tensor
from ...windows import Budget, Windows
from . import agreement, fourbit, product, select, share
from .launch import INTERPRETED, Launch
from .select import MOST

__all__ = ["INTERPRETED", "MOST", "TritonKernels"]


class TritonKernels:
    """One launch each, two in `reuse` and in `moved`. Windows of at most MOST tokens; tensors on a CUDA device, or on
    the CPU if INTERPRETED.

    Launches are prepared once for each layout and each kind of tensors, and kept as long as this object: one run.
    """

    name = "triton"

    def __init__(self) -> None:
        self._launches: dict[tuple[Hashable, ...], Launch] = {}

    def moved(self, x: Tensor, windows: Windows, budget: Budget) -> AdaptiveBudget:
        """See `kernels.Kernels`."""
        _require(x, windows.tokens)
        due = share.due(x, windows.source, windows.valid, NOTHING)
        total, slots = budget.total // windows.frames, most_slots(budget, windows)
        return AdaptiveBudget(budget.counts, *share.shared_out(due, windows.frames, total, slots))

    def pack(self, x: Tensor) -> Int4Tensor | Tensor:
        """See `kernels.Kernels`."""
        return fourbit.pack(x)

    def unpack(self, packed: Int4Tensor) -> Tensor:
        """See `kernels.Kernels`."""
        return fourbit.unpack(packed)

    def select_weigh(
        self, x: Tensor, windows: Windows, budget: Budget, sharpness: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `kernels.Kernels`."""
        _require(x, windows.tokens)
        return select.select_weigh(x, windows.source, windows.valid, budget.valid, budget.slots, sharpness)

    def weigh(
        self, x: Tensor, picks: Tensor, windows: Windows, budget: Budget, sharpness: float
    ) -> tuple[Tensor, Tensor]:
        """See `kernels.Kernels`."""
        _require(x, windows.tokens)
        return select.weigh(x, picks, windows.source, windows.valid, budget.valid, sharpness)

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
            layout = (windows.source, windows.valid, windows.tokens)
            launch = self._launches[key] = product.unmerge(y, weights, budget.expand, None, None, *layout)
        return launch(y, weights, budget.expand)

    def restore(
        self, out: Tensor, reduced: Tensor, x: Tensor, weights: Tensor, windows: Windows, budget: Budget
    ) -> Tensor:
        """See `kernels.Kernels`."""
        key = (windows, _shared(budget), "restore", *_kind(out), *_kind(reduced), *_kind(x), *_kind(weights))
        launch = self._launches.get(key)
        if launch is None:
            _require(out, budget.total)
            _require(reduced, budget.total, out)
            _require(x, windows.tokens, out)
            layout = (windows.source, windows.valid, windows.tokens)
            launch = self._launches[key] = product.unmerge(out, weights, budget.expand, reduced, x, *layout)
        return launch(out, weights, budget.expand, reduced, x)

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
        """See `kernels.Kernels`. Two launches: what is still there, and the rest."""
        given = (*_kind(out), *_kind(reduced), *_kind(x), *_kind(kept), *_kind(destinations), *_kind(weights))
        key = (windows, _shared(budget), delta_weight, *given)
        key_of_first = (*key, "agreement")
        launch, first = self._launches.get(key), self._launches.get(key_of_first)
        if launch is None or first is None:
            _require(out, budget.total)
            _require(reduced, budget.total, out)
            _require(x, windows.tokens, out)
            _require(kept, windows.tokens, out)
            if destinations.shape[1] != budget.total:
                raise ValueError(f"expected destinations of (batch, {budget.total}), got {tuple(destinations.shape)}")
            first = self._launches[key_of_first] = agreement.agreement(out, reduced, kept, destinations)
        sums = first(out, reduced, kept, destinations)
        if launch is None:
            layout = (windows.source, windows.valid, windows.tokens)
            reused = (kept, sums, destinations)
            launch = product.unmerge(out, weights, budget.expand, reduced, x, *layout, reused, delta_weight)
            self._launches[key] = launch
        return launch(out, weights, budget.expand, reduced, x, kept, sums, destinations)


def _shared(budget: Budget) -> Hashable:
    """The budget if all images share it; of those that each plan has of its own, what a launch is prepared for."""
    return (budget.slots, budget.total) if budget.valid is not None and budget.valid.ndim == 3 else budget


def _kind(t: Tensor) -> tuple[Hashable, ...]:
    """All that a launch is prepared for."""
    return t.shape, t.stride(), t.dtype, t.get_device()


def _require(t: Tensor, tokens: int, like: Tensor | None = None) -> None:
    """Raise ValueError unless t is (B, tokens, C), with the B and C of `like`: kernels read what they are told to."""
    batch, _, channels = t.shape if like is None else like.shape
    if t.shape != (batch, tokens, channels):
        raise ValueError(f"expected tokens of {(batch, tokens, channels)}, got {tuple(t.shape)}")
