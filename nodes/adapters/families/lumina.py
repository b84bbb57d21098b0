"""Z-Image, Lumina 2 and every other model that ComfyUI runs on `NextDiT`.

One stream of [text | references | image], text and image each padded to a multiple of 32 in Z-Image. The refiners
before it see text or image alone, a few blocks in all: they stay whole.
"""

from __future__ import annotations

from comfy.ldm.lumina.model import NextDiT
from torch import nn

from ....toma_core.payoff import LUMINA, Z_IMAGE
from ..family import Stage, Transformer
from ..port import Cuts, Given, Port, slices_moved

NAME = "Z-Image, Lumina 2"


def matches(diffusion_model: nn.Module) -> bool:
    """Whether this family knows the model."""
    return isinstance(diffusion_model, NextDiT)


class LayerPort(Port):
    """[text | references | image | padding]: ComfyUI does not tell where the image begins, but it comes last."""

    places = ("x", "x_mask", "freqs_cis", "adaln_input")
    rows, axis = "freqs_cis", 1
    harmless = ("adaln_input", "timestep_zero_index", "transformer_options")
    bounded = True

    def __init__(self, multiple: int) -> None:
        """multiple: of what the image's tokens are padded to."""
        self.multiple = multiple

    def before(self, given: Given, image: int) -> int | None:
        # By the positions: they stay as they were while the tokens are merged.
        rows = given.get(self.rows)
        if rows is None or rows.ndim <= self.axis:
            return None
        return max(0, rows.shape[self.axis] - image - -image % self.multiple)

    def moved(self, given: Given, cuts: Cuts) -> Given:
        return {**super().moved(given, cuts), **slices_moved(given, "timestep_zero_index", cuts)}


class Hooks(Transformer):
    """All hooks of one NextDiT."""

    # ControlNets and other patches are shown the image between two blocks, and may write into it.
    between = ("double_block",)
    references_follow = False

    def stages_of(self, model: NextDiT) -> tuple[Stage, ...]:
        """The layers after the refiners."""
        self.patch_size, self.width = model.patch_size, model.dim
        work = Z_IMAGE if model.pad_tokens_multiple else LUMINA
        return (Stage("layer", model.layers, LayerPort(model.pad_tokens_multiple or 1), work),)
