"""Allocate destinations to windows by their spread in two launches, see `budget.allocate`.

The first computes what each window is due, one program each. The second has one program for each frame of an image: it
finds the smallest claim that is met bit by bit, which is equivalent to sorting all claims, and allocates.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..layout import cdiv, padded
from .launch import on_device, turns
from .select import inside_window

# Claims in a tile.
_TILE = 2048


@triton.jit(do_not_specialize=("windows", "slots", "steps"))
def _due_kernel(
    due, x, source, valid, stride_b, stride_n, stride_c, windows, slots, C, steps, least,
    HAS_VALID: tl.constexpr, S_PAD: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    window = program % windows
    image = program // windows
    s = tl.arange(0, S_PAD)
    inside = inside_window(valid, window, slots, s, HAS_VALID)
    token = tl.load(source + window * slots + s, mask=inside, other=0).to(tl.int64)
    x += image * stride_b + token[:, None] * stride_n
    squares = tl.zeros([S_PAD], dtype=tl.float32)
    for step in range(0, steps):
        c = step * BLOCK_C + tl.arange(0, BLOCK_C)
        rows = tl.load(x + c[None, :] * stride_c, mask=inside[:, None] & (c < C)[None, :], other=0.0).to(tl.float32)
        squares += tl.sum(rows * rows, axis=1)
    # A token that holds NaN or infinity has no direction.
    inverse = tl.where(squares == squares, 1.0 / tl.maximum(tl.sqrt(squares), 1e-12), 0.0)
    size = tl.sum(inside.to(tl.int32), axis=0).to(tl.float32)
    length = tl.zeros([BLOCK_C], dtype=tl.float32)
    for step in range(0, steps):
        c = step * BLOCK_C + tl.arange(0, BLOCK_C)
        rows = tl.load(x + c[None, :] * stride_c, mask=inside[:, None] & (c < C)[None, :], other=0.0).to(tl.float32)
        rows = rows * inverse[:, None]
        mean = tl.sum(tl.where(rows == rows, rows, 0.0), axis=0) / size
        length += mean * mean
    due += image * 2 * windows + window
    tl.store(due, tl.sqrt(tl.maximum(1.0 - tl.sum(length, axis=0), least)) * size)
    tl.store(due + windows, size)


@triton.jit
def _claims(due, w, k, windows, every, K):
    """Return each window's claim for each of its slots, as integers of the same order; the first slot has the highest,
    slots beyond the window's size none."""
    here = w < windows
    claims = tl.div_rn(tl.load(due + w, mask=here, other=0.0)[:, None], (k + 0.5)[None, :])
    size = tl.load(due + every + w, mask=here, other=0.0)
    claims = tl.where(k[None, :] < size[:, None], claims, -1.0)
    claims = tl.where((k == 0)[None, :], float("inf"), claims)
    return tl.where(here[:, None] & (k < K)[None, :], claims, -1.0).to(tl.int32, bitcast=True)


@triton.jit(do_not_specialize=("frames", "windows", "total", "K", "tiles"))
def _share_kernel(
    compact, expand, valid, due, frames, windows, total, K, tiles, BLOCK_W: tl.constexpr, K_PAD: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    frame = program % frames
    image = program // frames
    every = frames * windows
    due += image * 2 * every + frame * windows
    compact += image * frames * total
    expand += image * every * K
    valid += image * every * K
    k = tl.arange(0, K_PAD)

    met = tl.full([], 0, tl.int32)
    for bit in range(0, 31):
        least = met | (1 << (30 - bit))
        count = tl.full([], 0, tl.int32)
        for tile in range(0, tiles):
            w = tile * BLOCK_W + tl.arange(0, BLOCK_W)
            count += tl.sum((_claims(due, w, k, windows, every, K) >= least).to(tl.int32))
        met = tl.where(count >= total, least, met)

    # Of equal claims the first are met.
    spare = tl.full([], 0, tl.int32) + total
    for tile in range(0, tiles):
        w = tile * BLOCK_W + tl.arange(0, BLOCK_W)
        spare -= tl.sum((_claims(due, w, k, windows, every, K) > met).to(tl.int32))

    first = tl.full([], 0, tl.int32)
    for tile in range(0, tiles):
        w = tile * BLOCK_W + tl.arange(0, BLOCK_W)
        claims = _claims(due, w, k, windows, every, K)
        alike = tl.sum((claims == met).to(tl.int32), axis=1)
        before = tl.cumsum(alike, axis=0) - alike
        counts = tl.sum((claims > met).to(tl.int32), axis=1) + tl.where(before < spare, alike, 0)
        spare -= tl.sum(alike, axis=0)
        begin = tl.cumsum(counts, axis=0) - counts + first
        first += tl.sum(counts, axis=0)
        used = k[None, :] < counts[:, None]
        there = (w < windows)[:, None] & (k < K)[None, :]
        index = (frame * windows + w)[:, None] * K + k[None, :]
        destination = frame * total + begin[:, None] + tl.where(used, k[None, :], 0)
        tl.store(valid + index, used, mask=there)
        tl.store(expand + index, destination, mask=there)
        tl.store(compact + destination, index, mask=there & used)


def due(x: Tensor, source: Tensor, valid: Tensor | None, least: float) -> Tensor:
    """Return what each window is due, sqrt(max(`budget.spread`, least)) * tokens, and its tokens: (B, 2, W) fp32.

    x: (B, N, C) fp16, bf16 or fp32, any strides; source: (W, S) int64; valid: (W, S) bool or None.
    """
    (batch, _, C), (windows, slots) = x.shape, source.shape
    found = torch.empty(batch, 2, windows, device=x.device, dtype=torch.float32)
    block_c = min(64, padded(C))
    sizes = (*x.stride(), windows, slots, C, turns(cdiv(C, block_c)), float(least))
    with on_device(x):
        _due_kernel[(batch * windows,)](
            found, x, source, valid, *sizes, valid is not None, padded(slots), block_c, num_warps=4
        )
    return found


def shared_out(due: Tensor, frames: int, total: int, K: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return compact (B, D) and expand (B, W * K) int64, and valid (B, W, K) bool, of a `budget.AdaptiveBudget`.

    due: from the function of this name. total: destinations of a frame, at least one a window. K: most of a window.
    """
    batch, _, every = due.shape
    compact = torch.empty(batch, frames * total, device=due.device, dtype=torch.int64)
    expand = torch.empty(batch, every * K, device=due.device, dtype=torch.int64)
    valid = torch.empty(batch, every, K, device=due.device, dtype=torch.bool)
    windows, k_pad = every // frames, padded(K)
    block_w = min(max(1, _TILE // k_pad), padded(windows))
    sizes = (frames, windows, total, K, turns(cdiv(windows, block_w)))
    with on_device(due):
        _share_kernel[(batch * frames,)](compact, expand, valid, due, *sizes, block_w, k_pad, num_warps=8)
    return compact, expand, valid
