"""Krea 2: one stream of [text | image | references], keys and values in groups."""

from __future__ import annotations

from comfy.ldm.krea2.model import SingleStreamDiT
from torch import nn

from ....toma_core.payoff import KREA
from ..family import Stage, Transformer
from ..port import Cuts, Given, Port, image_told, index_moved

NAME = "Krea 2"


def matches(diffusion_model: nn.Module) -> bool:
    """Whether this family knows the model."""
    return isinstance(diffusion_model, SingleStreamDiT)


class BlockPort(Port):
    """[text | image | references], of which the last may be told to be clean (timestep_zero_index)."""

    places = ("x", "vec", "freqs", "mask")
    rows = "freqs"
    harmless = ("vec", "timestep_zero_index", "transformer_options")

    def before(self, given: Given, image: int) -> int | None:
        if (told := image_told(given)) is not None:
            return told
        # ComfyUI 0.26.0 does not tell, but has no references either: the image comes last. By the positions: they stay
        # as they were while the tokens are merged.
        rows = given.get(self.rows)
        text = -1 if rows is None or rows.ndim <= self.axis else rows.shape[self.axis] - image - self.references(given)
        return text if text >= 0 else None

    def moved(self, given: Given, cuts: Cuts) -> Given:
        return {**super().moved(given, cuts), **index_moved(given, "timestep_zero_index", cuts)}


class Hooks(Transformer):
    """All hooks of one Krea 2."""

    def stages_of(self, model: SingleStreamDiT) -> tuple[Stage, ...]:
        """All blocks."""
        self.patch_size, self.width = model.patch, model.first.out_features
        return (Stage("single", model.blocks, BlockPort(), KREA),)
