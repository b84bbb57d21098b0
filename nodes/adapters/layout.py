"""Describe merged tokens in `transformer_options`: where they lie, not where all tokens would.

Another node that computes attention (`optimized_attention_override`) may index by these options. Blocks on merged
tokens get a copy that is true of them; all other entries are the same objects, and the caller's dict is not changed. In
ComfyUI 0.16.3 to 0.30.0 two entries describe tokens that merging removes, and a third where references are merged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

Options = Mapping[str, Any]


def without_grid(options: Options, tokens: int, destinations: int) -> Options:
    """Return options for a UNet's block on merged tokens: `activations_shape` (B, C, H, W) becomes (B, C, 1, D), as
    they lie on no grid. The same dict where nothing is merged."""
    shape = options.get("activations_shape")
    return (
        {**options, "activations_shape": [*shape[:-2], 1, destinations]}
        if shape and destinations != tokens
        else options
    )


def fewer_per_frame(options: Options, tokens: int, destinations: int) -> Options:
    """Return options for a video's block on merged tokens, D / frames of each frame: `grid_sizes` (frames, rows,
    columns) becomes (frames, 1, D / frames), or (1, 1, all) where further frames follow."""
    grid = options.get("grid_sizes")
    if grid is None:
        return options
    frames = grid[0] if prod(grid) == tokens else 1
    return {**options, "grid_sizes": (frames, 1, (prod(grid) - tokens + destinations) // frames)}


def fewer_tokens(options: Options, removed: int, references: Sequence[int] = ()) -> Options:
    """Return options for a transformer's block with fewer tokens: `img_slice` [text, all] ends earlier, and
    `reference_image_num_tokens` are those left of references that are merged too. The same dict where nothing
    changes."""
    changed, image = {}, options.get("img_slice")
    if image and removed:
        changed["img_slice"] = [image[0], image[1] - removed]
    if references and "reference_image_num_tokens" in options:
        changed["reference_image_num_tokens"] = list(references)
    return {**options, **changed} if changed else options
