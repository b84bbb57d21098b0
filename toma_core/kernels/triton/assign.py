"""Merge and unmerge of hard plans in one launch each: a destination is the mean of its members, a token a copy of it.

Members of a destination are where the owners say so, compared in registers: sums have one order, without atomics. They
are products with a matrix of ones and zeros, exact in every dtype, and summed in fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import DOT_MIN, blocks, on_device, padded, upcast
from .select import inside_window


@triton.jit
def _mean_kernel(
    x, owners, source, valid, used, expand, out, stride_b, stride_n, stride_c, windows, slots, K, C, N, D,
    HAS_VALID: tl.constexpr, HAS_USED: tl.constexpr, UPCAST: tl.constexpr,
    STEPS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    window = program % windows
    image = program // windows
    tiles_c = tl.cdiv(C, BLOCK_C)
    k = (tl.program_id(1) // tiles_c) * BLOCK_K + tl.arange(0, BLOCK_K)
    c = (tl.program_id(1) % tiles_c) * BLOCK_C + tl.arange(0, BLOCK_C)
    x += image * stride_b
    owners += image * N
    out += image * D * C
    mine = k < K
    destination = window * K + k
    if HAS_USED:
        mine = mine & (tl.load(used + destination, mask=mine, other=0) != 0)
        destination = tl.load(expand + destination, mask=mine, other=0)

    total = tl.zeros([BLOCK_K, BLOCK_C], dtype=tl.float32)
    members = tl.zeros([BLOCK_K], dtype=tl.float32)
    for step in range(0, STEPS):
        s = step * BLOCK_S + tl.arange(0, BLOCK_S)
        inside = inside_window(valid, window, slots, s, HAS_VALID)
        token = tl.load(source + window * slots + s, mask=inside, other=0).to(tl.int64)
        owner = tl.load(owners + token, mask=inside, other=-1) - image * D
        member = tl.where(inside[None, :] & (destination[:, None] == owner[None, :]), 1.0, 0.0)
        members += tl.sum(member, axis=1)
        rows = tl.load(
            x + token[:, None] * stride_n + c[None, :] * stride_c, mask=inside[:, None] & (c < C)[None, :], other=0.0
        )
        if UPCAST:
            rows = rows.to(tl.float32)
        total = tl.dot(member.to(rows.dtype), rows, total, input_precision="ieee")

    total = total / tl.maximum(members, 1.0)[:, None]
    tl.store(
        out + destination[:, None] * C + c[None, :],
        total.to(out.dtype.element_ty),
        mask=mine[:, None] & (c < C)[None, :],
    )


@triton.jit
def _copy_kernel(
    y, reduced, x, owners, out,
    stride_yb, stride_yn, stride_yc, stride_rb, stride_rn, stride_rc, stride_xb, stride_xn, stride_xc, C, N, D,
    RESIDUAL: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(N, BLOCK_N)
    program = tl.program_id(0).to(tl.int64)
    image = program // tiles
    n = (program % tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = (n < N)[:, None] & (c < C)[None, :]
    owner = tl.load(owners + image * N + n, mask=n < N, other=0) - image * D
    copied = tl.load(y + image * stride_yb + owner[:, None] * stride_yn + c[None, :] * stride_yc, mask=mask, other=0.0)
    if RESIDUAL:
        before = reduced + image * stride_rb + owner[:, None] * stride_rn + c[None, :] * stride_rc
        update = copied.to(tl.float32) - tl.load(before, mask=mask, other=0.0).to(tl.float32)
        token = x + image * stride_xb + n[:, None] * stride_xn + c[None, :] * stride_xc
        copied = (tl.load(token, mask=mask, other=0.0).to(tl.float32) + update).to(out.dtype.element_ty)
    tl.store(out + image * N * C + n[:, None] * C + c[None, :], copied, mask=mask)


def merge_hard(
    x: Tensor, owners: Tensor, source: Tensor, valid: Tensor | None, used: Tensor | None, expand: Tensor | None, K: int,
    D: int,
) -> Tensor:  # fmt: skip
    """The mean of every destination's members. (B, N, C), any strides -> (B, D, C), with fp32 sums.

    owners: (B, N) int64, `MergePlan.owners`; source: (W, S) int64; valid: (W, S)
    bool; used: (W, K) bool and expand: (W * K,) int64 of the `Budget`, or None. A destination without members is zero.
    """
    (windows, slots), (batch, N, C) = source.shape, x.shape
    out = torch.empty(batch, D, C, device=x.device, dtype=x.dtype)
    block_k, block_s, block_c, warps = blocks(x, K, slots)
    grid = (batch * windows, triton.cdiv(K, block_k) * triton.cdiv(C, block_c))
    with on_device(x):
        _mean_kernel[grid](
            x, owners.contiguous(), source, valid, used, expand, out, *x.stride(), windows, slots, K, C, N, D,
            valid is not None, used is not None, upcast(x.dtype), triton.cdiv(slots, block_s),
            block_k, block_s, block_c, num_warps=warps, num_stages=2,
        )  # fmt: skip
    return out


def unmerge_hard(y: Tensor, reduced: Tensor | None, x: Tensor | None, owners: Tensor) -> Tensor:
    """Every token's destination, or with `reduced` and `x` x + (y - reduced) of it, rounded once. -> (B, N, C)

    y, reduced: (B, D, C) and x: (B, N, C), any strides; owners: (B, N) int64, `MergePlan.owners`.
    """
    (batch, N), C = owners.shape, y.shape[2]
    out = torch.empty(batch, N, C, device=y.device, dtype=y.dtype)
    block_n, block_c = min(32, padded(N)), min(128, max(DOT_MIN, triton.next_power_of_2(C)))
    strides = tuple(n for t in (y, reduced, x) for n in ((0, 0, 0) if t is None else t.stride()))
    grid = (batch * triton.cdiv(N, block_n), triton.cdiv(C, block_c))
    with on_device(y):
        _copy_kernel[grid](
            y, reduced, x, owners.contiguous(), out, *strides, C, N, y.shape[1], x is not None,
            block_n, block_c, num_warps=4,
        )  # fmt: skip
    return out
