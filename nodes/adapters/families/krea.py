"""Krea 2: one stream of [text | image | references], keys and values in groups."""

from __future__ import annotations

from comfy.ldm.krea2.model import SingleStreamDiT

from ....toma_core.cost_model import KREA
from ..family import Transformer
from ..signature import BlockGroup, BlockSignature

NAME = "Krea 2"
MODEL = SingleStreamDiT


class Signature(BlockSignature):
    """[text | image | references]; the last may be marked as clean (timestep_zero_index)."""

    positional_args = ("x", "vec", "freqs", "mask")
    rope_arg = "freqs"
    image_last = True
    index_args = ("timestep_zero_index",)
    passthrough_args = ("vec",)


class Hooks(Transformer):
    references_follow = True

    def block_groups(self, model: SingleStreamDiT) -> tuple[BlockGroup, ...]:
        self.patch_size, self.width = model.patch, model.first.out_features
        return (BlockGroup("single", model.blocks, Signature(), KREA),)
