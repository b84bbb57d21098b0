"""Qwen-Image and Qwen-Image-Edit: one stream of [image | references], another of text."""

from __future__ import annotations

from comfy.ldm.qwen_image.model import QwenImageTransformer2DModel
from torch import Tensor

from ....toma_core.cost_model import QWEN
from ..blocks import BlockGroup
from ..family import Transformer
from ..signature import BlockSignature, CallArguments, TokenReduction, shifted_index, text_masked

NAME = "Qwen-Image"
MODEL = QwenImageTransformer2DModel


class Signature(BlockSignature):
    """[image | references]; the last may be marked as clean (timestep_zero_index). A mask is of the text."""

    positional_args = (
        "hidden_states",
        "encoder_hidden_states",
        "encoder_hidden_states_mask",
        "temb",
        "image_rotary_emb",
    )
    tokens_arg, output_index = "hidden_states", 1
    rope_arg = "image_rotary_emb"
    passthrough_args = (
        *("encoder_hidden_states", "encoder_hidden_states_mask", "temb"),
        *("timestep_zero_index", "transformer_options"),
    )

    def attention_offset(self, call_args: CallArguments) -> int:
        return int(call_args["encoder_hidden_states"].shape[1])

    def merged_args(self, call_args: CallArguments, reduction: TokenReduction) -> CallArguments:
        return {
            **super().merged_args(call_args, reduction),
            **shifted_index(call_args, "timestep_zero_index", reduction),
        }

    def merged_mask(self, mask: Tensor, removed: int) -> Tensor | None:
        return text_masked(mask, removed)


class Hooks(Transformer):
    """The hooks of one Qwen-Image."""

    # ControlNets that are patches read the image between two blocks.
    between = ("double_block",)

    def block_groups(self, model: QwenImageTransformer2DModel) -> tuple[BlockGroup, ...]:
        """Return all blocks."""
        self.patch_size, self.width = model.patch_size, model.inner_dim
        return (BlockGroup("double", model.transformer_blocks, Signature(), QWEN, "input"),)
