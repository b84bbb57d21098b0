"""ERNIE-Image: one stream of [image | text], whose blocks are told nothing but tokens, positions and modulation.

ComfyUI 0.20.1 has its positions in another shape: there it runs whole.
"""

from __future__ import annotations

from comfy.ldm.ernie.model import ErnieImageModel
from torch import nn

from ....toma_core.payoff import ERNIE
from ..family import WITHOUT_KEYS, Stage, Transformer
from ..port import Port

NAME = "ERNIE-Image"


def matches(diffusion_model: nn.Module) -> bool:
    """Whether this family knows the model."""
    return isinstance(diffusion_model, ErnieImageModel)


class BlockPort(Port):
    """[image | text]. A mask would be of all tokens; ComfyUI gives none."""

    places = ("x", "rotary_pos_emb", "temb")
    needs = ()
    rows, axis = "rotary_pos_emb", 1
    harmless = ("temb",)


class Hooks(Transformer):
    """All hooks of one ERNIE-Image."""

    # Its attention is told nothing.
    presets, shows_keys = WITHOUT_KEYS, False

    def stages_of(self, model: ErnieImageModel) -> tuple[Stage, ...]:
        """All blocks."""
        self.patch_size, self.width = model.patch_size, model.hidden_size
        return (Stage("layer", model.layers, BlockPort(), ERNIE),)
