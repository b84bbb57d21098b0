"""HunyuanVideo and HunyuanVideo 1.5, HunyuanImage 2.1: a class of its own, with the blocks of Flux.

Tokens are [text | reference | frames]; only frames are merged, each to the same number of tokens. Where the first frame
has another noise level, blocks get its position as an index inside a frame, and run unmerged.
"""

from __future__ import annotations

from typing import Any

from comfy.ldm.hunyuan_video.model import HunyuanVideo
from torch import Tensor

from ....toma_core.cost_model import HUNYUAN_DOUBLE, HUNYUAN_SINGLE
from ..blocks import BlockGroup
from ..family import Transformer
from ..signature import BlockSignature, CallArguments, TokenReduction, text_masked

NAME = "HunyuanVideo (1.0, 1.5) and HunyuanImage 2.1"
MODEL = HunyuanVideo


def fits(model: HunyuanVideo) -> bool:
    """Whether a token is of one frame."""
    return int((*model.patch_size[:-2], 1)[0]) == 1


class _Signature(BlockSignature):
    """The frames come last. Positions are of text and all tokens, merged or not."""

    rope_arg = "pe"
    mutates_input = clamps_fp16 = True

    def image_start(self, call_args: CallArguments, image: int) -> int | None:
        rope = call_args.get(self.rope_arg)
        if rope is None or rope.ndim <= self.rope_token_dim:
            return None
        before = int(rope.shape[self.rope_token_dim]) - self.attention_offset(call_args) - image
        return before if before >= 0 else None

    def merged_args(self, call_args: CallArguments, reduction: TokenReduction) -> CallArguments:
        merged, mask = super().merged_args(call_args, reduction), call_args.get("attn_mask")
        # A mask of the text: all later tokens are attended to.
        return merged if mask is None else {**merged, "attn_mask": mask[..., : mask.shape[-1] - reduction.removed]}

    def merged_mask(self, mask: Tensor, removed: int) -> Tensor | None:
        return text_masked(mask, removed)


class SingleSignature(_Signature):
    """[text | reference | frames]."""

    positional_args = ("x", "vec", "pe", "attn_mask")
    passthrough_args = ("vec", "attn_mask", "transformer_options")


class DoubleSignature(_Signature):
    """[reference | frames]; the text beside them has its positions before theirs."""

    positional_args = ("img", "txt", "vec", "pe", "attn_mask")
    tokens_arg, output_index = "img", 0
    passthrough_args = ("txt", "vec", "attn_mask", "transformer_options")

    def attention_offset(self, call_args: CallArguments) -> int:
        return int(call_args["txt"].shape[1])


class Hooks(Transformer):
    """The hooks of one model."""

    takes_frames = True
    references_follow = False

    def block_groups(self, model: Any) -> tuple[BlockGroup, ...]:
        """Return double blocks, and single blocks where there are any: 1.5 has none."""
        self.patch_size, self.width = model.patch_size[-1], model.hidden_size
        double = BlockGroup("double", model.double_blocks, DoubleSignature(), HUNYUAN_DOUBLE, "input")
        single = BlockGroup("single", model.single_blocks, SingleSignature(), HUNYUAN_SINGLE, "output")
        return (double, single) if len(model.single_blocks) else (double,)
