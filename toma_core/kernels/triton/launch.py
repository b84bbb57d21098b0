"""What every launch needs: tile sizes, the right device, the interpreter's limits. And launches prepared once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..sizes import padded

_MOST_SIDE = 64
# What Triton asks of an address before it reads and writes 16 bytes at a time.
_ALIGNED = 16


@triton.jit
def _nothing():
    pass


# Whether kernels defined now run in Triton's interpreter. The variable that decides it may change later.
INTERPRETED = not isinstance(_nothing, triton.JITFunction)


def upcast(dtype: torch.dtype) -> bool:
    """Whether operands of a product must become fp32 first: Triton's interpreter multiplies the bits of bf16."""
    return INTERPRETED and dtype is torch.bfloat16


def turns(count: int) -> Any:
    """The bound of a loop, told when it runs: one binary for all of them. The interpreter takes constants only."""
    return tl.constexpr(count) if INTERPRETED else count


def on_device(x: Tensor) -> AbstractContextManager[object]:
    """Make x's GPU the current one: Triton launches there, whatever its arguments."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(x.device)


def blocks(x: Tensor, rows: int, inner: int) -> tuple[int, int, int, int]:
    """Tile sizes (rows of the result, the summed side, channels) and warps. At most 32 KB of operands."""
    rows, inner = min(_MOST_SIDE, padded(rows)), min(_MOST_SIDE, padded(inner))
    # Without tensor cores a thread holds its operands in registers: fp32 gets smaller tiles.
    half = x.element_size() == 2
    inner = inner if half else min(32, inner)
    channels = min(128 if half else 32, padded(x.shape[2]))
    return rows, inner, channels, 4 if rows * inner < _MOST_SIDE**2 else 8


def shared_stride(part: Tensor, batch: int) -> int:
    """From one image's part of a plan to the next; 0 if all images share it."""
    if part.shape[0] not in (1, batch) or part.stride(-1) != 1 < part.shape[-1]:
        raise ValueError(
            f"a plan of {tuple(part.shape)} does not fit a batch of {batch}, or its rows are not contiguous"
        )
    return 0 if part.shape[0] == 1 else part.stride(0)


def budget_stride(part: Tensor | None, shape: tuple[int, ...], batch: int) -> int:
    """From one image's part of a budget to the next, in a tensor of (B, *shape) that holds all of them one after
    another; 0 if all images share one of `shape`, or one that is repeated, or without one."""
    if part is None or part.shape == shape:
        return 0
    if part.shape != (batch, *shape) or not part[0].is_contiguous():
        raise ValueError(f"a budget of {tuple(part.shape)} is not one of {shape} for each of {batch} images")
    return part.stride(0)


def weight_strides(weights: Tensor, batch: int) -> tuple[int, int, int]:
    """From image to image, window to window and row to row of (B or 1, W, rows, columns). What lies between the rows is
    read, and counts for nothing."""
    by_image, (_, by_window, by_row, _), (_, _, rows, columns) = (
        shared_stride(weights, batch),
        weights.stride(),
        weights.shape,
    )
    if rows == 1:
        by_row = columns  # of one row PyTorch may say anything
    if by_row < columns:
        raise ValueError(f"the rows of a plan of {tuple(weights.shape)} overlap, they are {by_row} apart")
    return by_image, by_window, by_row


class Launch:
    """One kernel that makes one tensor, with all that stays the same from call to call.

    Triton looks at each of its 30 arguments at each launch, to find the binary that was compiled for such ones; that
    takes the host several times as long as the launch. Here it does so once: after that the binary found is called with
    addresses, as long as those that change are aligned as the first ones were. Who keeps a `Launch` calls it with
    tensors of the same shapes, strides, dtypes and devices only.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, int],
        like: Tensor,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        fixed: tuple[Any, ...],
        **options: int,
    ) -> None:
        """kernel: takes its result, then the tensors of a call, then `fixed`. like: on the device. shape, dtype: of the
        result."""
        self._kernel, self._grid, self._fixed, self._options = kernel, (*grid, 1), fixed, options
        self._shape, self._dtype, self._device = shape, dtype, like.device
        self._alone = not like.is_cuda or torch.cuda.device_count() == 1
        self._rest = tuple(f.data_ptr() if isinstance(f, Tensor) else f for f in fixed)
        self._again: Callable[..., object] | None = None

    def __call__(self, *tensors: Tensor | None) -> Tensor:
        """The result, contiguous."""
        out = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        if self._alone:
            self._launch(out, *tensors)
        else:
            with on_device(out):
                self._launch(out, *tensors)
        return out

    def _launch(self, *tensors: Tensor | None) -> None:
        addresses: list[int | None] = []
        together = 0
        for tensor in tensors:
            address = None if tensor is None else tensor.data_ptr()
            addresses.append(address)
            together |= address or 0
        aligned = together % _ALIGNED == 0
        if aligned and self._again is not None:
            try:
                self._again(*addresses, *self._rest)
                return
            except TypeError:
                # Nothing was launched: a launcher of this Triton wants other arguments.
                self._again = None
        compiled = self._kernel[self._grid](*tensors, *self._fixed, **self._options)
        if aligned:
            self._again = _bound(compiled, self._kernel, self._grid)


def _bound(compiled: Any, kernel: Any, grid: tuple[int, ...]) -> Callable[..., object] | None:
    """What launches a binary, on the stream that is the current one by then and with the launch hooks of then; None in
    the interpreter, and where a launcher may not take the arguments of the kernel one by one, as before Triton 3.3."""
    try:
        bound: Callable[..., object] = compiled[grid]
        return bound if list(compiled.src.signature) == list(kernel.arg_names) else None
    except (AttributeError, TypeError):
        return None
