"""Merge and unmerge in one launch each (paper, section 4.2).

Merging and unmerging are each one small matrix product per window. If changes are regressed on latents
(`latent_regression`), unmerging also adds the product of features and coefficients (`answer`), rotates the sum, and
then adds the cached tensor. Layout changes (tokens to windows, slots to destinations) need no extra pass: programs read
and write at the right addresses. Every destination and token is written once.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ...windows import Budget, Windows
from ..layout import cdiv
from .change import pairs, rotated, rotation_strides
from .launch import Launch, blocks, budget_stride, require, turns, upcast, weight_strides

_BLOCK_F = 32  # features per iteration; of 33 or 129 features, the last has an iteration to itself


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
        # Rows are padded in memory and read with their padding, 16 bytes at a time.
        mask = (k < K)[:, None] & (s < stride_wk)[None, :]
        M = tl.load(weights + k[:, None] * stride_wk + s[None, :], mask=mask, other=0.0).to(x.dtype.element_ty)
        M = tl.where((s < slots)[None, :], M, 0.0)
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
        mine = mine & (tl.load(used + image * stride_u + destination, mask=mine, other=0) != 0)
        destination = tl.load(expand + image * stride_u + destination, mask=mine, other=0).to(tl.int64)
    out += image * D * C
    tl.store(
        out + destination[:, None] * C + c[None, :],
        total.to(out.dtype.element_ty),
        mask=mine[:, None] & (c < C)[None, :],
    )


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
        total = rotated(total, R + image * stride_tb + token[:, None] * stride_tn, mine[:, None], pair, P, False)
    mask = mine[:, None] & (c < C)[None, :]
    if RESIDUAL or REGRESSED:
        x += image * stride_xb
        total += tl.load(x + token[:, None] * stride_xn + c[None, :] * stride_xc, mask=mask, other=0.0).to(tl.float32)
    out += image * N * C
    tl.store(out + token[:, None] * C + c[None, :], total.to(out.dtype.element_ty), mask=mask)


def merge(tokens: tuple[Tensor, ...], weights: Tensor, windows: Windows, budget: Budget) -> Launch:
    """Prepare the launch that computes X' = M X, (B, D, C), for tokens (x,) of (B, N, C), any strides, with fp32 sums.

    weights: (B or 1, W, K, S), rows contiguous. The launch is called with x, weights, and the budget's `valid` and
    `expand`.
    """
    (x,) = tokens
    require(x, windows.tokens)
    (_, count, K, slots), (batch, _, C) = weights.shape, x.shape
    strides = (*x.stride(), *weight_strides(weights, batch), budget_stride(budget.expand, 1))
    block_k, block_s, block_c, warps = blocks(x, K, slots)
    grid = (batch * count, cdiv(K, block_k) * cdiv(C, block_c))
    sizes = (count, slots, K, C, budget.total, budget.valid is not None, upcast(x.dtype), cdiv(slots, block_s))
    fixed = (windows.source, *strides, *sizes, block_k, block_s, block_c)
    return Launch(_merge_kernel, grid, x, budget.total, fixed, num_warps=warps, num_stages=2)


def unmerge(tokens: tuple[Tensor, ...], weights: Tensor, windows: Windows, budget: Budget) -> Launch:
    """Prepare the launch that computes Y = A^T Y', (B, N, C), for tokens (y,), or x + A^T (y - reduced), (B, N, C), for
    tokens (y, reduced, x).

    y, reduced: (B, D, C); x: (B, N, C); any strides. weights: (B or 1, W, S, K). Sums are fp32, rounded once to y's
    dtype. The launch is called with y, weights, the budget's `expand`, then reduced and x if given.
    """
    y, *residual = tokens
    for t, length in zip(tokens, (budget.total, budget.total, windows.tokens), strict=False):
        require(t, length, y)
    strides = tuple(n for t in tokens for n in t.stride()) + (0, 0, 0) * (3 - len(tokens))
    missing = (None,) * (3 if residual else 5)
    return _unmerging(y, strides, weights, windows, budget, missing, residual=bool(residual))


def propagate(
    tokens: tuple[Tensor, ...], spread: Tensor, R: Tensor | None, weights: Tensor, windows: Windows, budget: Budget
) -> Launch:
    """Prepare the launch that computes x + R (A^T y + spread answer), (B, N, C), with one rounding, for tokens (y, x,
    answer).

    y: (B, D, C); x: (B, N, C); answer: (B, F, C), contiguous; spread: (B or 1, N, F), rows contiguous; weights: as for
    `unmerge`. R: rotations of all tokens, see `rotation_strides`. The launch is called with y, weights, the budget's
    `expand`, None, x, spread, answer and R.
    """
    (y, x, answer), F = tokens, spread.shape[2]
    for t, length in zip(tokens, (budget.total, windows.tokens, F), strict=True):
        require(t, length, x)
    require(spread, windows.tokens)
    if not answer.is_contiguous():
        raise ValueError(f"answers with strides {answer.stride()} are not contiguous")
    by_image, _, by_token = weight_strides(spread[:, None], len(x))
    regressed = (by_image, by_token, *rotation_strides(R, len(x), *x.shape[1:]), F, turns(cdiv(F, _BLOCK_F)), pairs(R))
    strides = (*y.stride(), 0, 0, 0, *x.stride())
    return _unmerging(y, strides, weights, windows, budget, (), regressed, rotates=R is not None)


def _unmerging(
    like: Tensor,
    strides: tuple[int, ...],
    weights: Tensor,
    windows: Windows,
    budget: Budget,
    missing: tuple[None, ...],
    regressed: tuple[Any, ...] = (),
    *,
    residual: bool = False,
    rotates: bool = False,
) -> Launch:
    """Prepare the launch that unmerges to tokens with the B, C and dtype of `like`. strides: those of y, reduced and x.
    missing: a None per tensor that calls leave out. regressed: strides of spread and R, then F, the number of
    iterations over F, and P."""
    (_, count, slots, K), (batch, _, C) = weights.shape, like.shape
    block_s, block_k, block_c, warps = blocks(like, slots, K)
    grid = (batch * count, cdiv(slots, block_s) * cdiv(C, block_c))
    strides += *weight_strides(weights, batch), budget_stride(budget.expand, 1)
    sizes = (count, slots, K, C, windows.tokens, *(regressed or (0, 0, 0, 0, 0, turns(0), 1)))
    flags = (residual, bool(regressed), rotates, windows.valid is not None, budget.expand is not None)
    steps = (upcast(like.dtype), cdiv(K, block_k), block_k, block_s, block_c, _BLOCK_F)
    fixed = (*missing, windows.source, windows.valid, *strides, *sizes, *flags, *steps)
    # A program that rotates has 8 warps, because rotations take as many registers as the sums.
    warps = 8 if rotates else warps
    return Launch(_unmerge_kernel, grid, like, windows.tokens, fixed, num_warps=warps, num_stages=2)
