"""What every launch needs: padded sizes, the right device, the interpreter's limits."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
from torch import Tensor

# Triton's matrix product takes no smaller side.
DOT_MIN = 16
_MOST_SIDE = 64


@triton.jit
def _nothing():
    pass


# Whether kernels defined now run in Triton's interpreter. The variable that decides it may change later.
INTERPRETED = not isinstance(_nothing, triton.JITFunction)


def padded(size: int) -> int:
    """The power of two that holds `size` and can be a side of a matrix product."""
    return max(DOT_MIN, triton.next_power_of_2(size))


def upcast(dtype: torch.dtype) -> bool:
    """Whether operands of a product must become fp32 first: Triton's interpreter multiplies the bits of bf16."""
    return INTERPRETED and dtype is torch.bfloat16


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
    if part.shape[0] not in (1, batch) or not part.is_contiguous():
        raise ValueError(f"a plan of {tuple(part.shape)} does not fit a batch of {batch}, or is not contiguous")
    return 0 if part.shape[0] == 1 else part.stride(0)
