"""Select destinations and compute weights for all windows and images in one launch (paper, sections 4.1 and 4.2).

Each program computes S_ij = cos(x_i, x_j) of one window and derives all results from S: the greedy search, the logits
sharpness * S_ij of destination i and token j, the softmax over destinations, the merge weights with normalised rows.
Destinations are not gathered. A mask over the window's slots marks the destinations; the rank of a destination is the
number of destinations before it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...selection import tie_step
from ...windows import Budget, Windows
from ..layout import DOT_MIN, cdiv, padded, room
from .launch import budget_stride, on_device, require, turns, upcast

MAX_SLOTS = 128  # per window: the matrix S of a larger window does not fit into registers


# Triton does not specialise on these arguments, so that one binary serves all their values.
@triton.jit(do_not_specialize=("stride_u", "windows", "slots", "K", "rounds", "steps", "tokens"))
def _select_kernel(
    x, source, valid, used, priority, dest_slots, M, back, stride_b, stride_n, stride_c,
    pitch_s, pitch_k, stride_u, windows, slots, K, C, sharpness, tie, rounds, steps, tokens,
    SELECT: tl.constexpr, HAS_VALID: tl.constexpr, HAS_USED: tl.constexpr, HAS_PRIORITY: tl.constexpr,
    UPCAST: tl.constexpr, S_PAD: tl.constexpr, K_PAD: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    window = program % windows
    x += (program // windows) * stride_b
    dest_slots += program * K
    M += program * K * pitch_s
    back += program * slots * pitch_k

    slot = tl.arange(0, S_PAD)
    inside = slot < slots
    if HAS_VALID:
        inside = inside & (tl.load(valid + window * slots + slot, mask=inside, other=0) != 0)
    token = tl.load(source + window * slots + slot, mask=inside, other=0).to(tl.int64)
    similarity = tl.zeros([S_PAD, S_PAD], dtype=tl.float32)
    for step in range(0, steps):
        c = step * BLOCK_C + tl.arange(0, BLOCK_C)
        mask = inside[:, None] & (c < C)[None, :]
        rows = tl.load(x + token[:, None] * stride_n + c[None, :] * stride_c, mask=mask, other=0.0)
        if UPCAST:
            rows = rows.to(tl.float32)
        # Products of half-precision values are exact in fp32, so the tensor cores lose nothing here.
        similarity = tl.dot(rows, tl.trans(rows), similarity, input_precision="ieee")
    # The product of a token with itself is its squared norm; an all-zero token has cosine 0 with all tokens.
    squares = tl.sum(tl.where(slot[:, None] == slot[None, :], similarity, 0.0), axis=0)
    inverse = 1.0 / tl.maximum(tl.sqrt(squares), 1e-12)
    similarity = similarity * inverse[:, None] * inverse[None, :]
    # Replace NaN by 0, because NaN gains could make the search pick a slot outside of the window.
    similarity = tl.where(similarity == similarity, similarity, 0.0)

    k = tl.arange(0, K_PAD)
    count = K
    if HAS_USED:
        used += (program // windows) * stride_u + window * K
        count = tl.sum(tl.load(used + k, mask=k < K, other=0).to(tl.int32), axis=0)

    # `chosen_rows` and `chosen_columns` hold one mask of chosen slots, in the two layouts that the reductions need.
    if SELECT:
        # Set S to -1 for padding tokens, so that they add nothing to any gain. Ties go to the lowest slot.
        open_rows = tl.where(inside[:, None], similarity, -1.0)
        factor = tl.zeros([S_PAD], dtype=tl.float32) + 1.0
        if HAS_PRIORITY:
            factor = tl.load(priority + (program // windows) * tokens + token, mask=inside, other=1.0)
        penalty = tl.where(inside, -tie * slot.to(tl.float32), -float("inf"))
        represented = tl.zeros([S_PAD], dtype=tl.float32) - 1.0
        chosen_rows = tl.zeros([S_PAD], dtype=tl.int32)
        chosen_columns = tl.zeros([S_PAD], dtype=tl.int32)
        for turn in range(0, rounds):
            gain = tl.sum(tl.maximum(open_rows - represented[:, None], 0.0), axis=0) * factor + penalty
            pick = tl.argmax(gain, axis=0)
            here = (slot == pick) & (turn < count)
            penalty = tl.where(here, -1.0, penalty)
            represented = tl.maximum(represented, tl.sum(tl.where(here[None, :], open_rows, 0.0), axis=1))
            chosen_rows = tl.where((slot == pick) & (turn < count), 1, chosen_rows)
            chosen_columns = tl.where(here, 1, chosen_columns)
    else:
        given = tl.load(dest_slots + k, mask=k < count, other=-1).to(tl.int32)
        chosen_columns = tl.max((given[:, None] == slot[None, :]).to(tl.int32), axis=0)
        chosen_rows = chosen_columns

    earlier = slot[:, None] < slot[None, :]
    rank_columns = tl.sum(tl.where(earlier, chosen_rows[:, None], 0), axis=0)
    rank_rows = tl.sum(tl.where(slot[None, :] < slot[:, None], chosen_columns[None, :], 0), axis=1)
    if SELECT:
        tl.store(dest_slots + rank_columns, slot.to(tl.int64), mask=chosen_columns != 0)
    # A, (destination, token): softmax over the chosen rows; columns of padding tokens are 0.
    logits = tl.where((chosen_rows != 0)[:, None], similarity * sharpness, -float("inf"))
    A = tl.exp(logits - tl.max(logits, axis=0)[None, :])
    A = tl.where(inside[None, :], A / tl.sum(A, axis=0)[None, :], 0.0)
    mask = (chosen_rows != 0)[:, None] & (slot < slots)[None, :]
    tl.store(back + slot[None, :] * pitch_k + rank_rows[:, None], A.to(back.dtype.element_ty), mask=mask)
    # Normalise the rows; rows of zeros stay zero.
    A = A / tl.maximum(tl.sum(A, axis=1), 1.1754943508222875e-38)[:, None]
    tl.store(M + rank_rows[:, None] * pitch_s + slot[None, :], A.to(M.dtype.element_ty), mask=mask)
    if HAS_USED:
        # Unused slots of the budget hold the first destination and zero weights.
        unused = (k >= count) & (k < K)
        if SELECT:
            first = tl.min(tl.where(chosen_columns != 0, slot, S_PAD), axis=0)
            tl.store(dest_slots + k, tl.zeros([K_PAD], dtype=tl.int64) + first, mask=unused)
        mask = unused[:, None] & (slot < slots)[None, :]
        nothing = tl.zeros([K_PAD, S_PAD], dtype=tl.float32).to(M.dtype.element_ty)
        tl.store(M + k[:, None] * pitch_s + slot[None, :], nothing, mask=mask)
        tl.store(back + slot[None, :] * pitch_k + k[:, None], nothing, mask=mask)


def weigh(
    x: Tensor, slots: Tensor | None, windows: Windows, budget: Budget, sharpness: float, priority: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return slots of destinations (B, W, K) int64, merge weights (B, W, K, S) and unmerge weights (B, W, S, K) in x's
    dtype, as `selection.select` and `merge.weigh` do.

    x: (B, N, C) fp16, bf16 or fp32, any strides. slots: given destinations, ascending and distinct in each window; None
    to select destinations. priority: (B, N) fp32, contiguous, see `selection.select`.
    """
    batch, count, S, select = len(x), len(windows.counts), windows.slots, slots is None
    if S > MAX_SLOTS:
        raise ValueError(f"the kernels take windows of at most {MAX_SLOTS} tokens, got {S}")
    require(x, windows.tokens)
    if slots is None:
        slots = torch.empty(batch, count, budget.slots, device=x.device, dtype=torch.int64)
    slots = slots.contiguous()
    if slots.shape[:2] != (batch, count):
        raise ValueError(f"dest_slots of {tuple(slots.shape)} do not fit {batch} images of {count} windows")
    K = slots.shape[2]
    M = room(x, batch, count, K, S)
    back = room(x, batch, count, S, K)
    block_c = 64 if x.element_size() == 2 else DOT_MIN
    S_PAD, channels = padded(S), x.shape[2]
    pitches = M.stride(2), back.stride(2), budget_stride(budget.valid, 2)
    search = float(sharpness), tie_step(S), turns(K), turns(cdiv(channels, block_c)), windows.tokens
    flags = select, *(part is not None for part in (windows.valid, budget.valid, priority)), upcast(x.dtype)
    tensors = x, windows.source, windows.valid, budget.valid, priority, slots, M, back
    rest = *x.stride(), *pitches, count, S, K, channels, *search, *flags, S_PAD, padded(K), block_c
    with on_device(x):
        _select_kernel[(batch * count,)](*tensors, *rest, num_warps=4 if S_PAD <= 64 else 16, num_stages=3)
    return slots, M, back
