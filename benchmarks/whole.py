"""What describes a model as its checkpoint is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Whole:
    """One model.

    base, kind: its classes in `comfy.model_base` and `comfy.supported_models`. config: what the second is made of.
    depths: the names in it that say how many blocks there are of each kind. few: so many of them as a machine with
    10 GB takes at full width. text: tokens and width of the text: what ComfyUI pads to, else a prompt of a hundred
    tokens or so. pooled: width of the pooled vector, 0 if there is none. channels: of the latent. pixel: side of one of
    its pixels in the picture. video: latents have five dimensions. guidance: it is told one. audio: the shape of a
    second stream beside so many frames of the latent.
    """

    base: str
    kind: str
    config: Mapping[str, Any]
    depths: tuple[str, ...] = ()
    few: tuple[int, ...] = ()
    text: tuple[int, int] = (512, 4096)
    pooled: int = 0
    channels: int = 16
    pixel: int = 8
    video: bool = False
    guidance: bool = False
    audio: Callable[[int], tuple[int, ...]] | None = None

    def at(self, blocks: tuple[int, ...] | None) -> dict[str, Any]:
        """The config with so many blocks of each kind; all of them if None, or if there are no kinds."""
        if blocks is None or not self.depths:
            return dict(self.config)
        return {**self.config, **dict(zip(self.depths, blocks, strict=True))}
