"""A block's port: which of its arguments carries the tokens, where in it the image lies, and what else goes by token.

What no port mentions and is not None goes by token, as far as anybody knows: the block then runs whole, and the report
names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...toma_core.reasons import Message, Reason
from ...toma_core.windows import Grid
from .layout import fewer_tokens

# What a block is given, by name.
CallArguments = dict[str, Any]


@dataclass(frozen=True)
class TokenReduction:
    """Where a stream of tokens became shorter. lengths: (N, D) of the image and of each reference that follows it, from
    `before` on."""

    image_start: int
    lengths: tuple[tuple[int, int], ...]

    @property
    def removed(self) -> int:
        """How many tokens fewer there are."""
        return sum([tokens - kept for tokens, kept in self.lengths])

    @property
    def references(self) -> list[int]:
        """How many tokens are left of each reference that was merged."""
        return [kept for _, kept in self.lengths[1:]]

    def shift(self, index: int) -> int:
        """Where a place between two images, or outside of them, is then."""
        end, removed = self.image_start, 0
        for tokens, kept in self.lengths:
            end += tokens
            if index >= end:
                removed += tokens - kept
        return index - removed


class BlockSignature:
    """How blocks of one kind take [before | image | after] tokens of (B, T, C), and give them back.

    places: the arguments that may come by place, in their order. needs: those by name that a `forward` must take.
    tokens: the argument that carries the tokens. output: which of the block's results they are, None if the only one.
    rows, axis: the argument with the rotary positions, and which axis of it counts tokens; empty where there are none.
    harmless: further arguments that do not go by token. writes: blocks add into the tokens that they are given.
    bounded: the model cuts off fp16 at its limits in its blocks, so merging has to do the same. In others NaN would
    become an image.
    """

    positional_args: tuple[str, ...] = ("x",)
    required_kwargs: tuple[str, ...] = ("transformer_options",)
    tokens_arg = "x"
    output_index: int | None = None
    rope_arg = ""
    rope_token_dim = 2
    passthrough_args: tuple[str, ...] = ("transformer_options",)
    mutates_input = False
    clamps_fp16 = False

    def call_args(self, args: tuple[Any, ...], kwargs: CallArguments) -> CallArguments:
        """A call's arguments by name, those by place first. More of them than are known may go by token."""
        names = self.positional_args
        if len(args) > len(names):
            names = (*names, *[f"argument {n + 1}" for n in range(len(names), len(args))])
        return {**dict(zip(names, args, strict=False)), **kwargs}

    def observe(self, call_args: CallArguments) -> None:
        """Outside of graphs, before all else: keep what another port of the model has to know."""

    def release(self) -> None:
        """Forget what was noted: the evaluation is over."""

    def image_start(self, call_args: CallArguments, image: int) -> int | None:
        """How many tokens come before the image, of so many tokens, in the same argument; None if nobody told."""
        return 0

    def attention_offset(self, call_args: CallArguments) -> int:
        """How many tokens of another argument come before those of this one, in positions and in attention."""
        return 0

    def attention_spans(self, call_args: CallArguments, before: int) -> tuple[tuple[int, int], ...]:
        """What each self-attention of the block is asked about, one after another: how many tokens come before the
        image in it, and how many there are in all. Whatever attends after these is another's, as to the text."""
        above = self.attention_offset(call_args)
        return ((above + before, above + int(call_args[self.tokens_arg].shape[1])),)

    def grid(self, call_args: CallArguments, grid: Grid) -> Grid | None:
        """The grid of the image's tokens. grid: what the latent makes. None if nobody told."""
        return grid

    def merged_args(self, call_args: CallArguments, reduction: TokenReduction) -> CallArguments:
        """The arguments that say where tokens lie, as they lie after merging."""
        options = call_args.get("transformer_options")
        return (
            {}
            if options is None
            else {"transformer_options": fewer_tokens(options, reduction.removed, reduction.references)}
        )

    def merged_mask(self, mask: Tensor, removed: int) -> Tensor | None:
        """The mask of a block's attention where it looks at so many keys fewer, or more if negative; None where nobody
        can tell which."""
        return None

    def obstacle(self, call_args: CallArguments, image: int, references: int = 0) -> Message | None:
        """Return why a block's tokens cannot be merged, None if they can. image: N. references: of
        the reference images after it, if they are merged too."""
        x, before = call_args[self.tokens_arg], self.image_start(call_args, image)
        if before is None:
            return Reason.UNKNOWN_IMAGE_POSITION()
        told = self.reference_tokens(call_args)
        if x.ndim != 3 or x.shape[1] < before + image + told or (references and references != told):
            return Reason.TOKENS_CHANGED()
        known = (self.tokens_arg, self.rope_arg, *self.passthrough_args)
        tied: list[Message | str] = [
            name for name, value in call_args.items() if value is not None and name not in known
        ]
        if self.rope_arg and not self._fits(
            call_args.get(self.rope_arg), self.attention_offset(call_args) + x.shape[1]
        ):
            tied.append(Reason.ARGUMENT_SHAPE(argument=self.rope_arg))
        return Reason.ARGUMENT_IN_USE(arguments=tuple(tied)) if tied else None

    def reference_tokens(self, call_args: CallArguments) -> int:
        """Tokens of reference images that follow the image. Where there are fewer, as in one of several processes that
        share them (raylight, xDiT), its first tokens would pass for the image."""
        told: Mapping[str, Any] = call_args.get("transformer_options") or {}
        return sum(told.get("reference_image_num_tokens", ()))

    def _fits(self, rope: Any, tokens: int) -> bool:
        """Whether these are the positions of so many tokens at least, or none."""
        return rope is None or (
            isinstance(rope, Tensor) and rope.ndim > 3 and rope.shape[self.rope_token_dim] >= tokens
        )

    def clamp_fp16(self, x: Tensor) -> Tensor:
        """fp16 cut off as the model does it in its blocks: weights sum to 1 up to rounding only, and a token that
        sits at the limit would become infinite. Other dtypes as they are."""
        if not self.clamps_fp16 or x.dtype is not torch.float16:
            return x
        return torch.nan_to_num(x, nan=0.0, posinf=65504, neginf=-65504)


def image_start_of(call_args: CallArguments) -> int | None:
    """Where the image begins in a stream of [text | image | references], as ComfyUI tells it; None if it does not."""
    place = (call_args.get("transformer_options") or {}).get("img_slice")
    return None if place is None else int(place[0])


def shifted_slices(call_args: CallArguments, name: str, reduction: TokenReduction) -> CallArguments:
    """The argument of this name, a list of (start, stop, ...) places; nothing where it is not given."""
    pieces = call_args.get(name)
    if pieces is None:
        return {}
    return {name: [tuple([reduction.shift(at) if n < 2 else at for n, at in enumerate(p)]) for p in pieces]}


def shifted_index(call_args: CallArguments, name: str, reduction: TokenReduction) -> CallArguments:
    """The argument of this name, a place; nothing where it is not given."""
    place = call_args.get(name)
    return {} if place is None else {name: reduction.shift(place)}


def text_masked(mask: Tensor, removed: int) -> Tensor | None:
    """A mask of the text, after which every key is looked at, for so many keys fewer, or more if negative; None if it
    goes by query too."""
    if mask.ndim < 3 or mask.shape[-2] != 1:
        return None
    return pad(mask, (0, -removed), value=mask.dtype is torch.bool)
