"""Compute the change of cached keys, values or updates at destinations in one launch; rotate pairs of channels within a
kernel."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..layout import cdiv, padded
from .launch import Launch, require

_BLOCK_D, _MAX_CHANNELS = 16, 128  # 16 elements per thread of 4 warps


@triton.jit
def rotated(x, R, present, pair, P, INVERSE: tl.constexpr):
    """Rotate pairs of adjacent channels of x, [rows, 2 * pairs] fp32.

    R: [rows, 1], the address of each row's (P, 2, 2) matrices, which all heads share. pair: [pairs], the index of each
    pair among the pairs of all heads. present: [rows, 1], False for rows of x that are padding.
    """
    first, second = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
    at = R + (pair % P)[None, :] * 4
    a = tl.load(at, mask=present, other=0.0).to(tl.float32)
    b = tl.load(at + (2 if INVERSE else 1), mask=present, other=0.0).to(tl.float32)
    c = tl.load(at + (1 if INVERSE else 2), mask=present, other=0.0).to(tl.float32)
    d = tl.load(at + 3, mask=present, other=0.0).to(tl.float32)
    return tl.reshape(tl.join(a * first + b * second, c * first + d * second), (x.shape[0], x.shape[1]))


@triton.jit(do_not_specialize=("tiles", "D", "P"))
def _change_kernel(
    out, fresh, cached, destinations, R,
    stride_fb, stride_fn, stride_fc, stride_xb, stride_xn, stride_xc, stride_d, stride_rb, stride_rn, tiles, C, D, P,
    ROTATED: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    image = program // tiles
    d = (program % tiles) * BLOCK_D + tl.arange(0, BLOCK_D)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = (d < D)[:, None] & (c < C)[None, :]
    token = tl.load(destinations + image * stride_d + d, mask=d < D, other=0)
    new = tl.load(fresh + image * stride_fb + d[:, None] * stride_fn + c[None, :] * stride_fc, mask=mask, other=0.0).to(
        tl.float32
    )
    old = tl.load(
        cached + image * stride_xb + token[:, None] * stride_xn + c[None, :] * stride_xc, mask=mask, other=0.0
    ).to(tl.float32)
    change = new - old
    if ROTATED:
        pair = tl.program_id(1) * (BLOCK_C // 2) + tl.arange(0, BLOCK_C // 2)
        change = rotated(change, R + image * stride_rb + d[:, None] * stride_rn, (d < D)[:, None], pair, P, True)
    out += image * D * C
    tl.store(out + d[:, None] * C + c[None, :], change.to(out.dtype.element_ty), mask=mask)


def change(fresh: Tensor, cached: Tensor, destinations: Tensor, R: Tensor | None) -> Launch:
    """Prepare the launch that computes R^-1 (fresh - cached at destinations), (B, D, C), with one rounding.

    fresh: (B, D, C); cached: (B, N, C); any strides. destinations: (B or 1, D) int64, rows contiguous. R: rotations of
    the destinations, see `rotation_strides`. The launch is called with all four tensors.
    """
    batch, D, C = fresh.shape
    require(cached, cached.shape[1], fresh)
    if destinations.shape not in ((1, D), (batch, D)) or destinations.stride(1) != 1 < D:
        raise ValueError(f"destinations of {tuple(destinations.shape)} do not fit tokens of {tuple(fresh.shape)}")
    stride_d = destinations.stride(0) if len(destinations) > 1 else 0
    strides = (*fresh.stride(), *cached.stride(), stride_d, *rotation_strides(R, batch, D, C))
    block_c = min(_MAX_CHANNELS, padded(C))
    tiles = cdiv(D, _BLOCK_D)
    fixed = (*strides, tiles, C, D, pairs(R), R is not None, _BLOCK_D, block_c)
    return Launch(_change_kernel, (batch * tiles, cdiv(C, block_c)), fresh, D, fixed, num_warps=4)


def pairs(R: Tensor | None) -> int:
    """Return P, the number of channel pairs of a head that R rotates."""
    return 1 if R is None else R.shape[3]


def rotation_strides(R: Tensor | None, batch: int, tokens: int, channels: int) -> tuple[int, int]:
    """Return the strides of R between images, 0 if all share one, and between tokens; zeros without R. R: (B or 1, T,
    1, P, 2, 2), any dtype, the matrices of a token contiguous. Raises ValueError."""
    if R is None:
        return 0, 0
    images, rows, _, P = R.shape[:4]
    if images not in (1, batch) or rows != tokens or channels % (2 * P) or not R[0, 0].is_contiguous():
        raise ValueError(f"rotations of {tuple(R.shape)} with strides {R.stride()} do not fit {tokens} tokens")
    return (R.stride(0) if images > 1 else 0), R.stride(1)
