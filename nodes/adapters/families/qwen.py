"""Qwen-Image and Qwen-Image-Edit: [image | references] and text in streams of their own."""

from __future__ import annotations

from comfy.ldm.qwen_image.model import QwenImageTransformer2DModel
from torch import Tensor, nn

from ....toma_core.payoff import QWEN
from ..family import Stage, Transformer
from ..port import Cuts, Given, Port, index_moved, text_masked

NAME = "Qwen-Image"


def matches(diffusion_model: nn.Module) -> bool:
    """Whether this family knows the model."""
    return isinstance(diffusion_model, QwenImageTransformer2DModel)


class BlockPort(Port):
    """[image | references], of which the last may be told to be clean (timestep_zero_index). A mask is of the text."""

    places = ("hidden_states", "encoder_hidden_states", "encoder_hidden_states_mask", "temb", "image_rotary_emb")
    tokens, output = "hidden_states", 1
    rows = "image_rotary_emb"
    harmless = (
        *("encoder_hidden_states", "encoder_hidden_states_mask", "temb"),
        *("timestep_zero_index", "transformer_options"),
    )

    def above(self, given: Given) -> int:
        return int(given["encoder_hidden_states"].shape[1])

    def moved(self, given: Given, cuts: Cuts) -> Given:
        return {**super().moved(given, cuts), **index_moved(given, "timestep_zero_index", cuts)}

    def mask_moved(self, mask: Tensor, gone: int) -> Tensor | None:
        return text_masked(mask, gone)


class Hooks(Transformer):
    """All hooks of one Qwen-Image."""

    # ControlNets that are patches are shown the image between two blocks.
    between = ("double_block",)

    def stages_of(self, model: QwenImageTransformer2DModel) -> tuple[Stage, ...]:
        """All blocks."""
        self.patch_size, self.width = model.patch_size, model.inner_dim
        return (Stage("double", model.transformer_blocks, BlockPort(), QWEN, "input"),)
