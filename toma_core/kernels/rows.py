"""How the rows of a plan's weights lie in memory: far enough apart that kernels read 16 bytes at a time."""

from __future__ import annotations

import torch
from torch import Tensor

# Triton knows of a distance only whether 16 divides it. Windows of 7 x 8 tokens keep 28 of 56: kernels would read two
# bytes at a time there.
_APART = 16


def room(like: Tensor, *shape: int) -> Tensor:
    """Memory for a tensor of this shape, of the dtype and device of `like`, with rows a multiple of _APART apart."""
    columns = -(-shape[-1] // _APART) * _APART
    return torch.empty(*shape[:-1], columns, device=like.device, dtype=like.dtype)[..., : shape[-1]]


def joined(weights: list[Tensor]) -> Tensor:
    """(B, W, rows, columns) of several batches as one, which keeps the room behind the rows where all have it."""
    columns, apart = weights[0].shape[-1], {t.stride(-2) for t in weights}
    rows = apart.pop()
    if apart or rows <= columns or rows % _APART or any(t.stride(-1) != 1 for t in weights):
        return torch.cat(weights)
    return torch.cat([t.as_strided((*t.shape[:-1], rows), t.stride()) for t in weights])[..., :columns]
