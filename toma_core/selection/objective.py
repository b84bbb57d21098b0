"""The facility-location objective: how well destinations represent every token (paper, section 4.1).

f(A) = sum over tokens i of max over destinations j in A of (1 + cos(x_i, x_j)). The 1 makes every term non-negative,
so that f is monotone and submodular with f(empty) = 0, as the (1 - 1/e) bound of greedy search needs; it does not
change which set is best.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

# Penalty of a gain for each slot before it. Two tokens that represent only each other gain the same late in a search;
# without it rounding, and so the batch, threads or kernel, would choose. Far above rounding, far below differences.
TIE = 1e-5

# Elements held in fp32 at a time, 1 GB with intermediates; Flux at 2048 x 2048 has 50 million, Wan at 720p 390.
MAX_ELEMENTS = 1 << 26


def in_parts(function: Callable[..., Tensor], x: Tensor, *others: Tensor) -> Tensor:
    """Return function(x, *others), computed for some windows at a time where x is large. All: (B, W, ...)."""
    parts = min(-(-x.numel() // MAX_ELEMENTS), x.shape[0] * x.shape[1])
    if parts < 2:
        return function(x, *others)
    pieces = zip(*(t.flatten(0, 1).tensor_split(parts) for t in (x, *others)), strict=True)
    return torch.cat([function(*piece) for piece in pieces]).unflatten(0, x.shape[:2])


def tie_step(slots: int) -> float:
    """Return the penalty of a slot's gain against the slot before it, at most 256 * TIE over a window, so that large
    windows do not prefer their first slots."""
    return TIE * min(1.0, 256 / slots)


def normalized(x: Tensor) -> Tensor:
    """Return x / |x| along the last dimension in fp32; an all-zero token stays zero."""
    return F.normalize(x.float(), dim=-1, eps=1e-12)


def cosines(a: Tensor, b: Tensor) -> Tensor:
    """Return cosines (..., A, B) fp32 of (..., A, C) and (..., B, C) from `normalized`; 0 for tokens that hold NaN or
    infinity, as NaN gains would make the search pick a slot twice."""
    return (a @ b.transpose(-1, -2)).nan_to_num_(nan=0.0)


def cosine_similarity(x: Tensor) -> Tensor:
    """Return S_ij = cos(x_i, x_j): (..., S, C) any float dtype -> (..., S, S) fp32."""
    x = normalized(x)
    return cosines(x, x)


def chosen_similarity(x: Tensor, dest_slots: Tensor) -> Tensor:
    """Return cosines of destinations and tokens: (..., S, C) any float dtype, (..., K) int64 -> (..., K, S) fp32."""
    x = normalized(x)
    return cosines(x.gather(-2, dest_slots[..., None].expand(*dest_slots.shape, x.shape[-1])), x)
