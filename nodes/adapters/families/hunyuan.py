"""HunyuanVideo, HunyuanVideo 1.5 and HunyuanImage 2.1: one class, with the blocks of Flux.

Tokens are [text | reference | frames]; only frames are merged. If the first frame has another noise level than the
others, blocks run unmerged.
"""

from __future__ import annotations

from typing import Any

from comfy.ldm.hunyuan_video.model import HunyuanVideo

from ..family import Block, BlockGroup, BlockSignature, ModelHooks

NAME = "HunyuanVideo (1.0, 1.5) and HunyuanImage 2.1"
MODEL = HunyuanVideo
# Costs of Flux's blocks, but without `beside`, because ComfyUI does not pad the text.
DOUBLE = Block(12, 75, (2, 4, 4))
SINGLE = Block(12, 31, (2, 5, 5))


def fits(model: HunyuanVideo) -> bool:
    """Whether each token covers a single frame. Models whose tokens cover several frames are not supported."""
    return int((*model.patch_size[:-2], 1)[0]) == 1


class SingleSignature(BlockSignature):
    """Blocks on one stream of [text | reference | frames]."""

    positional_args: tuple[str, ...] = ("x", "vec", "pe", "attn_mask")
    rope_arg = "pe"
    image_last = True
    masks_text, mask_arg = True, "attn_mask"
    passthrough_args = ("vec",)
    mutates_input = clamps_fp16 = True


class DoubleSignature(SingleSignature):
    """Blocks on [reference | frames] beside a stream of text; in positions, text comes first."""

    positional_args = ("img", "txt", "vec", "pe", "attn_mask")
    tokens_arg, text_arg, output_index = "img", "txt", 0


class Hooks(ModelHooks):
    takes_frames = True

    def block_groups(self, model: Any) -> tuple[BlockGroup, ...]:
        sizes = model.patch_size[-1], model.hidden_size
        double = BlockGroup("double", model.double_blocks, DoubleSignature(), DOUBLE, *sizes, "input")
        single = BlockGroup("single", model.single_blocks, SingleSignature(), SINGLE, *sizes, "output")
        return (double, single) if len(model.single_blocks) else (double,)  # HunyuanVideo 1.5 has no single blocks
