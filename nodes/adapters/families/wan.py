"""Wan 2.1 and 2.2: videos in one stream of [references | video | further frames, context or pose], with text as a
separate argument. Cross-attention to the text is part of a block and runs on merged tokens, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from math import prod
from typing import Any

from comfy.ldm.wan.model import WanModel

from ..family import Block, BlockGroup, BlockSignature, Message, ModelHooks, Reason
from ..origin import kinds_of
from ..signature import CallArguments, Options, TokenReduction

NAME = "Wan 2.1 and 2.2"
MODEL = WanModel
COST = Block(11.4, 59, (1, 3, 3))  # of the 14B model; `Hooks` adapts it to the feed-forwards of other models

# Supported classes, each with the blocks after which the class reads all tokens. After these blocks, VACE adds the
# output of its control blocks, Animate attends to faces, and WanDancer attends to music. Three classes are not
# supported. HuMo attends to sound frame by frame and has its reference as an additional frame. S2V changes the noise
# level inside the reference. Causal Forcing has its own KV cache.
_BORDERS: Mapping[str, Callable[[Any], Collection[int]]] = {
    "WanModel": lambda model: (),
    "CameraWanModel": lambda model: (),
    "VaceWanModel": lambda model: frozenset(getattr(model, "vace_layers_mapping", ())),
    "AnimateWanModel": lambda model: range(0, len(model.blocks), 5),
    "WanDancerModel": lambda model: frozenset(model.music_injector.injected_block_id),
    "SCAILWanModel": lambda model: (),
    "SCAIL2WanModel": lambda model: (),
}
DERIVED = tuple(_BORDERS)
# Classes whose references are the first frames of `grid_sizes` in ComfyUI's options.
_LEADING_FRAMES = ("SCAILWanModel", "SCAIL2WanModel")


def fits(model: WanModel) -> bool:
    """Whether each token covers a single frame. Other models of this class are not supported."""
    return int(model.patch_size[0]) == 1


class Signature(BlockSignature):
    """Positions cover the entire stream."""

    required_kwargs = ("e", "freqs", "context", "transformer_options")
    rope_arg, rope_token_dim = "freqs", 1
    image_last = True
    passthrough_args = ("e", "context", "context_img_len")

    def __init__(self, has_reference: bool, leading_frames: bool = False) -> None:
        self.has_reference = has_reference  # whether the model can put a reference before the video
        self.leading_frames = leading_frames  # whether references are frames of the video's grid

    def image_start(self, call_args: CallArguments, image: int) -> int | None:
        grid = _grid_sizes(call_args)
        if self.leading_frames:
            ahead = prod(grid) - image if grid else -1
            return ahead if ahead >= 0 and ahead % prod(grid[1:]) == 0 else None
        if not self.has_reference:
            return 0
        reference = super().image_start(call_args, prod(grid))
        return reference if reference in (0, prod(grid[1:])) else None  # a reference is one frame

    def merged_options(self, options: Options, reduction: TokenReduction) -> Options:
        # `grid_sizes` becomes (frames, 1, D / frames), or (1, 1, all) if the grid has more frames than the video.
        grid, ((image, left),) = options.get("grid_sizes"), reduction.lengths
        if grid is None:
            return options
        tokens = prod(grid)
        frames = grid[0] if tokens == image else 1
        return {**options, "grid_sizes": (frames, 1, (tokens - image + left) // frames)}

    def obstacle(self, call_args: CallArguments, before: int, image: int, references: int = 0) -> Message | None:
        # Modulation is (B, 6, C), or (B, T, 6, C) with a row for each of T equal shares of all tokens. If T > 1, each
        # share must be a frame of the video.
        e = call_args.get("e")
        grid = _grid_sizes(call_args)
        reason = super().obstacle(call_args, before, image, references)
        shares = 1 if e is None or e.ndim < 4 else e.shape[1]
        fits = shares == 1 or (grid[:1] == (shares,) and call_args["x"].shape[1] == image == prod(grid))
        return reason or (None if fits else Reason.OWN_MODULATION())


def _grid_sizes(call_args: CallArguments) -> tuple[int, ...]:
    """Return (frames, rows, columns) from ComfyUI's options, () if unknown. The grid may have more frames than the
    video."""
    return tuple((call_args.get("transformer_options") or {}).get("grid_sizes") or ())


class Hooks(ModelHooks):
    inside = ("attn1_patch", "attn2_patch")
    between = ("double_block",)
    takes_frames = True

    def block_groups(self, model: WanModel) -> tuple[BlockGroup, ...]:
        # `model.blocks` has all blocks except VACE's control blocks, which see the control video.
        kind = kinds_of(model)[0]
        work = replace(COST, weights=6 + 2 * model.ffn_dim / model.dim)
        signature = Signature(getattr(model, "ref_conv", None) is not None, kind in _LEADING_FRAMES)
        size, borders = model.patch_size[-1], _BORDERS[kind](model)
        return (BlockGroup("double", model.blocks, signature, work, size, model.dim, borders=borders),)
