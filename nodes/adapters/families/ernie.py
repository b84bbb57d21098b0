"""ERNIE-Image: one stream of [image | text], whose blocks are told nothing but tokens, positions and modulation.

ComfyUI 0.20.1 has its positions in another shape: there it runs whole.
"""

from __future__ import annotations

from comfy.ldm.ernie.model import ErnieImageModel
from torch import nn

from ....toma_core.cost_model import ERNIE
from ..blocks import BlockGroup
from ..family import WITHOUT_KV_CACHE, Transformer
from ..signature import BlockSignature

NAME = "ERNIE-Image"


def matches(diffusion_model: nn.Module) -> bool:
    """Whether this family knows the model."""
    return isinstance(diffusion_model, ErnieImageModel)


class Signature(BlockSignature):
    """[image | text]. A mask would be of all tokens; ComfyUI gives none."""

    positional_args = ("x", "rotary_pos_emb", "temb")
    required_kwargs = ()
    rope_arg, rope_token_dim = "rotary_pos_emb", 1
    passthrough_args = ("temb",)


class Hooks(Transformer):
    """All hooks of one ERNIE-Image."""

    # Its attention is told nothing.
    presets, passes_options = WITHOUT_KV_CACHE, False

    def block_groups(self, model: ErnieImageModel) -> tuple[BlockGroup, ...]:
        """All blocks."""
        self.patch_size, self.width = model.patch_size, model.hidden_size
        return (BlockGroup("layer", model.layers, Signature(), ERNIE),)
