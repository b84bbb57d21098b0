"""Scenes as ComfyUI CONDITIONING, and seeded noise: the prompt and the seed of the tiny models."""

from __future__ import annotations

from typing import Any

import torch

from .latents import LATENT_CHANNELS, UNSHUFFLE
from .scenes import Scene, pooled_tokens, scene_tokens


def conditioning(scenes: list[Scene | None], guidance: float | None = None) -> list[list[Any]]:
    """Return the CONDITIONING of a batch: scene i belongs to latent i, and None is the empty prompt. guidance: value of
    a FluxGuidance node, or None.

    Tokens are (len(scenes), T, TEXT_DIM), pooled (len(scenes), TEXT_DIM). ComfyUI repeats a single entry over a batch.
    """
    if not scenes:
        raise ValueError("at least one scene is needed")
    tokens = torch.stack([scene_tokens(scene) for scene in scenes])
    values = {} if guidance is None else {"guidance": guidance}
    return [[tokens, {"pooled_output": pooled_tokens(tokens), **values}]]


def empty_latent(width: int, height: int, batch: int = 1) -> torch.Tensor:
    """Return zeros (batch, 16, height / 2, width / 2) for pictures of width x height pixels, both even."""
    if width % UNSHUFFLE or height % UNSHUFFLE or min(width, height) < 16 or batch < 1:
        raise ValueError(
            f"width and height must be even and at least 16, batch at least 1, not {width}, {height}, {batch}"
        )
    return torch.zeros(batch, LATENT_CHANNELS, height // UNSHUFFLE, width // UNSHUFFLE)


def seeded_noise(seeds: list[int], width: int, height: int) -> torch.Tensor:
    """Draw noise (len(seeds), 16, height / 2, width / 2) in which each picture depends on its own seed only."""
    shape = empty_latent(width, height).shape[1:]
    return torch.stack([torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds])
