"""Quantise and dequantise to four bits per element, see `toma_core.quant4`, in one launch each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...quant4 import BITS, WIDER, Int4Tensor, group_of
from ..layout import cdiv
from .launch import on_device

_ROWS = 64  # tokens per program


@triton.jit(do_not_specialize=("rows", "N"))
def _quantize_kernel(
    codes, low, step, x, stride_b, stride_n, stride_c, rows, N, groups, wider, least, lowest,
    BITS: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    group = tl.program_id(1)
    here = row < rows
    c = group * 2 * HALF + tl.arange(0, HALF)
    x += (row // N * stride_b + row % N * stride_n)[:, None]
    mask = here[:, None] & (c >= 0)[None, :]
    first = tl.load(x + c[None, :] * stride_c, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x + (c + HALF)[None, :] * stride_c, mask=mask, other=0.0).to(tl.float32)
    bottom = tl.minimum(tl.min(first, axis=1), tl.min(second, axis=1))
    top = tl.maximum(tl.max(first, axis=1), tl.max(second, axis=1))
    # Compute codes from the step as it is stored, rounded to the dtype of `step`.
    width = tl.maximum((top - bottom) * wider, least).to(step.dtype.element_ty).to(tl.float32)
    middle = 0.5 * (top + bottom)
    left = tl.minimum(tl.maximum((first - middle[:, None]) / width[:, None] + 8.0, 0.0), 15.5).to(tl.int32)
    right = tl.minimum(tl.maximum((second - middle[:, None]) / width[:, None] + 8.0, 0.0), 15.5).to(tl.int32)
    index = row * groups + group
    codes += index[:, None] * HALF + tl.arange(0, HALF)[None, :]
    tl.store(codes, (left | (right << BITS)).to(tl.uint8), mask=mask)
    tl.store(low + index, tl.maximum(middle - 7.5 * width, lowest).to(low.dtype.element_ty), mask=here)
    tl.store(step + index, width.to(step.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=("rows",))
def _dequantize_kernel(
    out, codes, low, step, rows, groups, lowest,
    BITS: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    group = tl.program_id(1)
    here = row < rows
    index, c = row * groups + group, tl.arange(0, HALF)
    mask = here[:, None] & (c >= 0)[None, :]
    code = tl.load(codes + index[:, None] * HALF + c[None, :], mask=mask, other=0).to(tl.int32)
    bottom = tl.load(low + index, mask=here, other=0.0).to(tl.float32)[:, None]
    width = tl.load(step + index, mask=here, other=0.0).to(tl.float32)[:, None]
    out += index[:, None] * 2 * HALF + c[None, :]
    # Clamp, because values rounded beyond the limit of the dtype would be infinite.
    left = tl.minimum(tl.maximum(bottom + (code & 15).to(tl.float32) * width, lowest), -lowest)
    right = tl.minimum(tl.maximum(bottom + (code >> BITS).to(tl.float32) * width, lowest), -lowest)
    tl.store(out, left.to(out.dtype.element_ty), mask=mask)
    tl.store(out + HALF, right.to(out.dtype.element_ty), mask=mask)


def quantize(x: Tensor) -> Int4Tensor | Tensor:
    """See `toma_core.quant4.quantize`: (B, N, C) in fp16, bf16 or fp32, any strides."""
    group = group_of(x.shape[-1])
    if not group:
        return x.clone()
    batch, N, C = x.shape
    groups = C // group
    codes = torch.empty(batch, N, C // 2, dtype=torch.uint8, device=x.device)
    low, step = (torch.empty(batch, N, groups, dtype=x.dtype, device=x.device) for _ in range(2))
    limits = torch.finfo(x.dtype)
    sizes = (*x.stride(), batch * N, N, groups, WIDER / 15, limits.tiny, limits.min)
    grid = (cdiv(batch * N, _ROWS), groups)
    with on_device(x):
        _quantize_kernel[grid](codes, low, step, x, *sizes, BITS, group // 2, _ROWS, num_warps=4)
    return Int4Tensor(codes, low, step)


def dequantize(quantized: Int4Tensor) -> Tensor:
    """See `Int4Tensor.dequantize`."""
    batch, N, groups = quantized.low.shape
    out = torch.empty(quantized.shape, dtype=quantized.dtype, device=quantized.device)
    parts = [part.contiguous() for part in quantized]
    half = quantized.codes.shape[-1] // groups
    sizes = batch * N, groups, torch.finfo(quantized.dtype).min
    with on_device(out):
        _dequantize_kernel[(cdiv(batch * N, _ROWS), groups)](out, *parts, *sizes, BITS, half, _ROWS, num_warps=4)
    return out
