"""How much of an old update a fresh one still shows, as sums over parts of its destinations: one launch.

Detail reuse needs it of a whole image before it can restore any token. So this launch leaves sums, in an order that
depends on nothing but the number of destinations, and every program of the next one adds them up.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..sizes import cdiv, padded
from .launch import Launch, shared_stride, turns

# Destinations that a program takes at once.
_ROWS = 16
# Into so many parts an image is cut at most: every program that restores it reads them all.
MOST_PARTS = 256


@triton.jit(do_not_specialize=("stride_d", "D", "parts", "steps", "steps_c"))
def _agreement_kernel(
    sums, out, reduced, kept, destinations,
    stride_ob, stride_on, stride_oc, stride_rb, stride_rn, stride_rc, stride_kb, stride_kn, stride_kc, stride_d,
    C, D, parts, steps, steps_c, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    part = program % parts
    image = program // parts
    out += image * stride_ob
    reduced += image * stride_rb
    kept += image * stride_kb
    common = tl.zeros([BLOCK_D, BLOCK_C], dtype=tl.float32)
    whole = tl.zeros([BLOCK_D, BLOCK_C], dtype=tl.float32)
    for step in range(0, steps):
        d = (part * steps + step) * BLOCK_D + tl.arange(0, BLOCK_D)
        token = tl.load(destinations + image * stride_d + d, mask=d < D, other=0)
        for step_c in range(0, steps_c):
            c = step_c * BLOCK_C + tl.arange(0, BLOCK_C)
            mask = (d < D)[:, None] & (c < C)[None, :]
            after = tl.load(out + d[:, None] * stride_on + c[None, :] * stride_oc, mask=mask, other=0.0)
            before = tl.load(reduced + d[:, None] * stride_rn + c[None, :] * stride_rc, mask=mask, other=0.0)
            old = tl.load(kept + token[:, None] * stride_kn + c[None, :] * stride_kc, mask=mask, other=0.0)
            old = old.to(tl.float32)
            common += (after.to(tl.float32) - before.to(tl.float32)) * old
            whole += old * old
    sums += image * 2 * parts + part
    tl.store(sums, tl.sum(common))
    tl.store(sums + parts, tl.sum(whole))


@triton.jit
def projection_of(sums, parts, BLOCK_P: tl.constexpr):
    """What least squares find from the sums of `_agreement_kernel`, from 0 to 1; 0 where nothing was kept."""
    p = tl.arange(0, BLOCK_P)
    common = tl.sum(tl.load(sums + p, mask=p < parts, other=0.0))
    whole = tl.sum(tl.load(sums + parts + p, mask=p < parts, other=0.0))
    return tl.minimum(tl.maximum(common / tl.maximum(whole, 1.1754944e-38), 0.0), 1.0)


def parts_of(D: int) -> int:
    """Into how many parts D destinations are cut."""
    return min(MOST_PARTS, cdiv(D, _ROWS))


def agreement(out: Tensor, reduced: Tensor, kept: Tensor, destinations: Tensor) -> Launch:
    """Sums over parts of the destinations, fp32 (B, 2, P): of (out - reduced) * kept, and of kept * kept.

    Called with out, reduced: (B, D, C), kept: (B, N, C), any strides, and destinations: (B or 1, D) int64. P depends on
    D alone, and the order of the sums on nothing else.
    """
    batch, D, C = out.shape
    parts, block_c = parts_of(D), min(128, padded(C))
    strides = (n for t in (out, reduced, kept) for n in t.stride())
    sizes = (
        shared_stride(destinations, batch),
        C,
        D,
        parts,
        turns(cdiv(D, parts * _ROWS)),
        turns(cdiv(C, block_c)),
        _ROWS,
        block_c,
    )
    shape = (batch, 2, parts)
    return Launch(_agreement_kernel, (batch * parts, 1), out, shape, torch.float32, (*strides, *sizes), num_warps=4)
