"""Rotary positions of merged tokens: each destination keeps its own."""

from __future__ import annotations

import torch
from torch import Tensor


def merged_rows(rows: Tensor, places: Tensor, before: int, tokens: int, axis: int) -> Tensor:
    """Rows for [before | D destinations | rest] from those of [before | N | rest], which lie along `axis`.

    rows: (B or 1, ..., T, ..., 2, 2), as ComfyUI's models make them: T second or third, axes of heads of length 1.
    places: (B, D), of the destinations among the N tokens.
    """
    after = before + tokens
    shape = [1] * rows.ndim
    shape[0], shape[axis] = places.shape
    image = rows.narrow(axis, before, tokens)
    image = image.expand(len(places), *image.shape[1:])
    wanted = list(image.shape)
    wanted[axis] = places.shape[1]
    parts = [rows.narrow(axis, 0, before), rows.narrow(axis, after, rows.shape[axis] - after)]
    first, last = (part.expand(len(places), *part.shape[1:]) for part in parts)
    return torch.cat([first, image.gather(axis, places.view(shape).expand(wanted)), last], axis)
