"""The kernels in Triton. Importing this package needs Triton; `dispatch.Dispatch` decides whether to import it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor

from ...windows import Budget, Windows
from . import product, quant4, select
from .launch import INTERPRETED, Launch
from .select import MAX_SLOTS

__all__ = ["INTERPRETED", "MAX_SLOTS", "TritonKernels"]


class TritonKernels:
    """Operations on (B, N, C) tokens in grid order, without autograd, in one launch each, with fp32 scores and sums.

    Windows have at most MAX_SLOTS tokens. Tensors lie on a CUDA device, or on the CPU if INTERPRETED.
    """

    name = "triton"
    quantize = staticmethod(quant4.quantize)
    dequantize = staticmethod(quant4.dequantize)
    weigh = staticmethod(select.weigh)

    def __init__(self) -> None:
        self._launches: dict[tuple[Hashable, ...], Launch] = {}

    def merge(self, x: Tensor, weights: Tensor, windows: Windows, budget: Budget) -> Tensor:
        """See `merge.merge`: (B, N, C) -> (B, D, C)."""
        launch = self._prepared(product.merge, x, weights, windows, budget)
        return launch(x, weights, budget.valid, budget.expand)

    def unmerge(self, y: Tensor, weights: Tensor, windows: Windows, budget: Budget, *others: Tensor | None) -> Tensor:
        """Return one sum of `product.unmerge`, (B, N, C). others: reduced, x, spread, answer, R; None if omitted."""
        others += (None,) * (5 - len(others))
        launch = self._prepared(product.unmerge, windows, budget, y, weights, *others)
        return launch(y, weights, budget.expand, *others)

    def change(self, fresh: Tensor, cached: Tensor, destinations: Tensor, R: Tensor | None) -> Tensor:
        """Return R^-1 (fresh - cached at destinations), (B, D, C). cached: (B, N, C). R: None for no rotation."""
        return self._prepared(product.change, fresh, cached, destinations, R)(fresh, cached, destinations, R)

    def _prepared(self, prepare: Callable[..., Launch], *args: Any) -> Launch:
        """Return the launch that `prepare` makes: one launch for all arguments of the same `_kind`."""
        key = (prepare, *map(_kind, args))
        launch = self._launches.get(key)
        if launch is None:
            launch = self._launches[key] = prepare(*args)
        return launch


def _kind(argument: Hashable) -> Hashable:
    """Return the properties of an argument that a launch depends on."""
    if isinstance(argument, Tensor):
        return argument.shape, argument.stride(), argument.dtype, argument.get_device()
    # This function runs at each launch, so it avoids `Budget.adaptive`, which is slower.
    if isinstance(argument, Budget) and argument.valid is not None and argument.valid.ndim == 3:
        return argument.slots, argument.total  # launches are shared by all adaptive budgets of these sizes
    return argument
