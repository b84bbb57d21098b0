"""Krea 2: one stream of [text | image | references], with grouped keys and values."""

from __future__ import annotations

from comfy.ldm.krea2.model import SingleStreamDiT

from ..family import Block, BlockGroup, BlockSignature, ModelHooks
from ..signature import CallArguments

NAME = "Krea 2"
MODEL = SingleStreamDiT
# Cost of a block with keys and values that are narrower than the tokens, and with a gate in attention.
COST = Block(11.5, 69, (1, 5, 5))


class Signature(BlockSignature):
    """If ComfyUI passes `timestep_zero_index`, references have noise level 0."""

    positional_args = ("x", "vec", "freqs", "mask")
    rope_arg = "freqs"
    image_last = True
    index_args = ("timestep_zero_index",)
    passthrough_args = ("vec",)

    def image_start(self, call_args: CallArguments, image: int) -> int | None:
        # Do not count from the end: patches may append tokens after the references. ComfyUI 0.26.0 has no img_slice.
        after_text = (call_args.get("transformer_options") or {}).get("img_slice")
        return super().image_start(call_args, image) if after_text is None else int(after_text[0])


class Hooks(ModelHooks):
    references_follow = True

    def block_groups(self, model: SingleStreamDiT) -> tuple[BlockGroup, ...]:
        return (BlockGroup("single", model.blocks, Signature(), COST, model.patch, model.first.out_features),)
