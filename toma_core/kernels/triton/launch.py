"""What every launch needs: padded sizes, the right device, the interpreter's limits."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
from torch import Tensor

# Triton's matrix product takes no smaller side.
DOT_MIN = 16


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
