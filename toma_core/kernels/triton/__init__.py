"""The kernels in Triton. Importing this package needs Triton; `dispatch.Dispatch` decides whether to import."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from ...windows import Budget, Windows
from . import change, product, quant4
from .launch import INTERPRETED, Launch
from .select import MAX_SLOTS, weigh

__all__ = ["INTERPRETED", "MAX_SLOTS", "TritonKernels"]


class TritonKernels:
    """Operations on (B, N, C) tokens in grid order, without autograd, in one launch each.

    Windows have at most MAX_SLOTS tokens. Tensors lie on a CUDA device, or on the CPU if INTERPRETED. Weights are those
    of `MergePlan`; scores and sums are fp32. Launches are prepared once for each layout and each combination of shapes,
    strides, dtypes and devices. They live as long as this object: one run.
    """

    name = "triton"
    quantize = staticmethod(quant4.quantize)
    dequantize = staticmethod(quant4.dequantize)

    def __init__(self) -> None:
        self._launches: dict[tuple[Hashable, ...], Launch] = {}

    def select_weigh(
        self, x: Tensor, windows: Windows, budget: Budget, sharpness: float, priority: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return destination slots by greedy facility location, merge weights and unmerge weights. priority: (B, N)
        fp32, see `selection.select`."""
        slots = torch.empty(len(x), len(windows.counts), budget.slots, device=x.device, dtype=torch.int64)
        return slots, *weigh(x, slots, windows, budget, sharpness, True, priority)

    def weigh(
        self, x: Tensor, dest_slots: Tensor, windows: Windows, budget: Budget, sharpness: float
    ) -> tuple[Tensor, Tensor]:
        """Return merge and unmerge weights for given slots, which are ascending and distinct in each window."""
        return weigh(x, dest_slots.contiguous(), windows, budget, sharpness, select=False)

    def merge(self, x: Tensor, weights: Tensor, windows: Windows, budget: Budget) -> Tensor:
        """See `merge.merge`: (B, N, C) -> (B, D, C)."""
        key = ("merge", windows, _shared(budget), *_kind(x), *_kind(weights))
        launch = self._launches.get(key) or self._prepare(key, product.merge, (x,), weights, windows, budget)
        return launch(x, weights, budget.valid, budget.expand)

    def unmerge(self, y: Tensor, weights: Tensor, windows: Windows, budget: Budget) -> Tensor:
        """See `merge.unmerge`: (B, D, C) -> (B, N, C)."""
        key = ("unmerge", windows, _shared(budget), *_kind(y), *_kind(weights))
        launch = self._launches.get(key) or self._prepare(key, product.unmerge, (y,), weights, windows, budget)
        return launch(y, weights, budget.expand)

    def unmerge_residual(
        self, out: Tensor, reduced: Tensor, x: Tensor, weights: Tensor, windows: Windows, budget: Budget
    ) -> Tensor:
        """See `merge.unmerge_residual`: (B, D, C), (B, D, C), (B, N, C) -> (B, N, C)."""
        key = ("residual", windows, _shared(budget), *_kind(out), *_kind(reduced), *_kind(x), *_kind(weights))
        tokens = out, reduced, x
        launch = self._launches.get(key) or self._prepare(key, product.unmerge, tokens, weights, windows, budget)
        return launch(out, weights, budget.expand, reduced, x)

    def change(self, fresh: Tensor, cached: Tensor, destinations: Tensor, R: Tensor | None) -> Tensor:
        """Return fresh - cached at destinations, with the rotation R undone if one is given: (B, D, C), (B, N, C) ->
        (B, D, C)."""
        key = ("change", *_kind(fresh), *_kind(cached), *_kind(destinations), R is None or _kind(R))
        launch = self._launches.get(key) or self._prepare(key, change.change, fresh, cached, destinations, R)
        return launch(fresh, cached, destinations, R)

    def propagate(
        self,
        change: Tensor,
        cached: Tensor,
        answer: Tensor,
        spread: Tensor,
        R: Tensor | None,
        weights: Tensor,
        windows: Windows,
        budget: Budget,
    ) -> Tensor:
        """Return cached + R (A^T change + spread answer), without R if it is None: (B, D, C), (B, N, C), (B, F, C),
        (B or 1, N, F) -> (B, N, C)."""
        tokens = (*_kind(change), *_kind(cached), *_kind(answer))
        others = (*_kind(spread), *_kind(weights))
        key = ("propagate", windows, _shared(budget), *tokens, *others, R is None or _kind(R))
        launch = self._launches.get(key) or self._prepare(
            key, product.propagate, (change, cached, answer), spread, R, weights, windows, budget
        )
        return launch(change, weights, budget.expand, None, cached, spread, answer, R)

    def _prepare(self, key: tuple[Hashable, ...], make: Callable[..., Launch], *args: Any) -> Launch:
        launch = self._launches[key] = make(*args)
        return launch


def _shared(budget: Budget) -> Hashable:
    """Return the budget if all images share it, else the sizes that a launch depends on."""
    # Test without the property `adaptive`, which is slower: this function runs at each launch.
    return (budget.slots, budget.total) if budget.valid is not None and budget.valid.ndim == 3 else budget


def _kind(t: Tensor) -> tuple[Hashable, ...]:
    """Return the properties of a tensor that a launch depends on."""
    return t.shape, t.stride(), t.dtype, t.get_device()
