"""Sums for the projection coefficient of `cache.unmerge_residual_cached`, in one launch.

It is needed of all destinations before any token is restored: this launch writes sums over parts of them, in an order
that depends on their number alone, and every program of the next launch adds them up.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..layout import cdiv, padded
from .launch import Launch, shared_stride, turns

# Destinations of a program at a time.
_ROWS = 16
# Parts of an image at most; every program of the next launch reads them all.
MAX_PARTS = 256


@triton.jit(do_not_specialize=("stride_d", "D", "parts", "steps", "steps_c"))
def _agreement_kernel(
    sums, out, reduced, cached, destinations,
    stride_ob, stride_on, stride_oc, stride_rb, stride_rn, stride_rc, stride_kb, stride_kn, stride_kc, stride_d,
    C, D, parts, steps, steps_c, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    part = program % parts
    image = program // parts
    out += image * stride_ob
    reduced += image * stride_rb
    cached += image * stride_kb
    common = tl.zeros([BLOCK_D, BLOCK_C], dtype=tl.float32)
    norm = tl.zeros([BLOCK_D, BLOCK_C], dtype=tl.float32)
    for step in range(0, steps):
        d = (part * steps + step) * BLOCK_D + tl.arange(0, BLOCK_D)
        token = tl.load(destinations + image * stride_d + d, mask=d < D, other=0)
        for step_c in range(0, steps_c):
            c = step_c * BLOCK_C + tl.arange(0, BLOCK_C)
            mask = (d < D)[:, None] & (c < C)[None, :]
            after = tl.load(out + d[:, None] * stride_on + c[None, :] * stride_oc, mask=mask, other=0.0)
            before = tl.load(reduced + d[:, None] * stride_rn + c[None, :] * stride_rc, mask=mask, other=0.0)
            old = tl.load(cached + token[:, None] * stride_kn + c[None, :] * stride_kc, mask=mask, other=0.0)
            old = old.to(tl.float32)
            common += (after.to(tl.float32) - before.to(tl.float32)) * old
            norm += old * old
    sums += image * 2 * parts + part
    tl.store(sums, tl.sum(common))
    tl.store(sums + parts, tl.sum(norm))


@triton.jit
def projection_of(sums, parts, BLOCK_P: tl.constexpr):
    """Return the projection coefficient, within [0, 1], from the sums of `_agreement_kernel`."""
    p = tl.arange(0, BLOCK_P)
    common = tl.sum(tl.load(sums + p, mask=p < parts, other=0.0))
    norm = tl.sum(tl.load(sums + parts + p, mask=p < parts, other=0.0))
    return tl.minimum(tl.maximum(common / tl.maximum(norm, 1.1754944e-38), 0.0), 1.0)


def parts_of(D: int) -> int:
    """Return into how many parts D destinations are cut."""
    return min(MAX_PARTS, cdiv(D, _ROWS))


def agreement(out: Tensor, reduced: Tensor, cached: Tensor, destinations: Tensor) -> Launch:
    """Prepare sums over P parts of the destinations, fp32 (B, 2, P): of (out - reduced) * cached and of cached ** 2.

    Called with out, reduced: (B, D, C) and cached: (B, N, C), any strides, and destinations: (B or 1, D) int64. P and
    the order of the sums depend on D alone.
    """
    batch, D, C = out.shape
    parts, block_c = parts_of(D), min(128, padded(C))
    strides = (n for t in (out, reduced, cached) for n in t.stride())
    steps = turns(cdiv(D, parts * _ROWS)), turns(cdiv(C, block_c))
    sizes = (shared_stride(destinations, batch), C, D, parts, *steps, _ROWS, block_c)
    shape = (batch, 2, parts)
    return Launch(_agreement_kernel, (batch * parts, 1), out, shape, torch.float32, (*strides, *sizes), num_warps=4)
