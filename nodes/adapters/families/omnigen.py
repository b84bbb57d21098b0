"""OmniGen2: one stream of [text | references | image], with grouped keys and values.

A few refiner blocks run earlier, on only the text or only the image. They are not merged.
"""

from __future__ import annotations

from comfy.ldm.omnigen.omnigen2 import OmniGen2Transformer2DModel

from ..family import Block, BlockGroup, BlockSignature, ModelHooks

NAME = "OmniGen2"
MODEL = OmniGen2Transformer2DModel
# Cost of a block with keys and values that are narrower than the tokens.
COST = Block(44 / 3, 72, (1, 5, 5))


class Signature(BlockSignature):
    positional_args = ("hidden_states", "attention_mask", "image_rotary_emb", "temb")
    tokens_arg = "hidden_states"
    rope_arg, rope_token_dim = "image_rotary_emb", 1
    image_last = True
    passthrough_args = ("temb",)


class Hooks(ModelHooks):
    def block_groups(self, model: OmniGen2Transformer2DModel) -> tuple[BlockGroup, ...]:
        attention, size, width = model.layers[0].attn, model.patch_size, model.hidden_size
        # Cached keys are narrower than tokens, except in an older ComfyUI, which repeats keys before attention.
        grouped = "enable_gqa" in type(attention).forward.__code__.co_consts
        keys = attention.kv_heads * attention.dim_head if grouped else 0
        return (BlockGroup("layer", model.layers, Signature(), COST, size, width, keys_width=keys),)
