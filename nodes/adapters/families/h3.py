"""MiniMax H3: one stream of [text | references | audio | video], (T, C) without a batch.

Only the video, the last segment, is merged. Modulation is a list of segments of the stream, (start, stop, row): row is
an index into `t_emb`. If the latent has a mask, as for inpainting, row has an index per token. Merged blocks then get
the indices of the destinations.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from comfy.ldm.minimax.model import MiniMaxH3Model
from torch import Tensor

from ..family import Block, BlockGroup, BlockSignature, Message, ModelHooks, Reason
from ..signature import CallArguments

NAME = "MiniMax H3"
MODEL = MiniMaxH3Model
# Attention has a third more channels than the tokens. The cost counts this as additional weights.
COST = Block(15, 67, (1, 5, 5))
_SEGMENTS = "mod_segments"


class Signature(BlockSignature):
    positional_args = ("x", "t_emb", "mod_segments", "rope_freqs")
    rope_arg, rope_token_dim = "rope_freqs", 1
    rope_split_half = True
    image_last = True
    row_args = index_args = (_SEGMENTS,)
    passthrough_args = ("t_emb",)
    mutates_input = True
    # The segments of an evaluation, and the index into `t_emb` for each token of the stream, (1, T, 1).
    _row_by_token: tuple[Any, Tensor] | None = None

    def obstacle(self, call_args: CallArguments, before: int, image: int, references: int = 0) -> Message | None:
        if not _is_known(call_args[_SEGMENTS], before, self.tokens(call_args).shape[1]):
            return Reason.ARGUMENT_IN_USE(arguments="modulation by token")
        return super().obstacle(call_args, before, image, references)

    def rows(self, call_args: CallArguments) -> dict[str, Any]:
        rows = super().rows(call_args)
        return {name: each for name, each in rows.items() if name != _SEGMENTS or isinstance(each, Tensor)}

    def release(self) -> None:
        self._row_by_token = None

    def unpack(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value[None] if value.ndim == 2 else value
        if all(not isinstance(row, Tensor) for _, _, row in value):
            return value
        # All blocks get the same list. Make one tensor from it, so that blocks also share the merged rows.
        if self._row_by_token is None or self._row_by_token[0] is not value:
            device = next(row.device for _, _, row in value if isinstance(row, Tensor))
            parts = [
                row.expand(stop - start) if isinstance(row, Tensor) else torch.full((stop - start,), row, device=device)
                for start, stop, row in value
            ]
            self._row_by_token = value, torch.cat(parts)[None, :, None]
        return self._row_by_token[1]

    def pack(self, value: Any, tensor: Tensor) -> Any:
        if isinstance(value, Tensor):
            return tensor[0] if value.ndim == 2 else tensor
        return [(0, value[-1][1], tensor[0, :, 0])]


def _is_known(segments: Any, start: int, length: int) -> bool:
    """Whether segments cover a stream of this length, in which the video begins at `start`. Each segment must have one
    row, or a row per token. Without rows per token, the video must be one segment."""
    if not isinstance(segments, Sequence) or any(not isinstance(each, Sequence) or len(each) != 3 for each in segments):
        return False
    borders = [0, *[stop for _, stop, _ in segments]]
    rows = [(stop - begin, row) for begin, stop, row in segments if isinstance(row, Tensor)]
    return (
        [begin for begin, _, _ in segments] == borders[:-1]
        and borders[-1] == length
        and all(a <= b for a, b in pairwise(borders))
        and all(not r.is_floating_point() and r.ndim < 2 and r.numel() in (1, n) for n, r in rows)
        and (bool(rows) or borders[-2] == start)
    )


class Hooks(ModelHooks):
    takes_frames = True

    def block_groups(self, model: Any) -> tuple[BlockGroup, ...]:
        attention = model.blocks[0].attn
        size, keys = model.patch_size[-1], attention.heads * attention.head_dim
        return (BlockGroup("double", model.blocks, Signature(), COST, size, model.hidden_size, keys_width=keys),)
