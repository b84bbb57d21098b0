"""SD3 and SD3.5: one stream of the image, another of text; positions are added before the first block."""

from __future__ import annotations

from typing import Any

from comfy.ldm.modules.diffusionmodules.mmdit import MMDiT

from ..family import Block, BlockGroup, BlockSignature, ModelHooks
from ..signature import CallArguments

NAME = "SD3.5"
MODEL = MMDiT
DERIVED = ("OpenAISignatureMMDITWrapper",)
COST = Block(12, 70, (1, 2, 2), beside=77)


class Signature(BlockSignature):
    """The last block returns no text."""

    positional_args = ("context", "x")
    output_index = 1
    text_arg = "context"
    passthrough_args = ("c", "use_checkpoint")

    def attention_spans(self, call_args: CallArguments, before: int) -> tuple[tuple[int, int, int], ...]:
        # In some blocks of SD3.5 medium, the image attends a second time, to itself alone.
        tokens = int(call_args["x"].shape[1])
        return *super().attention_spans(call_args, before), (before, tokens, tokens)


class Hooks(ModelHooks):
    def attentions(self, block: Any) -> int:
        return 1 + bool(getattr(getattr(block, "x_block", None), "x_block_self_attn", False))

    def block_groups(self, model: MMDiT) -> tuple[BlockGroup, ...]:
        size, width = model.patch_size, model.hidden_size
        return (BlockGroup("double", model.joint_blocks, Signature(), COST, size, width, "output"),)
