"""ERNIE-Image: one stream of [image | text]; the arguments of blocks are only tokens, positions and modulation.

In ComfyUI 0.20.1 positions have a shape that this pack does not know, so the model runs unmerged there.
"""

from __future__ import annotations

from comfy.ldm.ernie.model import ErnieImageModel

from ..family import Block, BlockGroup, BlockSignature, ModelHooks

NAME = "ERNIE-Image"
MODEL = ErnieImageModel
COST = Block(13, 37, (1, 20, 5))


class Signature(BlockSignature):
    """ComfyUI passes no `attention_mask`; a block that gets one runs unmerged."""

    positional_args = ("x", "rotary_pos_emb", "temb")
    required_kwargs = ()
    rope_arg, rope_token_dim = "rotary_pos_emb", 1
    rope_split_half = True
    passthrough_args = ("temb",)


class Hooks(ModelHooks):
    passes_options = False

    def block_groups(self, model: ErnieImageModel) -> tuple[BlockGroup, ...]:
        return (BlockGroup("layer", model.layers, Signature(), COST, model.patch_size, model.hidden_size),)
