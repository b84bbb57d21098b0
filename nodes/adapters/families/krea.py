"""Krea 2: one stream of [text | image | references], keys and values in groups."""

from __future__ import annotations

from comfy.ldm.krea2.model import SingleStreamDiT

from ....toma_core.cost_model import KREA
from ..blocks import BlockGroup
from ..family import Transformer
from ..signature import BlockSignature, CallArguments, TokenReduction, image_start_of, shifted_index

NAME = "Krea 2"
MODEL = SingleStreamDiT


class Signature(BlockSignature):
    """[text | image | references]; the last may be marked as clean (timestep_zero_index)."""

    positional_args = ("x", "vec", "freqs", "mask")
    rope_arg = "freqs"
    passthrough_args = ("vec", "timestep_zero_index", "transformer_options")

    def image_start(self, call_args: CallArguments, image: int) -> int | None:
        if (start := image_start_of(call_args)) is not None:
            return start
        # ComfyUI 0.26.0 has no img_slice, but no references either: the image comes last. Positions stay as they were
        # while the tokens are merged.
        rope = call_args.get(self.rope_arg)
        text = (
            -1
            if rope is None or rope.ndim <= self.rope_token_dim
            else rope.shape[self.rope_token_dim] - image - self.reference_tokens(call_args)
        )
        return text if text >= 0 else None

    def merged_args(self, call_args: CallArguments, reduction: TokenReduction) -> CallArguments:
        return {
            **super().merged_args(call_args, reduction),
            **shifted_index(call_args, "timestep_zero_index", reduction),
        }


class Hooks(Transformer):
    """The hooks of one Krea 2."""

    def block_groups(self, model: SingleStreamDiT) -> tuple[BlockGroup, ...]:
        """Return all blocks."""
        self.patch_size, self.width = model.patch, model.first.out_features
        return (BlockGroup("single", model.blocks, Signature(), KREA),)
