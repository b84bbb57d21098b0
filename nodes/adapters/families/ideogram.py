"""Ideogram 4: one stream of [text | image], or of the image alone without a prompt."""

from __future__ import annotations

from comfy.ldm.ideogram4.model import Ideogram4Transformer2DModel
from torch import Tensor

from ....toma_core.cost_model import IDEOGRAM
from ..blocks import BlockGroup
from ..family import Transformer
from ..signature import BlockSignature, CallArguments

NAME = "Ideogram 4"
MODEL = Ideogram4Transformer2DModel
DERIVED = ("Ideogram4Transformer2DModel",)


class Signature(BlockSignature):
    """[text | image]. A mask, of prompts of several lengths in a batch, is per query: such blocks are not merged."""

    positional_args = ("x", "attn_mask", "freqs_cis", "adaln_input")
    rope_arg, rope_token_dim = "freqs_cis", 1
    passthrough_args = ("adaln_input", "transformer_options")

    def image_start(self, call_args: CallArguments, image: int) -> int | None:
        # Positions stay as they were while the tokens are merged.
        rope = call_args.get(self.rope_arg)
        # An older ComfyUI has two tables.
        if not isinstance(rope, Tensor) or rope.ndim <= self.rope_token_dim:
            return None
        before = rope.shape[self.rope_token_dim] - image
        return before if before >= 0 else None


class Hooks(Transformer):
    """The hooks of one Ideogram 4."""

    def block_groups(self, model: Ideogram4Transformer2DModel) -> tuple[BlockGroup, ...]:
        """Return all blocks; a pixel of the latent is a token."""
        self.patch_size, self.width = 1, model.layers[0].attention.hidden_size
        return (BlockGroup("layer", model.layers, Signature(), IDEOGRAM),)
