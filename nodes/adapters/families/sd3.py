"""SD3 and SD3.5: a stream of the image, another of text, positions added before the first block."""

from __future__ import annotations

from typing import Any

from comfy.ldm.modules.diffusionmodules.mmdit import MMDiT

from ....toma_core.cost_model import MM_DIT
from ..blocks import BlockGroup
from ..family import Transformer
from ..signature import BlockSignature, CallArguments

NAME = "SD3.5"
MODEL = MMDiT
DERIVED = ("OpenAISignatureMMDITWrapper",)


class Signature(BlockSignature):
    """The image alone; the last block returns no text."""

    positional_args = ("context", "x")
    output_index = 1
    passthrough_args = ("context", "c", "use_checkpoint", "transformer_options")

    def attention_offset(self, call_args: CallArguments) -> int:
        return int(call_args["context"].shape[1])

    def attention_spans(self, call_args: CallArguments, before: int) -> tuple[tuple[int, ...], ...]:
        """Return text and image together, and the image alone, for some blocks of SD3.5 medium."""
        return *super().attention_spans(call_args, before), (before, int(call_args["x"].shape[1]))


class Hooks(Transformer):
    """The hooks of one SD3."""

    def attentions(self, block: Any) -> int:
        """Return 2 for some blocks of SD3.5 medium, where the image attends to itself once more."""
        return 1 + bool(getattr(getattr(block, "x_block", None), "x_block_self_attn", False))

    def block_groups(self, model: MMDiT) -> tuple[BlockGroup, ...]:
        """Return all blocks."""
        self.patch_size, self.width = model.patch_size, model.hidden_size
        return (BlockGroup("double", model.joint_blocks, Signature(), MM_DIT, "output"),)
