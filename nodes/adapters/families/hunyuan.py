"""HunyuanVideo and HunyuanVideo 1.5, HunyuanImage 2.1: a class of its own, with the blocks of Flux.

Tokens lie as [text | reference | frames]; frames alone are merged, each to as many tokens as the others. Where the
first frame has a noise level of its own, blocks tell it by places that are no border between frames, and stay whole.
"""

from __future__ import annotations

from typing import Any

from comfy.ldm.hunyuan_video.model import HunyuanVideo
from torch import Tensor, nn

from ....toma_core.payoff import HUNYUAN_DOUBLE, HUNYUAN_SINGLE
from ..family import Stage, Transformer
from ..port import Cuts, Given, Port, text_masked

NAME = "HunyuanVideo (1.0, 1.5) and HunyuanImage 2.1"


def matches(diffusion_model: nn.Module) -> bool:
    """Whether this family knows the model."""
    return isinstance(diffusion_model, HunyuanVideo) and (*diffusion_model.patch_size[:-2], 1)[0] == 1


class _Port(Port):
    """The frames come last, whatever is before them: positions are of text and all tokens, merged or not."""

    rows = "pe"
    writes = bounded = True

    def before(self, given: Given, image: int) -> int | None:
        rows = given.get(self.rows)
        if rows is None or rows.ndim <= self.axis:
            return None
        before = int(rows.shape[self.axis]) - self.above(given) - image
        return before if before >= 0 else None

    def moved(self, given: Given, cuts: Cuts) -> Given:
        moved, mask = super().moved(given, cuts), given.get("attn_mask")
        # Of text; all that comes after it is looked at.
        return moved if mask is None else {**moved, "attn_mask": mask[..., : mask.shape[-1] - cuts.gone]}

    def mask_moved(self, mask: Tensor, gone: int) -> Tensor | None:
        return text_masked(mask, gone)


class SinglePort(_Port):
    """[text | reference | frames]."""

    places = ("x", "vec", "pe", "attn_mask")
    harmless = ("vec", "attn_mask", "transformer_options")


class DoublePort(_Port):
    """[reference | frames]; the text beside them has its positions before theirs."""

    places = ("img", "txt", "vec", "pe", "attn_mask")
    tokens, output = "img", 0
    harmless = ("txt", "vec", "attn_mask", "transformer_options")

    def above(self, given: Given) -> int:
        return int(given["txt"].shape[1])


class Hooks(Transformer):
    """All hooks of one model."""

    takes_frames = True
    references_follow = False

    def stages_of(self, model: Any) -> tuple[Stage, ...]:
        """Double blocks, and single blocks where there are any: 1.5 has none."""
        self.patch_size, self.width = model.patch_size[-1], model.hidden_size
        double = Stage("double", model.double_blocks, DoublePort(), HUNYUAN_DOUBLE, "input")
        single = Stage("single", model.single_blocks, SinglePort(), HUNYUAN_SINGLE, "output")
        return (double, single) if len(model.single_blocks) else (double,)
