"""Lens: one stream of the image, another of text; the image comes first in attention and positions."""

from __future__ import annotations

from comfy.ldm.lens.model import LensTransformer2DModel

from ..family import Block, BlockGroup, BlockSignature, ModelHooks

NAME = "Lens"
MODEL = LensTransformer2DModel
COST = Block(12, 108, (1, 3, 3))


class Signature(BlockSignature):
    """The mask covers all keys, [image | text], and never hides keys of the image."""

    positional_args = ("hidden_states", "encoder_hidden_states", "temb", "freqs_cis")
    tokens_arg, output_index = "hidden_states", 1
    text_arg, text_first = "encoder_hidden_states", False
    masks_text, mask_arg = True, "attention_mask"
    rope_arg = "freqs_cis"
    passthrough_args = ("temb",)


class Hooks(ModelHooks):
    between = ("double_block",)

    def block_groups(self, model: LensTransformer2DModel) -> tuple[BlockGroup, ...]:
        return (BlockGroup("double", model.transformer_blocks, Signature(), COST, 1, model.inner_dim, "input"),)
