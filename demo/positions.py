"""Tell the UNet where things are: sines over the picture, added to what its first convolution gives.

SDXL learnt places from the zeros that pad its convolutions, in more training than the demo has. It goes through
ComfyUI's own `input_block_patch`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def places(count: int, first: float = 0.0, whole: int | None = None, device: torch.device | None = None) -> Tensor:
    """The centres of `count` cells along one side of a picture `whole` cells long, from the cell `first` on: 0..1."""
    return (torch.arange(count, device=device) + 0.5 + first) / (whole or count)


def code(y: Tensor, x: Tensor, channels: int) -> Tensor:
    """Sines and cosines of 1, 2, 4 and 8 half turns over a picture, in the first half of the channels; the rest is 0.

    With 32 channels each is there once, with 64 twice.

    y: (H,) and x: (W,) in 0..1. Returns (1, channels, H, W), float32.
    """
    turns = math.pi * 2.0 ** (torch.arange(channels // 8, device=y.device) % 4)
    rows, columns = y[:, None] * turns, x[:, None] * turns
    waves = [rows.sin(), rows.cos(), columns.sin(), columns.cos()]
    maps = [wave.T[:, :, None].expand(-1, -1, len(x)) for wave in waves[:2]]
    maps += [wave.T[:, None, :].expand(-1, len(y), -1) for wave in waves[2:]]
    used = torch.cat(maps)
    return torch.cat([used, used.new_zeros(channels - len(used), len(y), len(x))])[None]


class AddPositions:
    """An `input_block_patch`: h (B, C, H, W) after the first convolution gets the code of its places.

    rows, columns: the places, (H,) and (W,), where they are not those of a whole picture. Training sets them in one
    object, because torch.compile makes a new program for every other one.
    """

    rows: Tensor | None = None
    columns: Tensor | None = None

    def __call__(self, h: Tensor, transformer_options: dict[str, Any]) -> Tensor:
        """h with its code where this is the first block, else h itself."""
        if transformer_options["block"] != ("input", 0):
            return h
        rows = places(h.shape[2], device=h.device) if self.rows is None else self.rows
        columns = places(h.shape[3], device=h.device) if self.columns is None else self.columns
        return h + code(rows, columns, h.shape[1]).to(h.dtype)
