"""Flux.1 (dev, schnell, Fill, Kontext), Flux.2, Klein and every other model that ComfyUI runs on its `Flux` class.

Image tokens are merged, and tokens of reference images if the settings say so; text tokens are never merged.
"""

from __future__ import annotations

from typing import Any

from comfy.ldm.flux.model import Flux

from ..family import Block, BlockGroup, BlockSignature, ModelHooks
from ..signature import CallArguments

NAME = "Flux (Flux.1, Flux.2, Klein, LongCat, Ovis)"
MODEL = Flux
DOUBLE = Block(12, 75, (2, 4, 4), beside=256)
SINGLE = Block(12, 31, (2, 5, 5), beside=256)
FLUX2_DOUBLE = Block(13, 73, (2, 4, 4), beside=512)
FLUX2_SINGLE = Block(13, 30, (2, 5, 5), beside=512)
# Numbers of double and single blocks in Flux.1. Of each kind, the paper's released code skips the first five blocks.
_FLUX_1 = 19, 38


class SingleSignature(BlockSignature):
    """Blocks on one stream of [text | image | references]."""

    positional_args = ("x", "vec", "pe", "attn_mask")
    rope_arg = "pe"
    index_args = ("modulation_dims",)
    passthrough_args = ("vec",)
    mutates_input = clamps_fp16 = True

    def image_start(self, call_args: CallArguments, image: int) -> int | None:
        # Some step caches pass no options. Then return None: the caller uses the index that double blocks noted.
        after_text = (call_args.get("transformer_options") or {}).get("img_slice")
        return None if after_text is None else int(after_text[0])


class DoubleSignature(BlockSignature):
    """Blocks on [image | references] beside a stream of text. In positions, the text comes before the image."""

    positional_args = ("img", "txt", "vec", "pe", "attn_mask")
    tokens_arg, text_arg, output_index = "img", "txt", 0
    rope_arg = "pe"
    index_args = ("modulation_dims_img",)
    passthrough_args = ("vec", "modulation_dims_txt")
    mutates_input = clamps_fp16 = True


class Hooks(ModelHooks):
    references_follow = True

    def block_groups(self, model: Any) -> tuple[BlockGroup, ...]:
        if (len(model.double_blocks), len(model.single_blocks)) == _FLUX_1:
            self.own_presets = {"paper": {"skip_first_blocks": 5}}
        double, single = self.works(model)
        sizes = model.patch_size, getattr(model, "hidden_size", 0)
        return (
            BlockGroup("double", model.double_blocks, DoubleSignature(), double, *sizes, "input"),
            BlockGroup("single", model.single_blocks, SingleSignature(), single, *sizes, "output"),
        )

    def works(self, model: Any) -> tuple[Block, Block]:
        """Return the costs of double and single blocks. Flux.2 and Klein have wider MLPs; their blocks share one
        modulation."""
        flux2 = getattr(model.params, "global_modulation", False)
        return (FLUX2_DOUBLE, FLUX2_SINGLE) if flux2 else (DOUBLE, SINGLE)
