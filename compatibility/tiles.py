"""A minimal reimplementation of the tiled sampling of community packs, without their code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

TILE = 16


def corners(side: int) -> list[tuple[int, int]]:
    """Return (top, left) of four overlapping tiles on a latent of `side` x `side`."""
    return [(top, left) for top in (0, side - TILE) for left in (0, side - TILE)]


def tiled(
    model: Any, tiles: Sequence[tuple[int, int]], at_once: int = 1, move: Callable[[int], int] = lambda _: 0
) -> Any:
    """Return a clone of the model that is evaluated on tiles, as in MultiDiffusion. A batch has `at_once` tiles, each
    with all of its conditions. Where tiles overlap, their outputs are averaged. move: returns the number of columns by
    which the n-th evaluation rolls the latent, as in SpotDiffusion."""
    model, count = model.clone(), 0

    def evaluate(apply: Any, args: dict[str, Any]) -> Tensor:
        nonlocal count
        by = move(count)
        count += 1
        x, t, c = args["input"].roll(by, -1), args["timestep"], args["c"]
        out, weight = torch.zeros_like(x), torch.zeros_like(x)
        for first in range(0, len(tiles), at_once):
            some = tiles[first : first + at_once]
            cut = torch.cat([x[..., top : top + TILE, left : left + TILE] for top, left in some])
            more = {k: v.repeat(len(some), *[1] * (v.ndim - 1)) if isinstance(v, Tensor) else v for k, v in c.items()}
            parts = apply(cut, t.repeat(len(some)), **more).chunk(len(some))
            for (top, left), part in zip(some, parts, strict=True):
                out[..., top : top + TILE, left : left + TILE] += part
                weight[..., top : top + TILE, left : left + TILE] += 1
        return (out / weight).roll(-by, -1)

    model.set_model_unet_function_wrapper(evaluate)
    return model
