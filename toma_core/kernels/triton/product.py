"""Merge and unmerge in one launch each (paper, section 4.2), with detail reuse in two.

Both are one small matrix product per window. The layout changes around it (tokens to windows, slots to the compact row
of destinations) are done by the addresses that a program reads and writes, so nothing is gathered or scattered in a
pass of its own. Programs of one window share no output: every destination and every token is written exactly once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .agreement import still_of
from .launch import blocks, on_device, shared_stride, upcast


@triton.jit
def _merge_kernel(
    x, weights, source, used, expand, out, stride_b, stride_n, stride_c, stride_w, windows, slots, K, C, D,
    HAS_USED: tl.constexpr, UPCAST: tl.constexpr,
    STEPS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    window = program % windows
    image = program // windows
    tiles_c = tl.cdiv(C, BLOCK_C)
    k = (tl.program_id(1) // tiles_c) * BLOCK_K + tl.arange(0, BLOCK_K)
    c = (tl.program_id(1) % tiles_c) * BLOCK_C + tl.arange(0, BLOCK_C)
    x += image * stride_b
    weights += image * stride_w + window * K * slots

    total = tl.zeros([BLOCK_K, BLOCK_C], dtype=tl.float32)
    for step in range(0, STEPS):
        s = step * BLOCK_S + tl.arange(0, BLOCK_S)
        token = tl.load(source + window * slots + s, mask=s < slots, other=0).to(tl.int64)
        M = tl.load(
            weights + k[:, None] * slots + s[None, :], mask=(k < K)[:, None] & (s < slots)[None, :], other=0.0
        ).to(x.dtype.element_ty)
        rows = tl.load(
            x + token[:, None] * stride_n + c[None, :] * stride_c,
            mask=(s < slots)[:, None] & (c < C)[None, :],
            other=0.0,
        )
        if UPCAST:
            M = M.to(tl.float32)
            rows = rows.to(tl.float32)
        total = tl.dot(M, rows, total, input_precision="ieee")

    mine = k < K
    destination = window * K + k
    if HAS_USED:
        mine = mine & (tl.load(used + destination, mask=mine, other=0) != 0)
        destination = tl.load(expand + destination, mask=mine, other=0).to(tl.int64)
    out += image * D * C
    tl.store(
        out + destination[:, None] * C + c[None, :],
        total.to(out.dtype.element_ty),
        mask=mine[:, None] & (c < C)[None, :],
    )


@triton.jit
def _unmerge_kernel(
    y, reduced, x, kept, weights, source, valid, expand, destinations, sums, out,
    stride_yb, stride_yn, stride_yc, stride_rb, stride_rn, stride_rc, stride_xb, stride_xn, stride_xc,
    stride_kb, stride_kn, stride_kc, stride_w, stride_d, windows, slots, K, C, N, parts, trust,
    RESIDUAL: tl.constexpr, REUSE: tl.constexpr, HAS_VALID: tl.constexpr, HAS_USED: tl.constexpr,
    UPCAST: tl.constexpr, STEPS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    window = program % windows
    image = program // windows
    tiles_c = tl.cdiv(C, BLOCK_C)
    s = (tl.program_id(1) // tiles_c) * BLOCK_S + tl.arange(0, BLOCK_S)
    c = (tl.program_id(1) % tiles_c) * BLOCK_C + tl.arange(0, BLOCK_C)
    y += image * stride_yb
    weights += image * stride_w + window * slots * K
    if RESIDUAL:
        reduced += image * stride_rb
    if REUSE:
        kept += image * stride_kb
        still = still_of(sums + image * 2 * parts, parts, BLOCK_P)
        believed = 1.0 - (1.0 - trust) * still

    total = tl.zeros([BLOCK_S, BLOCK_C], dtype=tl.float32)
    for step in range(0, STEPS):
        k = step * BLOCK_K + tl.arange(0, BLOCK_K)
        destination = window * K + k
        if HAS_USED:
            destination = tl.load(expand + destination, mask=k < K, other=0).to(tl.int64)
        A = tl.load(weights + s[:, None] * K + k[None, :], mask=(s < slots)[:, None] & (k < K)[None, :], other=0.0).to(
            y.dtype.element_ty
        )
        mask = (k < K)[:, None] & (c < C)[None, :]
        rows = tl.load(y + destination[:, None] * stride_yn + c[None, :] * stride_yc, mask=mask, other=0.0)
        if RESIDUAL:
            before = tl.load(reduced + destination[:, None] * stride_rn + c[None, :] * stride_rc, mask=mask, other=0.0)
            change = rows.to(tl.float32) - before.to(tl.float32)
            if REUSE:
                token = tl.load(destinations + image * stride_d + destination, mask=k < K, other=0)
                old = tl.load(kept + token[:, None] * stride_kn + c[None, :] * stride_kc, mask=mask, other=0.0)
                change = believed * (change - still * old.to(tl.float32))
            rows = change.to(y.dtype.element_ty)
        if UPCAST:
            A = A.to(tl.float32)
            rows = rows.to(tl.float32)
        total = tl.dot(A, rows, total, input_precision="ieee")

    mine = s < slots
    if HAS_VALID:
        mine = mine & (tl.load(valid + window * slots + s, mask=mine, other=0) != 0)
    token = tl.load(source + window * slots + s, mask=mine, other=0).to(tl.int64)
    mask = mine[:, None] & (c < C)[None, :]
    if RESIDUAL:
        x += image * stride_xb
        total += tl.load(x + token[:, None] * stride_xn + c[None, :] * stride_xc, mask=mask, other=0.0).to(tl.float32)
    if REUSE:
        update = tl.load(kept + token[:, None] * stride_kn + c[None, :] * stride_kc, mask=mask, other=0.0)
        total += still * update.to(tl.float32)
    out += image * N * C
    tl.store(out + token[:, None] * C + c[None, :], total.to(out.dtype.element_ty), mask=mask)


def merge(x: Tensor, weights: Tensor, source: Tensor, used: Tensor | None, expand: Tensor | None, D: int) -> Tensor:
    """X' = M X. (B, N, C), any strides -> (B, D, C), with fp32 sums.

    weights: (B, W, K, S); source: (W, S) int64; used: (W, K) bool and expand: (W * K,) int64 of the `Budget`, or None.
    """
    (_, windows, K, slots), (batch, _, C) = weights.shape, x.shape
    stride_w = shared_stride(weights, batch)
    out = torch.empty(batch, D, C, device=x.device, dtype=x.dtype)
    block_k, block_s, block_c, warps = blocks(x, K, slots)
    grid = (batch * windows, triton.cdiv(K, block_k) * triton.cdiv(C, block_c))
    with on_device(x):
        _merge_kernel[grid](
            x, weights, source, used, expand, out, *x.stride(), stride_w, windows, slots, K, C, D,
            used is not None, upcast(x.dtype), triton.cdiv(slots, block_s),
            block_k, block_s, block_c, num_warps=warps, num_stages=2,
        )  # fmt: skip
    return out


def unmerge(
    y: Tensor,
    reduced: Tensor | None,
    x: Tensor | None,
    weights: Tensor,
    source: Tensor,
    valid: Tensor | None,
    expand: Tensor | None,
    N: int,
    reused: tuple[Tensor, Tensor, Tensor] | None = None,
    trust: float = 1.0,
) -> Tensor:
    """Y = A^T Y', or with `reduced` and `x` the restored block output x + A^T (Y' - reduced). -> (B, N, C)

    y, reduced: (B, D, C) and x: (B, N, C), any strides; weights: (B, W, S, K); the rest as in `merge`. Sums are fp32,
    and the residual is added before the one rounding to y's dtype. reused: kept, sums and destinations of `reuse`.
    """
    (_, windows, slots, K), (batch, _, C) = weights.shape, y.shape
    stride_w = shared_stride(weights, batch)
    kept, sums, destinations = (None, None, None) if reused is None else reused
    stride_d = 0 if destinations is None else shared_stride(destinations, batch)
    parts = 1 if sums is None else sums.shape[2]
    out = torch.empty(batch, N, C, device=y.device, dtype=y.dtype)
    block_s, block_k, block_c, warps = blocks(y, slots, K)
    grid = (batch * windows, triton.cdiv(slots, block_s) * triton.cdiv(C, block_c))
    strides = tuple(n for t in (y, reduced, x, kept) for n in ((0, 0, 0) if t is None else t.stride()))
    with on_device(y):
        _unmerge_kernel[grid](
            y, reduced, x, kept, weights, source, valid, expand, destinations, sums, out, *strides, stride_w, stride_d,
            windows, slots, K, C, N, parts, trust,
            x is not None, kept is not None, valid is not None, expand is not None, upcast(y.dtype),
            triton.cdiv(K, block_k), block_k, block_s, block_c, triton.next_power_of_2(parts),
            num_warps=warps, num_stages=2,
        )  # fmt: skip
    return out


def reuse(
    out: Tensor,
    reduced: Tensor,
    x: Tensor,
    kept: Tensor,
    sums: Tensor,
    destinations: Tensor,
    weights: Tensor,
    source: Tensor,
    valid: Tensor | None,
    expand: Tensor | None,
    trust: float,
) -> Tensor:
    """x + a kept + A^T t (out - reduced - a kept at destinations), with a from `agreement` and t = 1 - (1 - trust) a.

    x, kept: (B, N, C), any strides; the rest as in `agreement` and `unmerge`. Sums are fp32, rounded once. -> (B, N, C)
    """
    return unmerge(out, reduced, x, weights, source, valid, expand, x.shape[1], (kept, sums, destinations), trust)
