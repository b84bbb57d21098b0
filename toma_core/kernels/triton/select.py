"""Selection and weights of every window of every image in one launch (paper, sections 4.1 and 4.2).

One program owns one window. It computes S_ij = cos(x_i, x_j) once and derives everything else from it: the greedy
search, the logits sharpness * S_ij of destination i and token j, the softmax over destinations, the normalised rows.
Destinations are not gathered: a mask over the window's slots marks them, and the rank of one is the number before it.

Up to ON_CHIP slots S stays in registers; up to MAX_SLOTS it goes through scratch memory that fits a GPU's L2 cache, and
the program reads it in tiles of columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...selection.objective import tie_step
from ..layout import DOT_MIN, cdiv, padded, room
from .launch import budget_stride, on_device, turns, upcast

ON_CHIP = 128
MAX_SLOTS = 256
_TILE = 32
# Not specialised, so that one binary serves all values.
_ANY_SIZE = ("stride_u", "windows", "slots", "K", "rounds", "steps")


@triton.jit
def _inverse_norm(squares):
    """Return 1 / max(|x|, 1e-12) from |x|^2: an all-zero token has cosine 0 with all."""
    return 1.0 / tl.maximum(tl.sqrt(squares), 1e-12)


@triton.jit
def _finite(similarity):
    """Replace NaN by 0: slots become addresses and must stay inside the window."""
    return tl.where(similarity == similarity, similarity, 0.0)


@triton.jit
def inside_window(valid, window, slots, slot, HAS_VALID: tl.constexpr):
    """Return which of the slots hold a token of the window."""
    inside = slot < slots
    if HAS_VALID:
        inside = inside & (tl.load(valid + window * slots + slot, mask=inside, other=0) != 0)
    return inside


@triton.jit
def _shares(similarity, sharpness, chosen, inside):
    """Return A of (destination, token): softmax over the chosen rows; columns of padding are 0."""
    logits = tl.where(chosen[:, None], similarity * sharpness, -float("inf"))
    weights = tl.exp(logits - tl.max(logits, axis=0)[None, :])
    weights = weights / tl.sum(weights, axis=0)[None, :]
    return tl.where(inside[None, :], weights, 0.0)


@triton.jit
def _normal_rows(weights, total):
    """Divide the rows of A by their sums; rows of zeros stay."""
    return weights / tl.maximum(total, 1.1754943508222875e-38)[:, None]


@triton.jit
def _given(dest_slots, slot, count, K_PAD: tl.constexpr):
    """Return which of the slots are among the first `count` of dest_slots."""
    k = tl.arange(0, K_PAD)
    pick = tl.load(dest_slots + k, mask=k < count, other=-1).to(tl.int32)
    return tl.max((pick[:, None] == slot[None, :]).to(tl.int32), axis=0)


@triton.jit
def _fill_unused(
    dest_slots, M, back, first, count, slots, K, pitch_s, pitch_k, slot, SELECT: tl.constexpr, K_PAD: tl.constexpr
):
    """Fill unused slots of the budget with the first destination and zero weights."""
    k = tl.arange(0, K_PAD)
    unused = (k >= count) & (k < K)
    if SELECT:
        tl.store(dest_slots + k, tl.zeros([K_PAD], dtype=tl.int64) + first, mask=unused)
    mask = unused[:, None] & (slot < slots)[None, :]
    nothing = tl.zeros([K_PAD, slot.shape[0]], dtype=tl.float32).to(M.dtype.element_ty)
    tl.store(M + k[:, None] * pitch_s + slot[None, :], nothing, mask=mask)
    tl.store(back + slot[None, :] * pitch_k + k[:, None], nothing, mask=mask)


@triton.jit(do_not_specialize=_ANY_SIZE)
def _on_chip_kernel(
    x, source, valid, used, dest_slots, M, back, stride_b, stride_n, stride_c,
    pitch_s, pitch_k, stride_u, windows, slots, K, C, sharpness, tie, rounds, steps,
    SELECT: tl.constexpr, HAS_VALID: tl.constexpr, HAS_USED: tl.constexpr, UPCAST: tl.constexpr,
    S_PAD: tl.constexpr, K_PAD: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    window = program % windows
    x += (program // windows) * stride_b
    dest_slots += program * K
    M += program * K * pitch_s
    back += program * slots * pitch_k

    slot = tl.arange(0, S_PAD)
    inside = inside_window(valid, window, slots, slot, HAS_VALID)
    token = tl.load(source + window * slots + slot, mask=inside, other=0).to(tl.int64)
    similarity = tl.zeros([S_PAD, S_PAD], dtype=tl.float32)
    for step in range(0, steps):
        c = step * BLOCK_C + tl.arange(0, BLOCK_C)
        rows = tl.load(
            x + token[:, None] * stride_n + c[None, :] * stride_c, mask=inside[:, None] & (c < C)[None, :], other=0.0
        )
        if UPCAST:
            rows = rows.to(tl.float32)
        # Products of half-precision numbers are exact in fp32, so the tensor cores lose nothing here.
        similarity = tl.dot(rows, tl.trans(rows), similarity, input_precision="ieee")
    # The products of tokens with themselves are their squared norms.
    inverse = _inverse_norm(tl.sum(tl.where(slot[:, None] == slot[None, :], similarity, 0.0), axis=0))
    similarity = _finite(similarity * inverse[:, None] * inverse[None, :])

    count = K
    if HAS_USED:
        k = tl.arange(0, K_PAD)
        used += (program // windows) * stride_u + window * K
        count = tl.sum(tl.load(used + k, mask=k < K, other=0).to(tl.int32), axis=0)

    # The same mask in the two layouts that the reductions need.
    if SELECT:
        # Padding tokens add nothing to any gain where S is -1. Ties go to the lowest slot.
        open_rows = tl.where(inside[:, None], similarity, -1.0)
        penalty = tl.where(inside, -tie * slot.to(tl.float32), -float("inf"))
        represented = tl.zeros([S_PAD], dtype=tl.float32) - 1.0
        chosen_rows = tl.zeros([S_PAD], dtype=tl.int32)
        chosen_columns = tl.zeros([S_PAD], dtype=tl.int32)
        for turn in range(0, rounds):
            gain = tl.sum(tl.maximum(open_rows - represented[:, None], 0.0), axis=0) + penalty
            pick = tl.argmax(gain, axis=0)
            here = (slot == pick) & (turn < count)
            penalty = tl.where(here, -1.0, penalty)
            represented = tl.maximum(represented, tl.sum(tl.where(here[None, :], open_rows, 0.0), axis=1))
            chosen_rows = tl.where((slot == pick) & (turn < count), 1, chosen_rows)
            chosen_columns = tl.where(here, 1, chosen_columns)
    else:
        chosen_columns = _given(dest_slots, slot, count, K_PAD)
        chosen_rows = chosen_columns

    earlier = slot[:, None] < slot[None, :]
    rank_columns = tl.sum(tl.where(earlier, chosen_rows[:, None], 0), axis=0)
    rank_rows = tl.sum(tl.where(slot[None, :] < slot[:, None], chosen_columns[None, :], 0), axis=1)
    if SELECT:
        tl.store(dest_slots + rank_columns, slot.to(tl.int64), mask=chosen_columns != 0)
    A = _shares(similarity, sharpness, chosen_rows != 0, inside)
    mask = (chosen_rows != 0)[:, None] & (slot < slots)[None, :]
    tl.store(back + slot[None, :] * pitch_k + rank_rows[:, None], A.to(back.dtype.element_ty), mask=mask)
    A = _normal_rows(A, tl.sum(A, axis=1))
    tl.store(M + rank_rows[:, None] * pitch_s + slot[None, :], A.to(M.dtype.element_ty), mask=mask)
    if HAS_USED:
        first = tl.min(tl.where(chosen_columns != 0, slot, S_PAD), axis=0)
        _fill_unused(dest_slots, M, back, first, count, slots, K, pitch_s, pitch_k, slot, SELECT, K_PAD)


@triton.jit(do_not_specialize=_ANY_SIZE)
def _tiled_kernel(
    x, source, valid, used, dest_slots, M, back, scratch, stride_b, stride_n, stride_c,
    pitch_s, pitch_k, stride_u, windows, slots, K, C, sharpness, tie, rounds, steps,
    SELECT: tl.constexpr, HAS_VALID: tl.constexpr, HAS_USED: tl.constexpr, UPCAST: tl.constexpr,
    S_PAD: tl.constexpr, K_PAD: tl.constexpr, BLOCK_C: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    window = program % windows
    x += (program // windows) * stride_b
    dest_slots += program * K
    M += program * K * pitch_s
    back += program * slots * pitch_k
    scratch += program * S_PAD * S_PAD

    slot = tl.arange(0, S_PAD)
    inside = inside_window(valid, window, slots, slot, HAS_VALID)
    token = tl.load(source + window * slots + slot, mask=inside, other=0).to(tl.int64)
    for tile in range(0, S_PAD, TILE):
        j = tile + tl.arange(0, TILE)
        inside_j = inside_window(valid, window, slots, j, HAS_VALID)
        token_j = tl.load(source + window * slots + j, mask=inside_j, other=0).to(tl.int64)
        similarity = tl.zeros([S_PAD, TILE], dtype=tl.float32)
        squares = tl.zeros([S_PAD], dtype=tl.float32)
        squares_j = tl.zeros([TILE], dtype=tl.float32)
        for step in range(0, steps):
            c = step * BLOCK_C + tl.arange(0, BLOCK_C)
            in_c = (c < C)[None, :]
            rows = tl.load(
                x + token[:, None] * stride_n + c[None, :] * stride_c, mask=inside[:, None] & in_c, other=0.0
            )
            columns = tl.load(
                x + token_j[:, None] * stride_n + c[None, :] * stride_c, mask=inside_j[:, None] & in_c, other=0.0
            )
            if UPCAST:
                rows = rows.to(tl.float32)
                columns = columns.to(tl.float32)
            similarity = tl.dot(rows, tl.trans(columns), similarity, input_precision="ieee")
            squares += tl.sum(rows.to(tl.float32) * rows.to(tl.float32), axis=1)
            squares_j += tl.sum(columns.to(tl.float32) * columns.to(tl.float32), axis=1)
        similarity = _finite(similarity * _inverse_norm(squares)[:, None] * _inverse_norm(squares_j)[None, :])
        tl.store(scratch + slot[:, None] * S_PAD + j[None, :], similarity)
    # Other threads of this program wrote the scratch.
    tl.debug_barrier()

    count = K
    if HAS_USED:
        k = tl.arange(0, K_PAD)
        used += (program // windows) * stride_u + window * K
        count = tl.sum(tl.load(used + k, mask=k < K, other=0).to(tl.int32), axis=0)

    if SELECT:
        represented = tl.where(inside, -1.0, 3.0)
        penalty = tl.where(inside, -tie * slot.to(tl.float32), -float("inf"))
        chosen = tl.zeros([S_PAD], dtype=tl.int32)
        for turn in range(0, rounds):
            best = tl.full([], -float("inf"), tl.float32)
            pick = tl.full([], 0, tl.int32)
            for tile in range(0, S_PAD, TILE):
                j = tile + tl.arange(0, TILE)
                similarity = tl.load(scratch + slot[:, None] * S_PAD + j[None, :])
                # The penalty is known per row and needed per column: put it on the diagonal.
                own = tl.where(slot[:, None] == j[None, :], penalty[:, None], 0.0)
                gain = tl.sum(tl.maximum(similarity - represented[:, None], 0.0) + own, axis=0)
                gain_here = tl.max(gain, axis=0)
                pick = tl.where(gain_here > best, tile + tl.argmax(gain, axis=0), pick)
                best = tl.maximum(best, gain_here)
            here = (slot == pick) & (turn < count)
            penalty = tl.where(here, -1.0, penalty)
            chosen = tl.where(here, 1, chosen)
            represented = tl.maximum(represented, tl.load(scratch + pick * S_PAD + slot))
    else:
        chosen = _given(dest_slots, slot, count, K_PAD)

    total = tl.zeros([S_PAD], dtype=tl.float32)
    rank = tl.zeros([S_PAD], dtype=tl.int32)
    for tile in range(0, S_PAD, TILE):
        j = tile + tl.arange(0, TILE)
        chosen_j = tl.sum(tl.where(slot[:, None] == j[None, :], chosen[:, None], 0), axis=0)
        rank += tl.sum(tl.where(j[None, :] < slot[:, None], chosen_j[None, :], 0), axis=1)
    if SELECT:
        tl.store(dest_slots + rank, slot.to(tl.int64), mask=chosen != 0)
    for tile in range(0, S_PAD, TILE):
        j = tile + tl.arange(0, TILE)
        similarity = tl.load(scratch + slot[:, None] * S_PAD + j[None, :])
        A = _shares(similarity, sharpness, chosen != 0, inside_window(valid, window, slots, j, HAS_VALID))
        mask = (chosen != 0)[:, None] & (j < slots)[None, :]
        tl.store(back + j[None, :] * pitch_k + rank[:, None], A.to(back.dtype.element_ty), mask=mask)
        total += tl.sum(A, axis=1)
    for tile in range(0, S_PAD, TILE):
        j = tile + tl.arange(0, TILE)
        similarity = tl.load(scratch + slot[:, None] * S_PAD + j[None, :])
        A = _shares(similarity, sharpness, chosen != 0, inside_window(valid, window, slots, j, HAS_VALID))
        mask = (chosen != 0)[:, None] & (j < slots)[None, :]
        tl.store(M + rank[:, None] * pitch_s + j[None, :], _normal_rows(A, total).to(M.dtype.element_ty), mask=mask)
    if HAS_USED:
        first = tl.min(tl.where(chosen != 0, slot, S_PAD), axis=0)
        for tile in range(0, S_PAD, TILE):
            _fill_unused(
                dest_slots, M, back, first, count, slots, K, pitch_s, pitch_k, tile + tl.arange(0, TILE), SELECT, K_PAD
            )


def select_weigh(
    x: Tensor, source: Tensor, valid: Tensor | None, used: Tensor | None, K: int, sharpness: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return greedy facility-location slots (B, W, K) int64 of every window, merge weights (B, W, K, S) and unmerge
    weights (B, W, S, K) in x's dtype, as `selection.select` and `merge.weigh` do. Scores are fp32.

    x: (B, N, C) fp16, bf16 or fp32, any strides; source: (W, S) int64 with S <= MAX_SLOTS; valid: (W, S) bool or None;
    used: (W, K) bool, or (B, W, K) of an `AdaptiveBudget`, or None.
    """
    dest_slots = torch.empty(x.shape[0], source.shape[0], K, device=x.device, dtype=torch.int64)
    return dest_slots, *_launch(x, dest_slots, source, valid, used, sharpness, select=True)


def weigh(
    x: Tensor, dest_slots: Tensor, source: Tensor, valid: Tensor | None, used: Tensor | None, sharpness: float
) -> tuple[Tensor, Tensor]:
    """Return the weights of given slots: (B, W, K) int64, ascending and distinct where `used`. See `select_weigh`."""
    return _launch(x, dest_slots.contiguous(), source, valid, used, sharpness, select=False)


def _launch(
    x: Tensor,
    dest_slots: Tensor,
    source: Tensor,
    valid: Tensor | None,
    used: Tensor | None,
    sharpness: float,
    select: bool,
) -> tuple[Tensor, Tensor]:
    (batch, windows, K), slots = dest_slots.shape, source.shape[1]
    if slots > MAX_SLOTS:
        raise ValueError(f"the kernels take windows of at most {MAX_SLOTS} tokens, got {slots}")
    if batch != x.shape[0] or windows != source.shape[0]:
        raise ValueError(
            f"dest_slots of {tuple(dest_slots.shape)} do not fit {x.shape[0]} images of {source.shape[0]} windows"
        )
    M, back = room(x, batch, windows, K, slots), room(x, batch, windows, slots, K)
    block_c = 64 if x.element_size() == 2 else DOT_MIN
    pitches, S_PAD = (M.stride(2), back.stride(2)), padded(slots)
    sizes = (*x.stride(), *pitches, budget_stride(used, (windows, K), batch), windows, slots, K, x.shape[2])
    search = float(sharpness), tie_step(slots), turns(K), turns(cdiv(x.shape[2], block_c))
    flags = (select, valid is not None, used is not None, upcast(x.dtype), S_PAD, padded(K), block_c)
    tensors, rest = (x, source, valid, used, dest_slots, M, back), (*sizes, *search, *flags)
    grid = (batch * windows,)
    with on_device(x):
        if S_PAD <= ON_CHIP:
            _on_chip_kernel[grid](*tensors, *rest, num_warps=4 if S_PAD <= 64 else 16, num_stages=3)
        else:
            scratch = torch.empty(batch * windows, S_PAD, S_PAD, device=x.device, dtype=torch.float32)
            _tiled_kernel[grid](*tensors, scratch, *rest, _TILE, num_warps=8, num_stages=1)
    return M, back
