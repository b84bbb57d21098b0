"""Chroma: a separate class with the blocks of Flux."""

from __future__ import annotations

from typing import Any

from comfy.ldm.chroma.model import Chroma

from ....toma_core import ToMAConfig
from ..family import Block, BlockGroup, Message, Reason
from . import flux

NAME = "Chroma"
MODEL = Chroma
DERIVED = ("ChromaRadiance",)
DOUBLE = Block(12, 71, (2, 4, 4))
SINGLE = Block(12, 29, (2, 5, 5))


class Hooks(flux.Hooks):
    def works(self, model: Any) -> tuple[Block, Block]:
        return DOUBLE, SINGLE

    def skipped_by_settings(self, group: BlockGroup, index: int, config: ToMAConfig) -> Message | None:
        # Merge no block that Chroma itself skips: its hook never runs, so a chain could not begin or end there.
        skipped = getattr(self.model(), "skip_mmdit" if group.kind == "double" else "skip_dit", ())
        return Reason.SKIPPED_BY_MODEL() if index in skipped else super().skipped_by_settings(group, index, config)
