"""Merge and unmerge in one launch each (paper, section 4.2), and propagate cached tensors in two launches.

Merging and unmerging are each one small matrix product per window. To propagate (see `latent_regression`), the first
launch computes the change at destinations; for keys it also undoes the rotation of the change. The second launch
computes unmerge(change) + spread @ answer; for keys it rotates this sum. Then it adds the cached tensor. Gathering the
tokens of a window needs no extra pass, because each program computes the addresses that it reads and writes. Every
destination and token is written once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...windows import Budget, Windows
from ..layout import cdiv, padded
from .launch import Launch, blocks, budget_stride, require, turns, upcast, weight_strides

_BLOCK_D, _MAX_CHANNELS = 16, 128  # of `_change_kernel`: 16 elements per thread of 4 warps
_BLOCK_F = 32  # features per iteration; of 33 or 129 features, the last has its own iteration


@triton.jit(do_not_specialize=("stride_u", "windows", "slots", "K", "D"))
def _merge_kernel(
    out, x, weights, used, expand, source,
    stride_b, stride_n, stride_c, stride_wb, stride_ww, stride_wk, stride_u, windows, slots, K, C, D,
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
    weights += image * stride_wb + window * stride_ww

    total = tl.zeros([BLOCK_K, BLOCK_C], dtype=tl.float32)
    for step in range(0, STEPS):
        s = step * BLOCK_S + tl.arange(0, BLOCK_S)
        token = tl.load(source + window * slots + s, mask=s < slots, other=0).to(tl.int64)
        # Rows of weights are padded in memory and read with their padding, 16 bytes at a time.
        mask = (k < K)[:, None] & (s < stride_wk)[None, :]
        M = tl.load(weights + k[:, None] * stride_wk + s[None, :], mask=mask, other=0.0).to(x.dtype.element_ty)
        M = tl.where((s < slots)[None, :], M, 0.0)
        mask = (s < slots)[:, None] & (c < C)[None, :]
        rows = tl.load(x + token[:, None] * stride_n + c[None, :] * stride_c, mask=mask, other=0.0)
        if UPCAST:
            M = M.to(tl.float32)
            rows = rows.to(tl.float32)
        total = tl.dot(M, rows, total, input_precision="ieee")

    mine = k < K
    destination = window * K + k
    if HAS_USED:
        mine = mine & (tl.load(used + image * stride_u + destination, mask=mine, other=0) != 0)
        destination = tl.load(expand + image * stride_u + destination, mask=mine, other=0).to(tl.int64)
    out += image * D * C
    mask = mine[:, None] & (c < C)[None, :]
    tl.store(out + destination[:, None] * C + c[None, :], total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _rotated(x, R, present, pair, P, INVERSE: tl.constexpr):
    """Rotate pairs of adjacent channels of x, [rows, 2 * pairs] fp32. R: [rows, 1], the address of each row's (P, 2, 2)
    matrices, which all heads share. pair: [pairs], the index of each pair among the pairs of all heads. present: [rows,
    1], False for rows of x that are padding."""
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
    fresh += image * stride_fb
    cached += image * stride_xb
    new = tl.load(fresh + d[:, None] * stride_fn + c[None, :] * stride_fc, mask=mask, other=0.0)
    old = tl.load(cached + token[:, None] * stride_xn + c[None, :] * stride_xc, mask=mask, other=0.0)
    change = new.to(tl.float32) - old.to(tl.float32)
    if ROTATED:
        pair = tl.program_id(1) * (BLOCK_C // 2) + tl.arange(0, BLOCK_C // 2)
        change = _rotated(change, R + image * stride_rb + d[:, None] * stride_rn, (d < D)[:, None], pair, P, True)
    out += image * D * C
    tl.store(out + d[:, None] * C + c[None, :], change.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=("stride_u", "windows", "slots", "K", "N", "F", "steps_f", "P"))
def _unmerge_kernel(
    out, y, weights, expand, reduced, x, spread, answer, R, source, valid,
    stride_yb, stride_yn, stride_yc, stride_rb, stride_rn, stride_rc, stride_xb, stride_xn, stride_xc,
    stride_wb, stride_ww, stride_ws, stride_u, windows, slots, K, C, N,
    stride_gb, stride_gn, stride_tb, stride_tn, F, steps_f, P,
    RESIDUAL: tl.constexpr, REGRESSED: tl.constexpr, ROTATED: tl.constexpr,
    HAS_VALID: tl.constexpr, HAS_USED: tl.constexpr, UPCAST: tl.constexpr, STEPS: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    window = program % windows
    image = program // windows
    tiles_c = tl.cdiv(C, BLOCK_C)
    s = (tl.program_id(1) // tiles_c) * BLOCK_S + tl.arange(0, BLOCK_S)
    c = (tl.program_id(1) % tiles_c) * BLOCK_C + tl.arange(0, BLOCK_C)
    y += image * stride_yb
    weights += image * stride_wb + window * stride_ww
    if RESIDUAL:
        reduced += image * stride_rb

    total = tl.zeros([BLOCK_S, BLOCK_C], dtype=tl.float32)
    for step in range(0, STEPS):
        k = step * BLOCK_K + tl.arange(0, BLOCK_K)
        destination = window * K + k
        if HAS_USED:
            destination = tl.load(expand + image * stride_u + destination, mask=k < K, other=0).to(tl.int64)
        mask = (s < slots)[:, None] & (k < stride_ws)[None, :]
        A = tl.load(weights + s[:, None] * stride_ws + k[None, :], mask=mask, other=0.0).to(y.dtype.element_ty)
        A = tl.where((k < K)[None, :], A, 0.0)
        mask = (k < K)[:, None] & (c < C)[None, :]
        rows = tl.load(y + destination[:, None] * stride_yn + c[None, :] * stride_yc, mask=mask, other=0.0)
        if RESIDUAL:
            before = tl.load(reduced + destination[:, None] * stride_rn + c[None, :] * stride_rc, mask=mask, other=0.0)
            rows = (rows.to(tl.float32) - before.to(tl.float32)).to(y.dtype.element_ty)
        if UPCAST:
            A = A.to(tl.float32)
            rows = rows.to(tl.float32)
        total = tl.dot(A, rows, total, input_precision="ieee")

    mine = s < slots
    if HAS_VALID:
        mine = mine & (tl.load(valid + window * slots + s, mask=mine, other=0) != 0)
    token = tl.load(source + window * slots + s, mask=mine, other=0).to(tl.int64)
    if REGRESSED:
        spread += image * stride_gb
        answer += image * F * C
        for step in range(0, steps_f):
            f = step * BLOCK_F + tl.arange(0, BLOCK_F)
            # Rows of features are padded and read like rows of weights.
            mask = mine[:, None] & (f < stride_gn)[None, :]
            G = tl.load(spread + token[:, None] * stride_gn + f[None, :], mask=mask, other=0.0).to(y.dtype.element_ty)
            G = tl.where((f < F)[None, :], G, 0.0)
            mask = (f < F)[:, None] & (c < C)[None, :]
            rows = tl.load(answer + f[:, None] * C + c[None, :], mask=mask, other=0.0)
            if UPCAST:
                G = G.to(tl.float32)
                rows = rows.to(tl.float32)
            total = tl.dot(G, rows, total, input_precision="ieee")
    if ROTATED:
        pair = (tl.program_id(1) % tiles_c) * (BLOCK_C // 2) + tl.arange(0, BLOCK_C // 2)
        total = _rotated(total, R + image * stride_tb + token[:, None] * stride_tn, mine[:, None], pair, P, False)
    mask = mine[:, None] & (c < C)[None, :]
    if RESIDUAL or REGRESSED:
        x += image * stride_xb
        total += tl.load(x + token[:, None] * stride_xn + c[None, :] * stride_xc, mask=mask, other=0.0).to(tl.float32)
    out += image * N * C
    tl.store(out + token[:, None] * C + c[None, :], total.to(out.dtype.element_ty), mask=mask)


def merge(x: Tensor, weights: Tensor, windows: Windows, budget: Budget) -> Launch:
    """Prepare the launch that computes M x, (B, D, C). The launch is called with x, weights, and the budget's `valid`
    and `expand`. x: (B, N, C), any strides. weights: M, (B or 1, W, K, S), rows contiguous."""
    require(x, windows.tokens)
    (_, count, K, slots), (batch, _, C) = weights.shape, x.shape
    strides = (*x.stride(), *weight_strides(weights, batch), budget_stride(budget.expand, 1))
    block_k, block_s, block_c, warps = blocks(x, K, slots)
    grid = (batch * count, cdiv(K, block_k) * cdiv(C, block_c))
    sizes = (count, slots, K, C, budget.total, budget.valid is not None, upcast(x.dtype), cdiv(slots, block_s))
    fixed = (windows.source, *strides, *sizes, block_k, block_s, block_c)
    return Launch(_merge_kernel, grid, x, budget.total, fixed, num_warps=warps, num_stages=2)


def unmerge(windows: Windows, budget: Budget, y: Tensor, weights: Tensor, *others: Tensor | None) -> Launch:
    """Prepare the launch that computes one of these sums, (B, N, C), and rounds it once:

        A^T y                            from y alone
        x + A^T (y - reduced)            with reduced and x
        x + R (A^T y + spread answer)    with x, spread and answer; without R if it is None

    others: reduced, x, spread, answer and R. The launch is called with y, weights, the budget's `expand` and `others`.

    y, reduced: (B, D, C); x: (B, N, C); any strides. weights: A^T, (B or 1, W, S, K); spread: (B or 1, N, F); rows
    contiguous. answer: (B, F, C), contiguous. R: rotations of all tokens, see `_rotation_strides`.
    """
    reduced, x, spread, answer, R = others
    (_, count, slots, K), (batch, _, C) = weights.shape, y.shape
    by_image, by_token, F = 0, 0, 0
    if spread is not None:
        require(spread, windows.tokens)
        F = spread.shape[2]
        by_image, _, by_token = weight_strides(spread[:, None], batch)
    for t, length in ((y, budget.total), (reduced, budget.total), (x, windows.tokens), (answer, F)):
        if t is not None:
            require(t, length, y)
    if answer is not None and not answer.is_contiguous():
        raise ValueError(f"answers with strides {answer.stride()} are not contiguous")
    block_s, block_k, block_c, warps = blocks(y, slots, K)
    grid = (batch * count, cdiv(slots, block_s) * cdiv(C, block_c))
    of_reduced, of_x = ((0, 0, 0) if t is None else t.stride() for t in (reduced, x))
    of_weights = (*weight_strides(weights, batch), budget_stride(budget.expand, 1))
    *rotation, P = _rotation_strides(R, batch, windows.tokens, C)
    sizes = (count, slots, K, C, windows.tokens, by_image, by_token, *rotation, F, turns(cdiv(F, _BLOCK_F)), P)
    flags = [t is not None for t in (reduced, spread, R, windows.valid, budget.expand)]
    steps = (upcast(y.dtype), cdiv(K, block_k), block_k, block_s, block_c, _BLOCK_F)
    strides = (*y.stride(), *of_reduced, *of_x, *of_weights)
    fixed = (windows.source, windows.valid, *strides, *sizes, *flags, *steps)
    # A program that rotates has 8 warps, because rotations take as many registers as the sums.
    warps = warps if R is None else 8
    return Launch(_unmerge_kernel, grid, y, windows.tokens, fixed, num_warps=warps, num_stages=2)


def change(fresh: Tensor, cached: Tensor, destinations: Tensor, R: Tensor | None) -> Launch:
    """Prepare the launch that computes R^-1 (fresh - cached at destinations), (B, D, C), and rounds it once. The launch
    is called with these four tensors. fresh: (B, D, C); cached: (B, N, C); any strides. destinations: (B or 1, D)
    int64, rows contiguous. R: rotations of the destinations, see `_rotation_strides`."""
    batch, D, C = fresh.shape
    require(cached, cached.shape[1], fresh)
    if destinations.shape not in ((1, D), (batch, D)) or destinations.stride(1) != 1 < D:
        raise ValueError(f"destinations of {tuple(destinations.shape)} do not fit tokens of {tuple(fresh.shape)}")
    stride_d = destinations.stride(0) if len(destinations) > 1 else 0
    *by_token, P = _rotation_strides(R, batch, D, C)
    strides = (*fresh.stride(), *cached.stride(), stride_d, *by_token)
    block_c = min(_MAX_CHANNELS, padded(C))
    tiles = cdiv(D, _BLOCK_D)
    fixed = (*strides, tiles, C, D, P, R is not None, _BLOCK_D, block_c)
    return Launch(_change_kernel, (batch * tiles, cdiv(C, block_c)), fresh, D, fixed, num_warps=4)


def _rotation_strides(R: Tensor | None, batch: int, tokens: int, channels: int) -> tuple[int, int, int]:
    """Return R's strides between images (0 if they share R) and between tokens, and P, the channel pairs of a head. R:
    (B or 1, T, 1, P, 2, 2), any dtype, the matrices of a token contiguous; or None. Raises ValueError."""
    if R is None:
        return 0, 0, 1
    images, rows, _, P = R.shape[:4]
    if images not in (1, batch) or rows != tokens or channels % (2 * P) or not R[0, 0].is_contiguous():
        raise ValueError(f"rotations of {tuple(R.shape)} with strides {R.stride()} do not fit {tokens} tokens")
    return (R.stride(0) if images > 1 else 0), R.stride(1), P
