"""Z-Image, Lumina 2 and every other model that ComfyUI runs on `NextDiT`.

One stream of [text | references | image]; in Z-Image, text and image are each padded to a multiple of 32. A few refiner
blocks run earlier, on only the text or only the image. They are not merged.
"""

from __future__ import annotations

from math import prod

from comfy.ldm.lumina.model import NextDiT
from torch import Tensor

from ..family import Block, BlockGroup, BlockSignature, ModelHooks, token_grid
from ..signature import CallArguments

NAME = "Z-Image, Lumina 2"
MODEL = NextDiT
DERIVED = ("NextDiTPixelSpace",)
# Lumina 2 has a wider feed-forward than Z-Image, and narrower keys and values.
Z_IMAGE = Block(12, 54, (1, 5, 5), beside=32)
LUMINA = Block(44 / 3, 56, (1, 5, 5))


class LayerSignature(BlockSignature):
    positional_args = ("x", "x_mask", "freqs_cis", "adaln_input")
    rope_arg, rope_token_dim = "freqs_cis", 1
    image_last = True
    index_args = ("timestep_zero_index",)
    passthrough_args = ("adaln_input",)
    clamps_fp16 = True

    def __init__(self, multiple: int) -> None:
        self.multiple = multiple  # the image is padded to a multiple of this many tokens

    def image_start(self, call_args: CallArguments, image: int) -> int | None:
        return super().image_start(call_args, image + -image % self.multiple)


class Hooks(ModelHooks):
    # ControlNets and other patches read the image between two blocks, and may change its tokens.
    between = ("double_block",)

    def block_groups(self, model: NextDiT) -> tuple[BlockGroup, ...]:
        work = Z_IMAGE if model.pad_tokens_multiple else LUMINA
        self.refiners = len(model.noise_refiner)
        signature = LayerSignature(model.pad_tokens_multiple or 1)
        return (BlockGroup("layer", model.layers, signature, work, model.patch_size, model.dim),)

    def flops_beside_blocks(self, latent: Tensor) -> float:
        (group,) = self.groups
        tokens = prod(token_grid(latent, group.patch_size))
        return self.refiners * group.work.flops(tokens, 1, group.width)
