"""Qwen-Image and Qwen-Image-Edit: one stream of [image | references], another of text."""

from __future__ import annotations

from comfy.ldm.qwen_image.model import QwenImageTransformer2DModel

from ..family import Block, BlockGroup, BlockSignature, ModelHooks

NAME = "Qwen-Image"
MODEL = QwenImageTransformer2DModel
COST = Block(12, 77, (1, 3, 3))


class Signature(BlockSignature):
    """If ComfyUI passes `timestep_zero_index`, references have noise level 0. Masks cover only the text."""

    positional_args = (
        "hidden_states",
        "encoder_hidden_states",
        "encoder_hidden_states_mask",
        "temb",
        "image_rotary_emb",
    )
    tokens_arg, text_arg, output_index = "hidden_states", "encoder_hidden_states", 1
    rope_arg = "image_rotary_emb"
    index_args = ("timestep_zero_index",)
    masks_text = True
    passthrough_args = ("encoder_hidden_states_mask", "temb")


class Hooks(ModelHooks):
    references_follow = True
    # Some ControlNets work as patches, which read the image's tokens between two blocks.
    between = ("double_block",)

    def block_groups(self, model: QwenImageTransformer2DModel) -> tuple[BlockGroup, ...]:
        size, width = model.patch_size, model.inner_dim
        return (BlockGroup("double", model.transformer_blocks, Signature(), COST, size, width, "input"),)
