"""Position encoding for the tiny UNet: sines over the picture, added to the output of its first convolution.

SDXL learns to infer positions from the zero padding of its convolutions. To learn this takes more training than the
demo has. An `input_block_patch`, one of ComfyUI's own hooks, adds the encoding.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def cell_centres(count: int, first: float = 0.0, side: int | None = None, device: torch.device | None = None) -> Tensor:
    """Return the centres of `count` cells, beginning with cell `first`. `side` cells together have the length 1."""
    return (torch.arange(count, device=device) + 0.5 + first) / (side or count)


def code(y: Tensor, x: Tensor, channels: int) -> Tensor:
    """Encode positions as sines and cosines of 1, 2, 4 and 8 half periods, in half of the channels. The other half is
    0.

    With 32 channels each wave is in one channel, with 64 channels in two.

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
    """An `input_block_patch` that adds the position code to h (B, C, H, W) after the first convolution.

    Training changes `rows` and `columns` of one object, because torch.compile would recompile for each new object.
    """

    rows: Tensor | None = None  # (H,): positions of the rows, None for a full picture
    columns: Tensor | None = None  # (W,)

    def __call__(self, h: Tensor, transformer_options: dict[str, Any]) -> Tensor:
        """In the first block, return h plus the code. In all other blocks, return h unchanged."""
        if transformer_options["block"] != ("input", 0):
            return h
        rows = cell_centres(h.shape[2], device=h.device) if self.rows is None else self.rows
        columns = cell_centres(h.shape[3], device=h.device) if self.columns is None else self.columns
        return h + code(rows, columns, h.shape[1]).to(h.dtype)
