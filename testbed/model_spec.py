"""The specification of a full-size model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelSpec:
    """The classes, sizes and inputs of one model."""

    base: str  # the model's class in `comfy.model_base`
    kind: str  # the model's class in `comfy.supported_models`
    config: Mapping[str, Any]  # config of `kind`
    depths: tuple[str, ...] = ()  # keys of `config` with the number of blocks of each kind
    few: tuple[int, ...] = ()  # numbers of blocks that fit in 10 GB at full width
    # Number of text tokens, and their width. If ComfyUI pads the text, this is the padded length, otherwise about a
    # hundred.
    text: tuple[int, int] = (512, 4096)
    pooled: int = 0  # width of the pooled vector, 0 if there is none
    channels: int = 16  # channels of the latent
    pixel: int = 8  # side of a pixel of the latent, in pixels of the picture
    video: bool = False  # whether latents have five dimensions
    guidance: bool = False  # whether the model takes Flux's guidance as an input
    audio: Callable[[int], tuple[int, ...]] | None = None  # frames of the latent -> shape of the audio stream

    def at(self, blocks: tuple[int, ...] | None) -> dict[str, Any]:
        """Return the config with these numbers of blocks of each kind. None, or a model without `depths`, means all
        blocks."""
        if blocks is None or not self.depths:
            return dict(self.config)
        return {**self.config, **dict(zip(self.depths, blocks, strict=True))}
