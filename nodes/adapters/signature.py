"""Describe a block's arguments: which one holds the tokens, where image tokens lie in it, and what else is per token.

An argument that a signature does not list may be per token, too. If a block gets such an argument, the block runs
unmerged, and the report names the argument.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...toma_core.reasons import Message, Reason
from ...toma_core.windows import Grid
from .attention_override import OVERRIDE, KVOverride

CallArguments = dict[str, Any]  # arguments of one call of a block, by name
Options = Mapping[str, Any]  # ComfyUI's `transformer_options`


@dataclass(frozen=True)
class TokenReduction:
    """How merging shortened a stream of tokens."""

    image_start: int  # number of tokens before the image
    lengths: tuple[tuple[int, int], ...]  # (N, D) of the image and of each reference that follows it

    @property
    def removed(self) -> int:
        return sum([tokens - left for tokens, left in self.lengths])

    def shift(self, index: int) -> int:
        """Return what an index into the tokens becomes after merging. The index must not lie inside an image."""
        end, removed = self.image_start, 0
        for tokens, left in self.lengths:
            end += tokens
            if index >= end:
                removed += tokens - left
        return index - removed


class BlockSignature:
    """How blocks of one kind take and return tokens, [before | image | after] of (B, T, C)."""

    positional_args: tuple[str, ...] = ("x",)  # arguments that may be passed by position, in order
    required_kwargs: tuple[str, ...] = ("transformer_options",)  # named arguments that a `forward` must take
    tokens_arg = "x"  # the argument that holds the tokens
    output_index: int | None = None  # index of the tokens among a block's results; None if there is a single result
    rope_arg = ""  # the argument with the rotary positions; empty if there is none
    rope_token_dim = 2  # the dimension of rotary positions along which tokens are counted
    rope_split_half = False  # whether rotation pairs channel i of a head with i + d / 2, not with its neighbour
    # Whether the image comes last in the positions or, without `rope_arg`, in the tokens. Only references that
    # ComfyUI's options name may follow the image.
    image_last = False
    row_args: tuple[str, ...] = ()  # arguments besides `rope_arg` with a row per token, along `rope_token_dim`
    # Arguments that hold indices of tokens: one index, or a list of (start, stop, ...).
    index_args: tuple[str, ...] = ()
    text_arg = ""  # the argument with text tokens; blocks attend to these and to the tokens of `tokens_arg`
    text_first = True  # whether text comes before the image in positions and in attention
    masks_text = False  # whether attention has a mask of keys that never hides the image
    mask_arg = ""  # the argument with a mask of all keys, if blocks take the mask unchanged
    attention_arg = ""  # the argument with the function that computes attention, if blocks get one
    passthrough_args: tuple[str, ...] = ()  # known arguments that are not per token
    mutates_input = False  # whether blocks write into the tokens that they get
    clamps_fp16 = False  # whether blocks clamp fp16, so that merging clamps too; elsewhere clamping would hide NaN

    def call_args(self, args: tuple[Any, ...], kwargs: CallArguments) -> CallArguments:
        """Return the arguments of a call by name, positional ones first. Positional arguments beyond `positional_args`
        get names by which `obstacle` reports them, because they may be per token."""
        more = [f"argument {n + 1}" for n in range(len(self.positional_args), len(args))]
        return {**dict(zip((*self.positional_args, *more), args, strict=False)), **kwargs}

    def unpack(self, value: Any) -> Any:
        """Return the tensor in an argument or a result, (B, T, C) tokens or rows. Some models wrap such tensors."""
        return value

    def pack(self, value: Any, tensor: Tensor) -> Any:
        """Return an argument or a result with `tensor` in place of the one that `unpack` returns."""
        return tensor

    def tokens(self, call_args: CallArguments) -> Tensor:
        return self.unpack(call_args[self.tokens_arg])

    def rows(self, call_args: CallArguments) -> dict[str, Any]:
        """Return by argument the tensors with a row for each token: rotary positions, and `row_args` if they are
        passed."""
        names = (self.rope_arg, *self.row_args)
        return {name: self.unpack(call_args[name]) for name in names if call_args.get(name) is not None}

    def replaced(self, call_args: CallArguments, x: Tensor, rows: Mapping[str, Tensor]) -> CallArguments:
        """Return the arguments with x in place of the tokens, and `rows`, by argument, in place of the rows of all
        tokens."""
        changed = {self.tokens_arg: x, **rows}
        return {**call_args, **{name: self.pack(call_args[name], tensor) for name, tensor in changed.items()}}

    def with_attention(self, call_args: CallArguments, override: KVOverride) -> CallArguments:
        """Return the arguments of a block's call, changed so that the block's attention calls this override. If ComfyUI
        passes the block neither options nor an attention function (`attention_arg`), nothing is changed."""
        if self.attention_arg:
            return {**call_args, self.attention_arg: partial(override, call_args[self.attention_arg])}
        options = call_args.get("transformer_options")
        if options is None:
            return call_args
        override.then = options.get(OVERRIDE)
        return {**call_args, "transformer_options": {**options, OVERRIDE: override}}

    def output(self, out: Any) -> Tensor:
        return self.unpack(out if self.output_index is None else out[self.output_index])

    def with_output(self, out: Any, x: Tensor) -> Any:
        if self.output_index is None:
            return self.pack(out, x)
        return tuple([x if n == self.output_index else part for n, part in enumerate(out)])

    def has_image(self, call_args: CallArguments) -> bool:
        """Whether a call has tokens of the image. Other calls run unchanged, without a decision on merging."""
        return True

    def release(self) -> None:
        """At the end of an evaluation, drop what the signature noted during the evaluation."""

    def image_start(self, call_args: CallArguments, image: int) -> int | None:
        """Return how many tokens precede the image in a chain's first block; None if unknown. image: N."""
        if not self.image_last:
            return 0
        rows: Any = self.tokens(call_args)
        axis, offset = 1, 0
        if self.rope_arg:
            rows, axis, offset = call_args.get(self.rope_arg), self.rope_token_dim, self.attention_offset(call_args)
        if not isinstance(rows, Tensor) or rows.ndim <= axis:  # as in an older ComfyUI with several tables of positions
            return None
        before = rows.shape[axis] - offset - image - self.reference_tokens(call_args)
        return before if before >= 0 else None

    def _text(self, call_args: CallArguments) -> int:
        return int(call_args[self.text_arg].shape[1]) if self.text_arg else 0

    def attention_offset(self, call_args: CallArguments) -> int:
        """Return how many text tokens precede the tokens of `tokens_arg` in positions and attention."""
        return self._text(call_args) if self.text_first else 0

    def attention_spans(self, call_args: CallArguments, before: int) -> tuple[tuple[int, int, int], ...]:
        """Return for each of the block's attentions to the image, in order: how many keys lie before the image, how
        many keys there are, and how many queries. By the last two numbers, `KVOverride` recognizes the attentions."""
        tokens = self._text(call_args) + int(self.tokens(call_args).shape[1])
        return ((self.attention_offset(call_args) + before, tokens, tokens),)

    def grid(self, call_args: CallArguments, grid: Grid) -> Grid | None:
        """Return the grid of the image's tokens; None if unknown. grid: the latent's grid of tokens."""
        return grid

    def merged_args(self, call_args: CallArguments, reduction: TokenReduction) -> CallArguments:
        """Return those arguments that say where tokens lie, updated for merged tokens."""
        merged: CallArguments = {}
        removed = reduction.removed
        if (options := call_args.get("transformer_options")) is not None:
            merged["transformer_options"] = self.merged_options(options, reduction)
        for name in self.index_args:
            at = call_args.get(name)
            if isinstance(at, (list, tuple)):
                merged[name] = [(reduction.shift(start), reduction.shift(stop), *rest) for start, stop, *rest in at]
            elif at is not None:
                merged[name] = reduction.shift(at)
        if (mask := call_args.get(self.mask_arg)) is not None:
            merged[self.mask_arg] = mask[..., : mask.shape[-1] - removed] if self.text_first else mask[..., removed:]
        return merged

    def merged_options(self, options: Options, reduction: TokenReduction) -> Options:
        """Return the options, updated for merged tokens: another node's attention may index tokens by them."""
        changed = {}
        if image := options.get("img_slice"):  # the counts of text tokens and of all tokens
            changed["img_slice"] = [image[0], image[1] - reduction.removed]
        if len(reduction.lengths) > 1:
            changed["reference_image_num_tokens"] = [left for _, left in reduction.lengths[1:]]
        return {**options, **changed} if changed else options

    def mask_of_all(self, mask: Tensor, removed: int) -> Tensor | None:
        """Return a mask of all keys, made from a mask of merged keys. It hides none of the added keys. None if no mask
        can be made."""
        if not self.masks_text or mask.ndim < 3 or mask.shape[-2] != 1:  # unknown, such as a mask that differs by query
            return None
        return pad(mask, (0, removed) if self.text_first else (removed, 0), value=mask.dtype is torch.bool)

    def obstacle(self, call_args: CallArguments, before: int, image: int, references: int = 0) -> Message | None:
        """Return why the tokens of a chain's first block cannot be merged, None if they can. before: see `image_start`.
        image: N. references: how many reference tokens after the image are merged, too."""
        x, following = self.tokens(call_args), self.reference_tokens(call_args)
        total = before + image + following
        # Test equality first: so a graph guards on `total`, even if nodes that compile blocks drop guards on options.
        if x.ndim != 3 or (x.shape[1] != total and x.shape[1] < total) or (references and references != following):
            return Reason.TOKENS_CHANGED()
        known = ["transformer_options", *self.row_args, *self.index_args, *self.passthrough_args]
        known += [self.tokens_arg, self.rope_arg, self.text_arg, self.mask_arg, self.attention_arg]
        tied: list[Message | str] = [n for n, value in call_args.items() if value is not None and n not in known]
        least = self.attention_offset(call_args) + x.shape[1]
        for name, rows in self.rows(call_args).items():
            axes = 4 if name == self.rope_arg else 3
            if not isinstance(rows, Tensor) or rows.ndim < axes or rows.shape[self.rope_token_dim] < least:
                tied.append(Reason.ARGUMENT_SHAPE(argument=name))
        return Reason.ARGUMENT_IN_USE(arguments=tuple(tied)) if tied else None

    def reference_tokens(self, call_args: CallArguments) -> int:
        """Return how many tokens of reference images follow the image. If a node splits tokens among processes
        (raylight, xDiT), each process has fewer tokens. `obstacle` sees this from the number."""
        options: Mapping[str, Any] = call_args.get("transformer_options") or {}
        return sum(options.get("reference_image_num_tokens", ()))

    def clamp_fp16(self, x: Tensor) -> Tensor:
        """Clamp fp16 values as the model does: rounded weights of a merge may sum to more than 1, and give infinity."""
        clamps = self.clamps_fp16 and x.dtype is torch.float16
        return torch.nan_to_num(x, nan=0.0, posinf=65504, neginf=-65504) if clamps else x
