"""OmniGen2: one stream of [text | references | image], keys and values in groups.

The few refiner blocks before it, of text or image alone, are not merged.
"""

from __future__ import annotations

from comfy.ldm.omnigen.omnigen2 import OmniGen2Transformer2DModel

from ....toma_core.cost_model import OMNIGEN
from ..blocks import BlockGroup
from ..family import Transformer
from ..signature import BlockSignature, CallArguments

NAME = "OmniGen2"
MODEL = OmniGen2Transformer2DModel


class Signature(BlockSignature):
    """[text | references | image]: ComfyUI passes no start of the image, but it comes last."""

    positional_args = ("hidden_states", "attention_mask", "image_rotary_emb", "temb")
    tokens_arg = "hidden_states"
    rope_arg, rope_token_dim = "image_rotary_emb", 1
    passthrough_args = ("temb", "transformer_options")

    def image_start(self, call_args: CallArguments, image: int) -> int | None:
        # Positions stay as they were while the tokens are merged.
        rope = call_args.get(self.rope_arg)
        before = -1 if rope is None or rope.ndim <= self.rope_token_dim else rope.shape[self.rope_token_dim] - image
        return before if before >= 0 else None


class Hooks(Transformer):
    """The hooks of one OmniGen2."""

    references_follow = False

    def block_groups(self, model: OmniGen2Transformer2DModel) -> tuple[BlockGroup, ...]:
        """Return the layers after the refiners."""
        attention = model.layers[0].attn
        self.patch_size, self.width = model.patch_size, model.hidden_size
        # An older ComfyUI repeats keys before attention.
        if "enable_gqa" in type(attention).forward.__code__.co_consts:
            self.keys_width = attention.kv_heads * attention.dim_head
        return (BlockGroup("layer", model.layers, Signature(), OMNIGEN),)
