"""Select the destinations of each window by a greedy search for the facility-location objective (paper, section 4.1).

f(A) = sum over tokens i of max over destinations j in A of (1 + cos(x_i, x_j)). The 1 makes every term non-negative,
so that f is monotone and submodular with f(empty) = 0, as the (1 - 1/e) bound of greedy search needs. The 1 does not
change which set is best.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .windows import Budget, Windows

# Penalty on a slot's gain for each slot before it. Two tokens that represent only each other have equal gains late in a
# search. Without the penalty, rounding would decide between them, and rounding depends on batch, threads and kernel.
# The penalty is far above rounding and far below true differences of gains.
TIE = 1e-5

# Priority of the last step's destinations if cached keys, values and updates are propagated; all other tokens have
# priority 1. Tokens thus take turns at being computed (benchmarks/results/fidelity/trials.md).
RECENT = 0.25

# Maximum of elements held in fp32 at a time; they take 1 GB with intermediates. The tokens of Flux at 2048 x 2048 have
# 50 million elements, those of Wan at 720p 390 million.
MAX_ELEMENTS = 1 << 26


def select(similarity: Tensor, windows: Windows, budget: Budget, priority: Tensor | None = None) -> Tensor:
    """Return the slots of destinations that represent each window's tokens best, (B, W, K) int64.

    similarity: (B, W, S, S) fp32 from `cosine_similarity`. priority: (B, N) fp32, see `greedy_facility_location`. Slots
    ascend within a window, so that merged tokens keep the reading order; unused slots of the budget repeat the first.
    """
    valid = None if windows.valid is None else windows.valid.repeat(similarity.shape[0], 1)
    factors = None if priority is None else windows.split(priority[..., None]).flatten(0, 1).squeeze(2)
    slots = greedy_facility_location(similarity.flatten(0, 1), valid, budget.slots, factors)
    return in_reading_order(slots.view(*similarity.shape[:2], budget.slots), windows, budget)


def in_reading_order(dest_slots: Tensor, windows: Windows, budget: Budget) -> Tensor:
    """Sort slots, (B, W, K), which come best first, by position. A window with a budget below K keeps its best ones."""
    if budget.valid is None:
        return dest_slots.sort(-1).values
    dest_slots = dest_slots.masked_fill(~budget.valid, windows.slots).sort(-1).values
    return torch.where(dest_slots == windows.slots, dest_slots[..., :1], dest_slots)


def greedy_facility_location(
    similarity: Tensor, valid: Tensor | None, number: int, priority: Tensor | None = None
) -> Tensor:
    """Return the first `number` slots of every window that a greedy search picks, best first: (G, number) int64.

    similarity: (G, S, S) fp32, S_ij = cos(x_i, x_j); valid: (G, S) bool, False in padding slots, None without padding.
    priority: (G, S) fp32 in (0, 1], factors of gains; if the smallest factor is p, the search reaches at least 1 - e^-p
    of the optimum. A window with fewer valid slots than `number` repeats a slot at the end. Ties go to the lowest slot,
    see `tie_step`. The host does not wait for the device.

    Each round picks argmax_j of the gain sum_i relu(S_ij - m_i). m_i, the max of S_ij over picked j, says how well
    token i is represented; it starts at -1, the smallest cosine.
    """
    slots = similarity.shape[1]
    # Gains are never negative. Picked slots get a gain below that of any open slot, and padding slots a gain of -inf.
    slot = torch.arange(slots, dtype=similarity.dtype, device=similarity.device)
    penalty = (-tie_step(slots) * slot).expand(similarity.shape[:2])
    if valid is not None:
        # Padding tokens add nothing to any gain.
        similarity = similarity.masked_fill(~valid[:, :, None], -1.0)
        penalty = penalty.masked_fill(~valid, -torch.inf)
    represented = similarity.new_full(similarity.shape[:2], -1.0)
    order = []
    for _ in range(number):
        gain = (similarity - represented[:, :, None]).relu_().sum(1)
        if priority is not None:
            gain = gain * priority
        pick = (gain + penalty).argmax(1)
        order.append(pick)
        penalty = penalty.scatter(1, pick[:, None], -1.0)
        picked = similarity.gather(2, pick[:, None, None].expand(-1, slots, 1)).squeeze(2)
        represented = torch.maximum(represented, picked)
    return torch.stack(order, 1)


def tie_step(slots: int) -> float:
    """Return the difference between the penalties on the gains of neighbouring slots. Penalties grow to at most 256 *
    TIE over a window, so that large windows do not prefer their first slots."""
    return TIE * min(1.0, 256 / slots)


def in_parts(function: Callable[..., Tensor], x: Tensor, *others: Tensor) -> Tensor:
    """Return function(x, *others), computed for some windows at a time if x is large. All tensors: (B, W, ...)."""
    parts = min(-(-x.numel() // MAX_ELEMENTS), x.shape[0] * x.shape[1])
    if parts < 2:
        return function(x, *others)
    pieces = zip(*(t.flatten(0, 1).tensor_split(parts) for t in (x, *others)), strict=True)
    return torch.cat([function(*piece) for piece in pieces]).unflatten(0, x.shape[:2])


def normalized(x: Tensor) -> Tensor:
    """Return x / |x| along the last dimension in fp32; an all-zero token stays zero."""
    return F.normalize(x.float(), dim=-1, eps=1e-12)


def cosine_similarity(x: Tensor) -> Tensor:
    """Return S_ij = cos(x_i, x_j): (..., S, C) any float dtype -> (..., S, S) fp32."""
    x = normalized(x)
    return _cosines(x, x)


def chosen_similarity(x: Tensor, dest_slots: Tensor) -> Tensor:
    """Return cosines of destinations and tokens: (..., S, C) any float dtype, (..., K) int64 -> (..., K, S) fp32."""
    x = normalized(x)
    return _cosines(x.gather(-2, dest_slots[..., None].expand(*dest_slots.shape, x.shape[-1])), x)


def _cosines(a: Tensor, b: Tensor) -> Tensor:
    """Return cosines (..., A, B) fp32 of (..., A, C) and (..., B, C) from `normalized`; 0 for tokens that hold NaN or
    infinity, as NaN gains would make the search pick a slot twice."""
    return (a @ b.transpose(-1, -2)).nan_to_num_(nan=0.0)
