"""Rotary positions of merged tokens: each destination has its own."""

from __future__ import annotations

import torch
from torch import Tensor


def merged_rope(rope: Tensor, destinations: Tensor, before: int, tokens: int, axis: int) -> Tensor:
    """Return the positions of [before | D destinations | rest] from those of [before | N | rest] along `axis`.

    Args:
        rope: (B or 1, ..., T, ..., 2, 2), as in ComfyUI's models: T second or third, axes of heads of length 1.
        destinations: (B, D), indices of the destinations among the N tokens.
    """
    after = before + tokens
    shape = [1] * rope.ndim
    shape[0], shape[axis] = destinations.shape
    image = rope.narrow(axis, before, tokens)
    image = image.expand(len(destinations), *image.shape[1:])
    wanted = list(image.shape)
    wanted[axis] = destinations.shape[1]
    parts = [rope.narrow(axis, 0, before), rope.narrow(axis, after, rope.shape[axis] - after)]
    first, last = (part.expand(len(destinations), *part.shape[1:]) for part in parts)
    return torch.cat([first, image.gather(axis, destinations.view(shape).expand(wanted)), last], axis)
