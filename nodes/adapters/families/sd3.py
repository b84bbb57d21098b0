"""SD3 and SD3.5: image and text in streams of their own, positions added before the first block."""

from __future__ import annotations

from typing import Any

from comfy.ldm.modules.diffusionmodules.mmdit import MMDiT
from torch import nn

from ....toma_core.payoff import MM_DIT
from ..family import Stage, Transformer
from ..port import Given, Port

NAME = "SD3.5"


def matches(diffusion_model: nn.Module) -> bool:
    """Whether this family knows the model."""
    return isinstance(diffusion_model, MMDiT)


class BlockPort(Port):
    """Nothing but the image; the last block gives no text."""

    places = ("context", "x")
    output = 1
    harmless = ("context", "c", "use_checkpoint", "transformer_options")

    def above(self, given: Given) -> int:
        return int(given["context"].shape[1])

    def attended(self, given: Given, before: int) -> tuple[tuple[int, int], ...]:
        """Text and image together; in some blocks of the medium one the image then looks at itself."""
        return *super().attended(given, before), (before, int(given["x"].shape[1]))


class Hooks(Transformer):
    """All hooks of one SD3."""

    def attentions(self, block: Any) -> int:
        """The image looks at itself once more in some blocks of the medium one."""
        return 1 + bool(getattr(getattr(block, "x_block", None), "x_block_self_attn", False))

    def stages_of(self, model: MMDiT) -> tuple[Stage, ...]:
        """All blocks."""
        self.patch_size, self.width = model.patch_size, model.hidden_size
        return (Stage("double", model.joint_blocks, BlockPort(), MM_DIT, "output"),)
