"""Flux.1 (dev, schnell, Fill, Kontext), Flux.2, Klein and every other model that ComfyUI runs on its `Flux` class.

Only tokens of the image being made are merged. Text tokens and reference images stay whole and in place.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from comfy.ldm.flux.model import Flux
from torch import nn

from ....toma_core import ToMAConfig
from ....toma_core.config import Granularity
from ....toma_core.payoff import FLUX2_DOUBLE, FLUX2_SINGLE, FLUX_DOUBLE, FLUX_SINGLE, Block
from ....toma_core.presets import Fields
from ..chain import BlockHook
from ..family import PRESETS, WITHOUT_KEYS, Stage, Transformer, theirs
from ..hooks import HookPair
from ..port import Cuts, Given, Port, image_told, slices_moved
from .flux_layers import ByModule

NAME = "Flux (Flux.1, Flux.2, Klein, LongCat, Ovis)"
# Double and single blocks of Flux.1, of which the released method leaves five of each kind whole.
_FLUX_1 = 19, 38
FAITHFUL: Fields = {"faithful": {"whole_first": 5}}


def matches(diffusion_model: nn.Module) -> bool:
    """Whether this family knows the model."""
    return isinstance(diffusion_model, Flux)


class SinglePort(Port):
    """[text | image | references]."""

    places = ("x", "vec", "pe", "attn_mask")
    rows = "pe"
    harmless = ("vec", "modulation_dims", "transformer_options")
    writes = bounded = True
    # Tokens of text as the double blocks saw them: step caches that run the blocks themselves hand no options over.
    text: int | None = None

    def release(self) -> None:
        self.text = None

    def before(self, given: Given, image: int) -> int | None:
        told = image_told(given)
        return self.text if told is None else told

    def moved(self, given: Given, cuts: Cuts) -> Given:
        return {**super().moved(given, cuts), **slices_moved(given, "modulation_dims", cuts)}


class DoublePort(Port):
    """[image | references]; the text beside them has its positions before theirs."""

    places = ("img", "txt", "vec", "pe", "attn_mask")
    tokens, output = "img", 0
    rows = "pe"
    harmless = ("txt", "vec", "modulation_dims_img", "modulation_dims_txt", "transformer_options")
    writes = bounded = True

    def __init__(self, single: SinglePort) -> None:
        self.single = single

    def note(self, given: Given) -> None:
        self.single.text = self.above(given)

    def release(self) -> None:
        self.single.release()

    def above(self, given: Given) -> int:
        return int(given["txt"].shape[1])

    def moved(self, given: Given, cuts: Cuts) -> Given:
        return {**super().moved(given, cuts), **slices_moved(given, "modulation_dims_img", cuts)}


class Hooks(Transformer):
    """All hooks of one Flux model."""

    def __init__(self, diffusion_model: Any) -> None:
        super().__init__(diffusion_model)
        if tuple(map(len, self.links)) == _FLUX_1:  # others have fewer double ones: a share of them
            self.presets, self.without_keys = {**PRESETS, **FAITHFUL}, {**WITHOUT_KEYS, **FAITHFUL}
        self.by_module = [ByModule(link) for link in self.links[0]]

    def stages_of(self, model: Any) -> tuple[Stage, ...]:
        """Double blocks, single blocks."""
        self.patch_size, self.width = model.patch_size, getattr(model, "hidden_size", 0)
        single, works = SinglePort(), self.works(model)
        return (
            Stage("double", model.double_blocks, DoublePort(single), works[0], "input"),
            Stage("single", model.single_blocks, single, works[1], "output"),
        )

    def works(self, model: Any) -> tuple[Block, Block]:
        """What a double and a single block cost. Flux.2 and Klein have one modulation for all and wider MLPs."""
        flux2 = getattr(model.params, "global_modulation", False)
        return (FLUX2_DOUBLE, FLUX2_SINGLE) if flux2 else (FLUX_DOUBLE, FLUX_SINGLE)

    def places(self) -> Iterator[HookPair]:
        """Blocks and the layers inside them with the hooks that may stand in for them."""
        yield from super().places()
        for block in self.by_module:
            if theirs(block.module):
                yield block.module, block
                yield from block.layers()

    def chosen(self, stage: Stage, links: list[BlockHook], config: ToMAConfig) -> list[BlockHook]:
        """Double blocks can be merged module by module."""
        by_module = config.granularity is Granularity.MODULE and stage.kind == "double"
        return list(self.by_module) if by_module else links
