"""Wan 2.1 and 2.2: videos in one stream of [reference | video | further frames and context], text beside it.

Frames lie one behind another and keep as many tokens each, because modulation may go by frame (Wan 2.2 5B).
Cross-attention to the text is part of a block, and merged with it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from math import prod
from typing import Any

from comfy.ldm.wan.model import WanModel
from torch import nn

from ....toma_core import ToMAConfig
from ....toma_core.cost_model import WAN
from ....toma_core.reasons import Message, Reason
from ..blocks import BlockGroup
from ..family import Transformer
from ..layout import fewer_per_frame
from ..signature import BlockSignature, CallArguments, TokenReduction

NAME = "Wan 2.1 and 2.2"

# The kinds that are known, by their class, and after which of its blocks each does something with all tokens: VACE adds
# what its control blocks give, Animate looks at faces. Others tell sound or poses by place: they stay whole.
_BORDERS: Mapping[str, Callable[[Any], Collection[int]]] = {
    "WanModel": lambda model: (),
    "CameraWanModel": lambda model: (),
    "VaceWanModel": lambda model: frozenset(getattr(model, "vace_layers_mapping", ())),
    "AnimateWanModel": lambda model: range(0, len(model.blocks), 5),
}


def matches(diffusion_model: nn.Module) -> bool:
    """Whether this family knows the model."""
    return isinstance(diffusion_model, WanModel) and diffusion_model.patch_size[0] == 1


def kind_of(model: nn.Module) -> str:
    """The name of ComfyUI's own class of a model: another pack's, or PyTorch's for several cards, comes from it."""
    return next(kind.__name__ for kind in type(model).__mro__ if kind.__module__.startswith("comfy."))


class Signature(BlockSignature):
    """[reference | video | further frames and context]. The positions are of all of them."""

    required_kwargs = ("e", "freqs", "context", "transformer_options")
    rope_arg, rope_token_dim = "freqs", 1
    passthrough_args = ("e", "context", "context_img_len", "transformer_options")

    def __init__(self, has_reference: bool) -> None:
        """has_reference: whether the model can put a reference before the video."""
        self.has_reference = has_reference

    def image_start(self, call_args: CallArguments, image: int) -> int | None:
        if not self.has_reference:
            return 0
        # Nobody tells, but it is one frame. By the positions: they stay as they were while the tokens are merged.
        rope, told = call_args.get(self.rope_arg), _frames_told(call_args)
        ahead = -1 if rope is None or rope.ndim <= self.rope_token_dim else rope.shape[self.rope_token_dim] - prod(told)
        return ahead if ahead in (0, prod(told[1:])) else None

    def merged_args(self, call_args: CallArguments, reduction: TokenReduction) -> CallArguments:
        options = call_args.get("transformer_options")
        return {} if options is None else {"transformer_options": fewer_per_frame(options, *reduction.lengths[0])}

    def obstacle(self, call_args: CallArguments, image: int, references: int = 0) -> Message | None:
        return super().obstacle(call_args, image, references) or _modulation(call_args, image)


def _frames_told(call_args: CallArguments) -> tuple[int, ...]:
    """Frames, rows and columns of the video and the frames behind it, as ComfyUI tells them; empty if it does not."""
    return tuple((call_args.get("transformer_options") or {}).get("grid_sizes") or ())


def _modulation(call_args: CallArguments, image: int) -> Message | None:
    """Return why modulation would not fit fewer tokens, None if it would. It is (B, 6, C), or (B, T, 6, C) for T equal
    shares of all tokens, which have to be the frames of the video."""
    e, told = call_args.get("e"), _frames_told(call_args)
    if e is None or e.ndim < 4 or e.shape[1] == 1:
        return None
    frames = told[:1] == (e.shape[1],) and call_args["x"].shape[1] == image == prod(told)
    return None if frames else Reason.ARGUMENT_IN_USE(arguments="modulation by token")


class Hooks(Transformer):
    """All hooks of one Wan."""

    inside = ("attn1_patch", "attn2_patch")
    between = ("double_block",)
    takes_frames = True
    references_follow = False

    def block_groups(self, model: WanModel) -> tuple[BlockGroup, ...]:
        """All blocks; not those of VACE's control, which see the control video."""
        self.patch_size, self.width = model.patch_size[-1], model.dim
        self.kind = kind_of(model)
        work = replace(WAN, weights=6 + 2 * model.ffn_dim / model.dim)
        signature = Signature(getattr(model, "ref_conv", None) is not None)
        borders = _BORDERS[self.kind](model) if self.kind in _BORDERS else ()
        return (BlockGroup("double", model.blocks, signature, work, borders=borders),)

    def obstacle(self, transformer_options: Mapping[str, Any], config: ToMAConfig) -> Message | None:
        if self.kind not in _BORDERS:
            return Reason.UNKNOWN_MODEL(model=self.kind)
        return super().obstacle(transformer_options, config)
