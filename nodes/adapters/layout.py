"""What others are told while merged tokens run: where these lie, not where all of them would.

ComfyUI says in `transformer_options` how a block's tokens lie, and whoever computes attention in its place
(`optimized_attention_override`) may index by that. Blocks on merged tokens get a copy that is true of them: everything
else in it is the same objects, and the caller's own dict stays as it is. In ComfyUI 0.16.3 to 0.30.0 two entries
describe tokens that merging takes away, and a third where references are merged too. `original_shape` is the latent's,
and double blocks find `img_slice` for their patches from what arrives.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

Options = dict[str, Any]


def without_grid(options: Options, tokens: int, kept: int) -> Options:
    """For a UNet's block on `kept` of `tokens`: `activations_shape` (B, C, H, W) becomes (B, C, 1, kept), as merged
    tokens lie on no grid. `options` itself where nothing is merged or nothing was said."""
    shape = options.get("activations_shape")
    return {**options, "activations_shape": [*shape[:-2], 1, kept]} if shape and kept != tokens else options


def fewer_per_frame(options: Options, tokens: int, kept: int) -> Options:
    """For a video's block on `kept` of `tokens`, as many of each frame: `grid_sizes` (frames, rows, columns) becomes
    (frames, 1, those left of each), or (1, 1, all) where further frames follow. `options` itself where nothing was
    said."""
    told = options.get("grid_sizes")
    if told is None:
        return options
    frames = told[0] if prod(told) == tokens else 1
    return {**options, "grid_sizes": (frames, 1, (prod(told) - tokens + kept) // frames)}


def fewer_tokens(options: Options, gone: int, references: Sequence[int] = ()) -> Options:
    """For a transformer's block on so many tokens fewer: `img_slice` [text, all] ends so many earlier, and
    `reference_image_num_tokens` are those left, where references are merged too. `options` itself where nothing is
    merged or nothing was said."""
    told, place = {}, options.get("img_slice")
    if place and gone:
        told["img_slice"] = [place[0], place[1] - gone]
    if references and "reference_image_num_tokens" in options:
        told["reference_image_num_tokens"] = list(references)
    return {**options, **told} if told else options
