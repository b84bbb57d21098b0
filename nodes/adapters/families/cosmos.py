"""Cosmos-Predict2 and Anima: blocks get tokens as (B, frames, rows, columns, C), and text as a separate argument."""

from __future__ import annotations

from typing import Any

from comfy.ldm.cosmos.predict2 import MiniTrainDIT
from torch import Tensor

from ..family import Block, BlockGroup, BlockSignature, ModelHooks

NAME = "Anima, Cosmos-Predict2"
MODEL = MiniTrainDIT
DERIVED = ("Anima",)
# Cost of a block with self-attention and with attention to the text.
COST = Block(14, 57, (1, 3, 3))


def fits(model: MiniTrainDIT) -> bool:
    """Whether each token covers a single frame. Other models of this class are not supported."""
    return int(model.patch_temporal) == 1


class Signature(BlockSignature):
    """All tokens are (B, frames, rows, columns, C). Merged tokens are (B, frames, 1, D / frames, C)."""

    positional_args = ("x_B_T_H_W_D", "emb_B_T_D", "crossattn_emb")
    tokens_arg = "x_B_T_H_W_D"
    rope_arg, rope_token_dim = "rope_emb_L_1_1_D", 1
    rope_split_half = True
    passthrough_args = ("emb_B_T_D", "crossattn_emb", "adaln_lora_B_T_3D")
    sides = (1, 1)  # rows and columns of a frame before merging

    def unpack(self, value: Any) -> Any:
        return value.flatten(1, 3) if value.ndim == 5 else value

    def pack(self, value: Any, tensor: Tensor) -> Any:
        if value.ndim != 5:
            return tensor
        frames, *sides = value.shape[1:4]
        tokens = tensor.shape[1] // frames
        if tokens < sides[0] * sides[1]:
            self.sides, sides = tuple(sides), [1, tokens]
        elif tokens > sides[0] * sides[1]:
            sides = self.sides
        return tensor.unflatten(1, (frames, *sides))


class Hooks(ModelHooks):
    inside = ("attn1_patch", "attn2_patch", "mlp_patch")
    takes_frames = True

    def block_groups(self, model: Any) -> tuple[BlockGroup, ...]:
        return (BlockGroup("double", model.blocks, Signature(), COST, model.patch_spatial, model.model_channels),)
