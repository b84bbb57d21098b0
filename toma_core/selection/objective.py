"""The facility-location objective: how well a set of destinations represents every token (paper, section 4.1).

f(A) = sum over tokens i of max over destinations j in A of (1 + cos(x_i, x_j)). The 1 makes every term non-negative,
so that f is monotone and submodular with f(empty) = 0, which is what the (1 - 1/e) bound of greedy search needs; it
does not change which set is best.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

# Late in a greedy search two tokens that represent none but each other gain the same, 1 + S_ij - m_i - m_j, and
# rounding would choose: by the batch they come in, the number of threads, the kernel. So the place does: of every gain
# so much is taken for each slot before it. Far above what rounding does to small gains, far below what tells tokens
# apart.
TIE = 1e-5

# So many numbers are held in fp32 at a time, which is a GB with those made on the way. A picture of 2048 x 2048 in Flux
# has 50 million, a video of 720p in Wan 390.
MOST = 1 << 26


def in_parts(function: Callable[..., Tensor], x: Tensor, *others: Tensor) -> Tensor:
    """function(x, *others), some windows at a time where x is large. All: (B, W, ...)"""
    parts = min(-(-x.numel() // MOST), x.shape[0] * x.shape[1])
    if parts < 2:
        return function(x, *others)
    pieces = zip(*(t.flatten(0, 1).tensor_split(parts) for t in (x, *others)), strict=True)
    return torch.cat([function(*piece) for piece in pieces]).unflatten(0, x.shape[:2])


def tie_step(slots: int) -> float:
    """What a slot's gain is lowered by against that of the slot before it, in windows of so many slots; 256 * TIE over
    a whole window at most, so that a large one is not searched for its first slots."""
    return TIE * min(1.0, 256 / slots)


def normalized(x: Tensor) -> Tensor:
    """x / |x| along the last dimension in fp32; an all-zero token stays zero."""
    return F.normalize(x.float(), dim=-1, eps=1e-12)


def cosines(a: Tensor, b: Tensor) -> Tensor:
    """(..., A, C) and (..., B, C) from `normalized` -> (..., A, B) fp32. A token that holds NaN or infinity is like
    nothing, as an all-zero one: greedy search compares gains, and with NaN among them it would pick a slot twice."""
    return (a @ b.transpose(-1, -2)).nan_to_num_(nan=0.0)


def cosine_similarity(x: Tensor) -> Tensor:
    """(..., S, C) any float dtype -> (..., S, S) fp32 with S_ij = cos(x_i, x_j)."""
    x = normalized(x)
    return cosines(x, x)


def chosen_similarity(x: Tensor, picks: Tensor) -> Tensor:
    """(..., S, C) any float dtype, (..., K) int64 slots -> (..., K, S) fp32, those of the picks alone."""
    x = normalized(x)
    return cosines(x.gather(-2, picks[..., None].expand(*picks.shape, x.shape[-1])), x)


def facility_location(similarity: Tensor, picks: Tensor, valid: Tensor | None = None) -> Tensor:
    """f(A) of the picks in each window.

    similarity: (G, S, S); picks: (G, K) int64 slots; valid: (G, S) bool or None. Returns (G,) fp32.
    """
    chosen = similarity.gather(1, picks[..., None].expand(-1, -1, similarity.shape[-1]))
    best = chosen.amax(1) + 1
    return (best if valid is None else torch.where(valid, best, best.new_zeros(()))).sum(-1)
