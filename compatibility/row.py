"""What a row of the table is: a feature, the graphs that use it, and what is to become of the merge in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .kit import Kit

FAMILIES = {"sdxl": "SDXL", "flux": "Flux"}
# In tables of their own, of the features that ask something of a model of theirs.
OTHERS = {
    "flux2": "Flux.2",
    "chroma": "Chroma",
    "z_image": "Z-Image",
    "lumina2": "Lumina 2",
    "krea2": "Krea 2",
    "qwen_image": "Qwen-Image",
    "sd3": "SD3.5",
    "wan": "Wan",
    "hunyuan": "HunyuanVideo",
    "ltx_av": "LTX-2.3",
    "h3": "MiniMax H3",
}
# Their latents are a video and its sound: tried where a row says so.
SOUND = ("ltx_av", "h3")
ALL = {**FAMILIES, **OTHERS}


def _nothing(model: Any) -> Any:
    return model


@dataclass(frozen=True)
class Graph:
    """One way to use a feature.

    patch: its node on a model, for features that patch models.
    sample: from the model at the sampler's input to a latent; plain sampling if None.
    options: of plain sampling, such as the size.
    without: the same graph with the feature turned off or set otherwise; plain sampling if None. What the feature
    changes between the two must be changed in the same sense when tokens are merged.
    off: `without` is nothing at all, so that with ToMA it is exactly ToMA alone.
    steered: False where there is nothing to compare with, as for a choice of sampler.
    same_as: the result is exactly that of ToMA alone under these settings.
    model: a model of its own, the kit's if None.
    settings: of ToMA.
    check: looks at the merged result; says what is wrong by an assertion.
    """

    patch: Callable[[Any], Any] = _nothing
    sample: Callable[[Any], Tensor] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    without: Graph | None = None
    off: bool = False
    steered: bool = True
    same_as: Mapping[str, Any] | None = None
    model: Any = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    check: Callable[[Tensor], None] | None = None
    name: str = ""

    @property
    def patches(self) -> bool:
        """Whether there is a node on the model that may come before or after ToMA's."""
        return self.patch is not _nothing

    def run(self, kit: Kit, model: Any) -> Tensor:
        """Sample the model as this graph does."""
        return kit.sample(model, **self.options) if self.sample is None else self.sample(model)


@dataclass(frozen=True)
class Expected:
    """What the report is to say. merged: every block that ToMA alone merges is merged too, at least in part; else
    none is. whole: ids of reasons why parts are not merged, with the number of parts."""

    merged: bool = True
    whole: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Refused:
    """ComfyUI itself cannot run the feature on this family."""

    error: type[Exception]


@dataclass(frozen=True)
class NotFor:
    """There is nothing to run. why: the cell's text."""

    why: str


Outcome = Expected | Refused | NotFor
MERGED = Expected()
NONE = NotFor("-")
NOT_TRIED = NotFor("not tried")
# Where many graphs ask the same of each model: without Flux.2, whose text is always 512 tokens long, and Z-Image, the
# widest of the small models, of the same class as Lumina 2.
CHEAP: dict[str, Outcome] = {**dict.fromkeys(OTHERS, MERGED), "flux2": NOT_TRIED, "z_image": NOT_TRIED}
CHEAP |= dict.fromkeys(SOUND, NOT_TRIED)
FOR_UNETS = NotFor("for UNets")
FOR_FLUX = NotFor("for Flux")


def whole(reason: str, parts: int) -> Expected:
    """Nothing is merged, for one reason."""
    return Expected(merged=False, whole={reason: parts})


@dataclass(frozen=True)
class Row:
    """A line of the tables. expected: by family, of those that it is tried on."""

    feature: str
    group: str
    make: Callable[[Kit], Graph | Iterator[Graph]]
    expected: Mapping[str, Outcome]
    quick: bool = False
    pack: str = ""

    def graphs(self, kit: Kit) -> list[Graph]:
        """The graphs for one family; imports what they need."""
        made = self.make(kit)
        return [made] if isinstance(made, Graph) else list(made)


class Table:
    """Rows in the order in which they are written down."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def row(
        self,
        group: str,
        feature: str,
        sdxl: Outcome = MERGED,
        flux: Outcome = MERGED,
        others: Outcome | Mapping[str, Outcome] | None = None,
        *,
        only: Mapping[str, Outcome] | None = None,
        quick: bool = False,
        sound: bool = False,
        pack: str = "",
    ) -> Callable[[Callable[[Kit], Any]], Callable[[Kit], Any]]:
        """Decorates the function that makes the graphs. others: of all other families, or of those that have the
        feature. only: the same, where the first two have none. quick: run on the oldest supported ComfyUI as well.
        sound: whether one outcome of all others is that of `SOUND` too. pack: the folder of the community pack that the
        feature comes from."""
        expected: dict[str, Outcome] = {} if only else {"sdxl": sdxl, "flux": flux}
        others = only or others
        if others is not None:
            silent = {} if sound else dict.fromkeys(SOUND, NOT_TRIED)
            have = others if isinstance(others, Mapping) else {**dict.fromkeys(OTHERS, others), **silent}
            expected |= {family: have.get(family, NONE) for family in OTHERS}

        def add(make: Callable[[Kit], Any]) -> Callable[[Kit], Any]:
            assert feature not in {row.feature for row in self.rows}, f"two rows are called {feature}"
            self.rows.append(Row(feature, group, make, expected, quick, pack))
            return make

        return add
