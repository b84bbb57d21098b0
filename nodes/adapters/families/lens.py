"""Lens: a stream of the image, another of text; attention and positions have the image first."""

from __future__ import annotations

import torch
from comfy.ldm.lens.model import LensTransformer2DModel
from torch import Tensor
from torch.nn.functional import pad

from ....toma_core.cost_model import LENS
from ..blocks import BlockGroup
from ..family import Transformer
from ..signature import BlockSignature, CallArguments, TokenReduction

NAME = "Lens"
MODEL = LensTransformer2DModel


class Signature(BlockSignature):
    """The image alone. A mask is of the keys, [image | text]; all of the image is attended to."""

    positional_args = ("hidden_states", "encoder_hidden_states", "temb", "freqs_cis")
    tokens_arg, output_index = "hidden_states", 1
    rope_arg = "freqs_cis"
    passthrough_args = ("encoder_hidden_states", "temb", "attention_mask", "transformer_options")

    def attention_spans(self, call_args: CallArguments, before: int) -> tuple[tuple[int, ...], ...]:
        ((_, image),) = super().attention_spans(call_args, before)
        return ((before, image + int(call_args["encoder_hidden_states"].shape[1])),)

    def merged_args(self, call_args: CallArguments, reduction: TokenReduction) -> CallArguments:
        merged, mask = super().merged_args(call_args, reduction), call_args.get("attention_mask")
        return merged if mask is None else {**merged, "attention_mask": mask[..., reduction.removed :]}

    def merged_mask(self, mask: Tensor, removed: int) -> Tensor | None:
        if mask.ndim < 3 or mask.shape[-2] != 1:
            return None
        return pad(mask, (-removed, 0), value=mask.dtype is torch.bool)


class Hooks(Transformer):
    """The hooks of one Lens."""

    between = ("double_block",)

    def block_groups(self, model: LensTransformer2DModel) -> tuple[BlockGroup, ...]:
        """Return all blocks; a pixel of the latent is a token."""
        self.patch_size, self.width = 1, model.inner_dim
        return (BlockGroup("double", model.transformer_blocks, Signature(), LENS, "input"),)
