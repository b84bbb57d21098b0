"""The kernels in Triton. Importing this package needs Triton; `dispatch.Dispatch` decides whether to import."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor

from ...windows import Budget, Windows
from . import product, quant4
from .launch import INTERPRETED, Launch
from .select import MAX_SLOTS, weigh

__all__ = ["INTERPRETED", "MAX_SLOTS", "TritonKernels"]


class TritonKernels:
    """Operations on (B, N, C) tokens in grid order, without autograd, in one launch each, with fp32 scores and sums.

    Windows have at most MAX_SLOTS tokens. Tensors lie on a CUDA device, or on the CPU if INTERPRETED. Launches are
    prepared once for each layout and each combination of shapes, strides, dtypes and devices.
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
        return weigh(x, None, windows, budget, sharpness, priority)

    def weigh(
        self, x: Tensor, dest_slots: Tensor, windows: Windows, budget: Budget, sharpness: float
    ) -> tuple[Tensor, Tensor]:
        """Return merge and unmerge weights for given slots, which are ascending and distinct in each window."""
        _, M, back = weigh(x, dest_slots.contiguous(), windows, budget, sharpness)
        return M, back

    def merge(self, x: Tensor, weights: Tensor, windows: Windows, budget: Budget) -> Tensor:
        """See `merge.merge`: (B, N, C) -> (B, D, C)."""
        launch = self._prepared(product.merge, x, weights, windows, budget)
        return launch(x, weights, budget.valid, budget.expand)

    def unmerge(self, y: Tensor, weights: Tensor, windows: Windows, budget: Budget) -> Tensor:
        """See `merge.unmerge`: (B, D, C) -> (B, N, C)."""
        return self._unmerged(windows, budget, y, weights)

    def unmerge_residual(
        self, out: Tensor, reduced: Tensor, x: Tensor, weights: Tensor, windows: Windows, budget: Budget
    ) -> Tensor:
        """See `merge.unmerge_residual`: (B, D, C), (B, D, C), (B, N, C) -> (B, N, C)."""
        return self._unmerged(windows, budget, out, weights, reduced, x)

    def change(self, fresh: Tensor, cached: Tensor, destinations: Tensor, R: Tensor | None) -> Tensor:
        """Return fresh - cached at destinations, with the rotation R undone if one is given: (B, D, C), (B, N, C) ->
        (B, D, C)."""
        return self._prepared(product.change, fresh, cached, destinations, R)(fresh, cached, destinations, R)

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
        return self._unmerged(windows, budget, change, weights, None, cached, spread, answer, R)

    def _unmerged(self, windows: Windows, budget: Budget, y: Tensor, weights: Tensor, *others: Tensor | None) -> Tensor:
        """Launch `product.unmerge`; tensors that are missing at the end of `others` are None."""
        others += (None,) * (5 - len(others))
        launch = self._prepared(product.unmerge, windows, budget, y, weights, *others)
        return launch(y, weights, budget.expand, *others)

    def _prepared(self, prepare: Callable[..., Launch], *args: Any) -> Launch:
        """Return the launch that `prepare` makes. It is made once for all arguments with the same `_kind`."""
        key = (prepare, *map(_kind, args))
        launch = self._launches.get(key)
        if launch is None:
            launch = self._launches[key] = prepare(*args)
        return launch


def _kind(argument: Hashable) -> Hashable:
    """Return the properties of an argument that a launch depends on."""
    if isinstance(argument, Tensor):
        return argument.shape, argument.stride(), argument.dtype, argument.get_device()
    # `Budget.adaptive` is slower, and this function runs at each launch.
    if isinstance(argument, Budget) and argument.valid is not None and argument.valid.ndim == 3:
        return argument.slots, argument.total  # launches are shared by all adaptive budgets of these sizes
    return argument
