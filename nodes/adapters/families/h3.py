"""MiniMax H3: one stream of [text | references | audio | video], without a batch.

Only the video, the last segment, is merged, every frame to the same number of tokens. Modulation goes by segments of
the stream.
"""

from __future__ import annotations

from typing import Any

from comfy.ldm.minimax.model import MiniMaxH3Model
from torch import Tensor

from ....toma_core.cost_model import H3
from ..blocks import BlockGroup
from ..family import Transformer
from ..signature import BlockSignature, CallArguments, TokenReduction, shifted_slices

NAME = "MiniMax H3"
MODEL = MiniMaxH3Model


class Signature(BlockSignature):
    """[text | references | audio | video] of (T, C)."""

    positional_args = ("x", "t_emb", "mod_segments", "rope_freqs")
    rope_arg, rope_token_dim = "rope_freqs", 1
    passthrough_args = ("t_emb", "mod_segments", "transformer_options")
    mutates_input = True

    def unpack(self, value: Any) -> Any:
        return value[None] if value.ndim == 2 else value

    def pack(self, value: Any, tensor: Tensor) -> Any:
        return tensor[0] if value.ndim == 2 else tensor

    def image_start(self, call_args: CallArguments, image: int) -> int | None:
        # Positions stay as they were while the tokens are merged.
        rope = call_args.get(self.rope_arg)
        before = -1 if rope is None or rope.ndim < 4 else int(rope.shape[self.rope_token_dim]) - image
        return before if before >= 0 else None

    def merged_args(self, call_args: CallArguments, reduction: TokenReduction) -> CallArguments:
        merged = super().merged_args(call_args, reduction)
        return {**merged, **shifted_slices(call_args, "mod_segments", reduction)}


class Hooks(Transformer):
    """The hooks of one MiniMax H3."""

    takes_frames = True
    references_follow = False

    def block_groups(self, model: Any) -> tuple[BlockGroup, ...]:
        """Return all blocks but those that refine the text."""
        attention = model.blocks[0].attn
        self.patch_size, self.width = model.patch_size[-1], model.hidden_size
        self.keys_width = attention.heads * attention.head_dim
        return (BlockGroup("double", model.blocks, Signature(), H3),)
