"""What others are told while merged tokens run: where these lie, not where all of them would.

ComfyUI says in `transformer_options` how a block's tokens lie, and whoever computes attention in its place
(`optimized_attention_override`) may index by that. Blocks on merged tokens get a copy that is true of them: everything
else in it is the same objects, and the caller's own dict stays as it is. In ComfyUI 0.16.3 to 0.30.0 two entries
describe tokens that merging takes away. `original_shape` is the latent's, `reference_image_num_tokens` are Flux's
references, which stay whole, and the double blocks of Flux find `img_slice` for their patches from what arrives.
"""

from __future__ import annotations

from typing import Any

Options = dict[str, Any]


def on_no_grid(options: Options, tokens: int, kept: int) -> Options:
    """For a UNet's block on `kept` of `tokens`: `activations_shape` (B, C, H, W) becomes (B, C, 1, kept), as merged
    tokens lie on no grid. `options` itself where nothing is merged or nothing was said."""
    shape = options.get("activations_shape")
    return {**options, "activations_shape": [*shape[:-2], 1, kept]} if shape and kept != tokens else options


def shortened(options: Options, tokens: int, kept: int) -> Options:
    """For a Flux block on `kept` of `tokens` of the image: `img_slice` [text, all] ends so many earlier. `options`
    itself where nothing is merged or nothing was said."""
    place = options.get("img_slice")
    return {**options, "img_slice": [place[0], place[1] - tokens + kept]} if place and kept != tokens else options
