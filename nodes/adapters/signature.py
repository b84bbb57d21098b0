"""Describe a block's arguments: which carries the tokens, where in it the image lies, and which others are per token.

Arguments that are not listed here may be per token; the block then runs unmerged and the report names them.
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

# A call's arguments by name.
CallArguments = dict[str, Any]


@dataclass(frozen=True)
class TokenReduction:
    """How a stream of tokens became shorter.

    Attributes:
        image_start: Tokens before the image.
        lengths: (N, D) of the image and of each reference that follows it.
    """

    image_start: int
    lengths: tuple[tuple[int, int], ...]

    @property
    def removed(self) -> int:
        """Tokens that were merged away."""
        return sum([tokens - left for tokens, left in self.lengths])

    @property
    def references(self) -> list[int]:
        """D of each reference that is merged."""
        return [left for _, left in self.lengths[1:]]

    def shift(self, index: int) -> int:
        """Return an index between two images, or outside of them, as it is after the reduction."""
        end, removed = self.image_start, 0
        for tokens, left in self.lengths:
            end += tokens
            if index >= end:
                removed += tokens - left
        return index - removed


class BlockSignature:
    """How blocks of one kind take [before | image | after] tokens of (B, T, C), and return them.

    Attributes:
        positional_args: Arguments that may come by position, in order.
        required_kwargs: Arguments by name that a `forward` must take.
        tokens_arg: The argument with the tokens.
        output_index: Which of the results they are; None if there is one.
        rope_arg: The argument with the rotary positions; empty without.
        rope_token_dim: Its dimension that counts tokens.
        row_args: Further arguments with a row for each token, in the same dimension.
        passthrough_args: Further arguments that are not per token.
        mutates_input: Whether blocks add into the tokens that they are given.
        clamps_fp16: Whether the model clamps fp16 inside its blocks: merging then does so too, else NaN becomes an
            image.
    """

    positional_args: tuple[str, ...] = ("x",)
    required_kwargs: tuple[str, ...] = ("transformer_options",)
    tokens_arg = "x"
    output_index: int | None = None
    rope_arg = ""
    rope_token_dim = 2
    row_args: tuple[str, ...] = ()
    passthrough_args: tuple[str, ...] = ("transformer_options",)
    mutates_input = False
    clamps_fp16 = False

    def call_args(self, args: tuple[Any, ...], kwargs: CallArguments) -> CallArguments:
        """Return a call's arguments by name, positional ones first. More positional ones than are known may be per
        token."""
        names = self.positional_args
        if len(args) > len(names):
            names = (*names, *[f"argument {n + 1}" for n in range(len(names), len(args))])
        return {**dict(zip(names, args, strict=False)), **kwargs}

    def unpack(self, value: Any) -> Any:
        """Return the tensor of an argument or a result, for models that wrap it: (B, T, C) tokens, or rows."""
        return value

    def pack(self, value: Any, tensor: Tensor) -> Any:
        """Return an argument or a result with another tensor in it, see `unpack`."""
        return tensor

    def tokens(self, call_args: CallArguments) -> Tensor:
        """Return the (B, T, C) tokens of a call."""
        tokens: Tensor = self.unpack(call_args[self.tokens_arg])
        return tokens

    def rows(self, call_args: CallArguments) -> dict[str, Any]:
        """Return by name the tensors with a row for each token: rotary positions, and others where they are given."""
        names = (self.rope_arg, *self.row_args)
        return {name: self.unpack(call_args[name]) for name in names if call_args.get(name) is not None}

    def replaced(self, call_args: CallArguments, x: Tensor, rows: Mapping[str, Tensor]) -> CallArguments:
        """Return the arguments with other tokens and other rows."""
        changed = {self.tokens_arg: x, **rows}
        return {**call_args, **{name: self.pack(call_args[name], tensor) for name, tensor in changed.items()}}

    def output(self, out: Any) -> Tensor:
        """Return the (B, T, C) tokens of a block's result."""
        tokens: Tensor = self.unpack(out if self.output_index is None else out[self.output_index])
        return tokens

    def with_output(self, out: Any, x: Tensor) -> Any:
        """Return a block's result with x in place of its tokens."""
        if self.output_index is None:
            return self.pack(out, x)
        return tuple([x if n == self.output_index else part for n, part in enumerate(out)])

    def observe(self, call_args: CallArguments) -> None:
        """Note what another signature of the model needs. Called outside of graphs, before all else."""

    def release(self) -> None:
        """Drop what was noted: the evaluation is over."""

    def image_start(self, call_args: CallArguments, image: int) -> int | None:
        """Return how many tokens come before the image, of N tokens, in the same argument; None if unknown."""
        return 0

    def attention_offset(self, call_args: CallArguments) -> int:
        """Return how many tokens of another argument come first in positions and in attention."""
        return 0

    def attention_spans(self, call_args: CallArguments, before: int) -> tuple[tuple[int, ...], ...]:
        """Return for each attention to the image, in order, how many tokens come before the image in it, how many
        there are in all, and how many queries if those are of other tokens. Attentions between have other numbers."""
        above = self.attention_offset(call_args)
        return ((above + before, above + int(self.tokens(call_args).shape[1])),)

    def grid(self, call_args: CallArguments, grid: Grid) -> Grid | None:
        """Return the grid of the image's tokens; None if unknown. grid: as the latent has it."""
        return grid

    def merged_args(self, call_args: CallArguments, reduction: TokenReduction) -> CallArguments:
        """Return the arguments that locate tokens, as they are after merging."""
        options = call_args.get("transformer_options")
        return (
            {}
            if options is None
            else {"transformer_options": fewer_tokens(options, reduction.removed, reduction.references)}
        )

    def merged_mask(self, mask: Tensor, removed: int) -> Tensor | None:
        """Return the mask of a block's attention for fewer keys, or for more if `removed` is negative; None if
        unknown."""
        return None

    def obstacle(self, call_args: CallArguments, image: int, references: int = 0) -> Message | None:
        """Return why a block's tokens cannot be merged, None if they can. image: N. references: tokens of the reference
        images after it that are merged too."""
        x, before = self.tokens(call_args), self.image_start(call_args, image)
        if before is None:
            return Reason.UNKNOWN_IMAGE_POSITION()
        following = self.reference_tokens(call_args)
        if x.ndim != 3 or x.shape[1] < before + image + following or (references and references != following):
            return Reason.TOKENS_CHANGED()
        known = (self.tokens_arg, self.rope_arg, *self.row_args, *self.passthrough_args)
        tied: list[Message | str] = [
            name for name, value in call_args.items() if value is not None and name not in known
        ]
        least = self.attention_offset(call_args) + x.shape[1]
        for name, rows in self.rows(call_args).items():
            if not self._fits(rows, least, 4 if name == self.rope_arg else 3):
                tied.append(Reason.ARGUMENT_SHAPE(argument=name))
        return Reason.ARGUMENT_IN_USE(arguments=tuple(tied)) if tied else None

    def reference_tokens(self, call_args: CallArguments) -> int:
        """Return how many tokens of reference images follow the image. With fewer, as in one of several processes that
        share them (raylight, xDiT), its first tokens would be taken for the image."""
        options: Mapping[str, Any] = call_args.get("transformer_options") or {}
        return sum(options.get("reference_image_num_tokens", ()))

    def _fits(self, rows: Any, tokens: int, axes: int) -> bool:
        """Whether these are rows of at least `tokens` tokens, with at least so many axes."""
        return isinstance(rows, Tensor) and rows.ndim >= axes and rows.shape[self.rope_token_dim] >= tokens

    def clamp_fp16(self, x: Tensor) -> Tensor:
        """Clamp fp16 as the model does inside its blocks: weights sum to 1 up to rounding only, and a token at the
        limit would become infinite. Other dtypes are returned as they are."""
        if not self.clamps_fp16 or x.dtype is not torch.float16:
            return x
        return torch.nan_to_num(x, nan=0.0, posinf=65504, neginf=-65504)


def image_start_of(call_args: CallArguments) -> int | None:
    """Return where the image begins in [text | image | references], as ComfyUI's options have it; None if they do
    not."""
    image = (call_args.get("transformer_options") or {}).get("img_slice")
    return None if image is None else int(image[0])


def shifted_slices(call_args: CallArguments, name: str, reduction: TokenReduction) -> CallArguments:
    """Return the argument of this name, a list of (start, stop, ...), after the reduction; nothing without it."""
    slices = call_args.get(name)
    if slices is None:
        return {}
    return {name: [tuple([reduction.shift(at) if n < 2 else at for n, at in enumerate(each)]) for each in slices]}


def shifted_index(call_args: CallArguments, name: str, reduction: TokenReduction) -> CallArguments:
    """Return the argument of this name, an index, after the reduction; nothing without it."""
    index = call_args.get(name)
    return {} if index is None else {name: reduction.shift(index)}


def text_masked(mask: Tensor, removed: int) -> Tensor | None:
    """Return a mask of the text for fewer keys after it, all of which are attended to, or more if `removed` is
    negative; None if the mask is per query."""
    if mask.ndim < 3 or mask.shape[-2] != 1:
        return None
    return pad(mask, (0, -removed), value=mask.dtype is torch.bool)
