"""Choose tile sizes, strides and the device of a launch; prepare a launch once for many calls."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..layout import padded

_MAX_SIDE = 64
_ALIGNED = 16  # bytes; Triton reads and writes 16 bytes at a time at such addresses


@triton.jit
def _nothing():
    pass


# Whether kernels run in Triton's interpreter. Ask a kernel: TRITON_INTERPRET may have changed since Triton read it.
INTERPRETED = not isinstance(_nothing, triton.JITFunction)


def upcast(dtype: torch.dtype) -> bool:
    """Whether products need fp32 operands: Triton's interpreter would otherwise multiply the bits of bf16 values."""
    return INTERPRETED and dtype is torch.bfloat16


def turns(count: int) -> Any:
    """Return a loop bound as a run-time argument: one binary then serves all bounds. The interpreter needs a
    constant."""
    return tl.constexpr(count) if INTERPRETED else count


def on_device(x: Tensor) -> AbstractContextManager[object]:
    """Make x's GPU the current one: Triton launches on the current GPU, wherever its arguments lie."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(x.device)


def blocks(x: Tensor, rows: int, inner: int) -> tuple[int, int, int, int]:
    """Return tile sizes (result's rows, summed dimension, channels) and warps, for at most 32 KB of operands."""
    # fp32 runs without tensor cores and holds operands in registers, so its tiles are smaller.
    half = x.element_size() == 2
    rows = min(_MAX_SIDE, padded(rows))
    inner = min(_MAX_SIDE if half else 32, padded(inner))
    channels = min(128 if half else 32, padded(x.shape[2]))
    return rows, inner, channels, 4 if rows * inner < _MAX_SIDE**2 else 8


def require(t: Tensor, tokens: int, like: Tensor | None = None) -> None:
    """Raise ValueError unless t is (B, tokens, C), with the B and C of `like`: kernels check no bounds."""
    batch, _, channels = t.shape if like is None else like.shape
    if t.shape != (batch, tokens, channels):
        raise ValueError(f"expected tokens of {(batch, tokens, channels)}, got {tuple(t.shape)}")


def budget_stride(part: Tensor | None, dims: int) -> int:
    """Return the stride between images of a budget's tensor, 0 if it is None or all images share it. A shared tensor
    has `dims` dimensions."""
    return 0 if part is None or part.ndim == dims or len(part) == 1 else part.stride(0)


def weight_strides(weights: Tensor, batch: int) -> tuple[int, int, int]:
    """Return strides of (B or 1, W, rows, columns): between images (0 if shared), windows, rows. Raises ValueError."""
    (images, _, rows, columns), (by_image, by_window, by_row, by_column) = weights.shape, weights.stride()
    if rows == 1:
        by_row = columns  # PyTorch's stride of a single row is arbitrary
    if images not in (1, batch) or by_column != 1 < columns or by_row < columns:
        plan = f"a plan of {tuple(weights.shape)} with strides {weights.stride()}"
        raise ValueError(f"{plan} does not fit a batch of {batch}, or its rows are not contiguous")
    return (by_image if images > 1 else 0), by_window, by_row


class Launch:
    """A kernel and its constant arguments; each call computes one tensor.

    Triton inspects all arguments at each launch, and this takes the host several times as long as the launch itself.
    This class lets Triton inspect them once. Later calls pass the tensors' addresses to the binary, if all are aligned
    to 16 bytes. Callers pass tensors of the same shapes, strides, dtypes and devices at each call.
    """

    def __init__(
        self, kernel: Any, grid: tuple[int, int], like: Tensor, tokens: int, fixed: tuple[Any, ...], **options: int
    ) -> None:
        """Prepare a kernel. Its arguments are the result, then the call's tensors, then `fixed`. The result is (B,
        tokens, C), with the B, C, dtype and device of `like`."""
        self._kernel, self._grid, self._fixed, self._options = kernel, (*grid, 1), fixed, options
        self._shape, self._dtype, self._device = (len(like), tokens, like.shape[2]), like.dtype, like.device
        self._alone = not like.is_cuda or torch.cuda.device_count() == 1
        self._rest = tuple(f.data_ptr() if isinstance(f, Tensor) else f for f in fixed)
        self._again: Callable[..., object] | None = None

    def __call__(self, *tensors: Tensor | None) -> Tensor:
        """Return the result, contiguous."""
        out = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        with nullcontext() if self._alone else on_device(out):
            self._launch(out, *tensors)
        return out

    def _launch(self, *tensors: Tensor | None) -> None:
        addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        aligned = not any(address % _ALIGNED for address in addresses if address)
        if aligned and self._again is not None:
            try:
                self._again(*addresses, *self._rest)
                return
            except TypeError:  # this Triton's launcher takes no such arguments, and has launched nothing
                self._again = None
        compiled = self._kernel[self._grid](*tensors, *self._fixed, **self._options)
        if aligned:
            self._again = _bound(compiled, self._kernel, self._grid)


def _bound(compiled: Any, kernel: Any, grid: tuple[int, ...]) -> Callable[..., object] | None:
    """Return a function that launches a binary on the current stream, with the current launch hooks. Return None in the
    interpreter and before Triton 3.3, where launchers do not take the kernel's arguments one by one."""
    try:
        bound: Callable[..., object] = compiled[grid]
        return bound if list(compiled.src.signature) == list(kernel.arg_names) else None
    except (AttributeError, TypeError):
        return None
