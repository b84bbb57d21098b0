"""Z-Image, Lumina 2 and every other model that ComfyUI runs on `NextDiT`.

One stream of [text | references | image], text and image each padded to a multiple of 32 in Z-Image. The few refiner
blocks before it, of text or image alone, are not merged.
"""

from __future__ import annotations

from math import prod

from comfy.ldm.lumina.model import NextDiT
from torch import Tensor

from ....toma_core.cost_model import LUMINA, Z_IMAGE
from ..blocks import BlockGroup, token_grid
from ..family import Transformer
from ..signature import BlockSignature, CallArguments, TokenReduction, shifted_slices

NAME = "Z-Image, Lumina 2"
MODEL = NextDiT
DERIVED = ("NextDiTPixelSpace",)


class LayerSignature(BlockSignature):
    """[text | references | image | padding]: ComfyUI passes no start of the image, but it comes last."""

    positional_args = ("x", "x_mask", "freqs_cis", "adaln_input")
    rope_arg, rope_token_dim = "freqs_cis", 1
    passthrough_args = ("adaln_input", "timestep_zero_index", "transformer_options")
    clamps_fp16 = True

    def __init__(self, multiple: int) -> None:
        """multiple: the image's tokens are padded to a multiple of it."""
        self.multiple = multiple

    def image_start(self, call_args: CallArguments, image: int) -> int | None:
        # Positions stay as they were while the tokens are merged.
        rope = call_args.get(self.rope_arg)
        if rope is None or rope.ndim <= self.rope_token_dim:
            return None
        return max(0, rope.shape[self.rope_token_dim] - image - -image % self.multiple)

    def merged_args(self, call_args: CallArguments, reduction: TokenReduction) -> CallArguments:
        return {
            **super().merged_args(call_args, reduction),
            **shifted_slices(call_args, "timestep_zero_index", reduction),
        }


class Hooks(Transformer):
    """The hooks of one NextDiT."""

    # ControlNets and other patches read the image between two blocks, and may write into it.
    between = ("double_block",)
    references_follow = False

    def block_groups(self, model: NextDiT) -> tuple[BlockGroup, ...]:
        """Return the layers after the refiners."""
        self.patch_size, self.width = model.patch_size, model.dim
        work = Z_IMAGE if model.pad_tokens_multiple else LUMINA
        self.refiners = len(model.noise_refiner) * [work]
        return (BlockGroup("layer", model.layers, LayerSignature(model.pad_tokens_multiple or 1), work),)

    def flops_beside_blocks(self, latent: Tensor) -> float:
        """See `ModelHooks`. The refiners of the image."""
        tokens = prod(token_grid(latent, self.patch_size))
        return sum(work.flops(tokens, 1, self.width) for work in self.refiners)
