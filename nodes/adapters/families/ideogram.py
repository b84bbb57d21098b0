"""Ideogram 4: one stream of [text | image], or of the image alone if there is no prompt."""

from __future__ import annotations

from comfy.ldm.ideogram4.model import Ideogram4Transformer2DModel

from ..family import Block, BlockGroup, BlockSignature, ModelHooks

NAME = "Ideogram 4"
MODEL = Ideogram4Transformer2DModel
DERIVED = ("Ideogram4Transformer2DModel",)
COST = Block(12, 52, (1, 5, 5))


class Signature(BlockSignature):
    """If the prompts of a batch differ in length, the mask differs from query to query, and blocks run unmerged."""

    positional_args = ("x", "attn_mask", "freqs_cis", "adaln_input")
    rope_arg, rope_token_dim = "freqs_cis", 1
    rope_split_half = True
    image_last = True
    passthrough_args = ("adaln_input",)


class Hooks(ModelHooks):
    def block_groups(self, model: Ideogram4Transformer2DModel) -> tuple[BlockGroup, ...]:
        return (BlockGroup("layer", model.layers, Signature(), COST, 1, model.layers[0].attention.hidden_size),)
