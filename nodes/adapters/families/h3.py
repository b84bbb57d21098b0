"""MiniMax H3: one stream of [text | references | audio | video], without a batch.

Only the video, the last segment, is merged, every frame to the same number of tokens. Modulation goes by segments of
the stream.
"""

from __future__ import annotations

from typing import Any

from comfy.ldm.minimax.model import MiniMaxH3Model
from torch import Tensor

from ....toma_core.cost_model import H3
from ..family import Transformer
from ..signature import BlockGroup, BlockSignature

NAME = "MiniMax H3"
MODEL = MiniMaxH3Model


class Signature(BlockSignature):
    """[text | references | audio | video] of (T, C)."""

    positional_args = ("x", "t_emb", "mod_segments", "rope_freqs")
    rope_arg, rope_token_dim = "rope_freqs", 1
    image_last = True
    index_args = ("mod_segments",)
    passthrough_args = ("t_emb",)
    mutates_input = True

    def unpack(self, value: Any) -> Any:
        return value[None] if value.ndim == 2 else value

    def pack(self, value: Any, tensor: Tensor) -> Any:
        return tensor[0] if value.ndim == 2 else tensor


class Hooks(Transformer):
    takes_frames = True

    def block_groups(self, model: Any) -> tuple[BlockGroup, ...]:
        attention = model.blocks[0].attn
        self.patch_size, self.width = model.patch_size[-1], model.hidden_size
        self.keys_width = attention.heads * attention.head_dim
        return (BlockGroup("double", model.blocks, Signature(), H3),)
