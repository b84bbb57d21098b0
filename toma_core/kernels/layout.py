"""Sizes, memory layouts and operator names that kernels and plans share."""

from __future__ import annotations

import itertools
from collections.abc import Hashable

import torch
from torch import Tensor

from ..windows import Budget, Windows

DOT_MIN = 16  # the smallest side of a matrix product in Triton
_ROW_MULTIPLE = 16  # rows start at multiples of this, so that kernels read 16 bytes at a time for every window size


def cdiv(size: int, part: int) -> int:
    """Return how many parts of length `part` are needed to hold `size`."""
    return -(-size // part)


def padded(size: int) -> int:
    """Return the smallest power of two that is at least `size` and may be a side of a matrix product."""
    return max(DOT_MIN, 1 << (size - 1).bit_length())


def variant(channels: int, windows: Windows, budget: Budget) -> Hashable:
    """Return the key of the kernels compiled for tokens of `channels` channels in this layout. Layouts that differ only
    in the number of windows, or in sizes that are padded to the same size, share kernels."""
    slots = tuple((padded(size), cdiv(size, 32)) for size in (windows.slots, budget.slots))
    ragged = windows.valid is not None, 0 if budget.valid is None else budget.valid.ndim
    return slots, ragged, min(128, padded(channels)), channels % 16 == 0


def room(like: Tensor, *shape: int) -> Tensor:
    """Return an uninitialised tensor like `like`, whose rows start at multiples of _ROW_MULTIPLE elements."""
    columns = cdiv(shape[-1], _ROW_MULTIPLE) * _ROW_MULTIPLE
    return torch.empty(*shape[:-1], columns, device=like.device, dtype=like.dtype)[..., : shape[-1]]


def joined(weights: list[Tensor]) -> Tensor:
    """Concatenate (B, W, rows, columns) along the batch. Keep the padding of rows if it is equal in all tensors."""
    columns, strides = weights[0].shape[-1], {t.stride(-2) for t in weights}
    rows = strides.pop()
    if strides or rows <= columns or rows % _ROW_MULTIPLE or any(t.stride(-1) != 1 for t in weights):
        return torch.cat(weights)
    return torch.cat([t.as_strided((*t.shape[:-1], rows), t.stride()) for t in weights])[..., :columns]


def free_namespace(name: str, operator: str) -> str:
    """Return the first namespace of `name`, `name`2, ... in which torch has no operator of this name. The pack may be
    loaded twice in one process, under ComfyUI's path and as plain `toma_core`."""
    names = itertools.chain([name], (f"{name}{n}" for n in itertools.count(2)))
    return next(free for free in names if not hasattr(getattr(torch.ops, free), operator))
