"""Krea 2: one stream of [text | image | references], keys and values in groups."""

from __future__ import annotations

from comfy.ldm.krea2.model import SingleStreamDiT

from ....toma_core.cost_model import KREA
from ..blocks import BlockGroup
from ..family import Transformer
from ..signature import BlockSignature, CallArguments, image_start_of

NAME = "Krea 2"
MODEL = SingleStreamDiT


class Signature(BlockSignature):
    """[text | image | references]; the last may be marked as clean (timestep_zero_index)."""

    positional_args = ("x", "vec", "freqs", "mask")
    rope_arg = "freqs"
    image_last = True
    index_args = ("timestep_zero_index",)
    passthrough_args = ("vec",)

    def image_start(self, call_args: CallArguments, image: int) -> int | None:
        # ComfyUI 0.26.0 has no img_slice, but no references either.
        start = image_start_of(call_args)
        return super().image_start(call_args, image) if start is None else start


class Hooks(Transformer):
    references_follow = True

    def block_groups(self, model: SingleStreamDiT) -> tuple[BlockGroup, ...]:
        self.patch_size, self.width = model.patch, model.first.out_features
        return (BlockGroup("single", model.blocks, Signature(), KREA),)
