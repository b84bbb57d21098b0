"""A row of the table: a feature, the graphs that use it, and the expected result of merging."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .kit import Kit

FAMILIES = {"sdxl": "SDXL", "flux": "Flux"}
# Families in the second set of tables, for features that depend on the model.
OTHERS = {
    "flux2": "Flux.2",
    "chroma": "Chroma",
    "z_image": "Z-Image",
    "lumina2": "Lumina 2",
    "krea2": "Krea 2",
    "qwen_image": "Qwen-Image",
    "qwen_image21": "Qwen-Image 2.1",
    "sd3": "SD3.5",
    "wan": "Wan",
    "hunyuan": "HunyuanVideo",
    "ltx_av": "LTX-2.3",
    "h3": "MiniMax H3",
}
# Families whose latents are a video and its sound. Only rows with `sound` are tried on these families.
SOUND = ("ltx_av", "h3")
# Families in the last table, which has only the rows with `sound` or `latest`.
LATEST = {
    "omnigen2": "OmniGen2",
    "ernie": "ERNIE-Image",
    "ideogram": "Ideogram 4",
    "lens": "Lens",
    "cosmos": "Anima, Cosmos-Predict2",
    "ltx": "LTX-Video",
    "scail": "SCAIL",
    "wandancer": "WanDancer",
}
ALL = {**FAMILIES, **OTHERS, **LATEST}


def _nothing(model: Any) -> Any:
    return model


@dataclass(frozen=True)
class Graph:
    """One way to use a feature."""

    # Applies the feature's node to a model, for features that patch models.
    patch: Callable[[Any], Any] = _nothing
    # Samples the patched model. None: plain sampling with `options`.
    sample: Callable[[Any], Tensor] | None = None
    # Options of plain sampling, such as the size.
    options: Mapping[str, Any] = field(default_factory=dict)
    # The same graph with the feature turned off or set differently. None: plain sampling. The difference between the
    # latents of the two graphs must have the same direction with and without merging.
    without: Graph | None = None
    # Whether `without` turns the feature off. If so, `without` with ToMA must give exactly the result of ToMA alone.
    off: bool = False
    # Whether the feature's change of the latent is compared. False for features that every graph has, such as a
    # sampler.
    steered: bool = True
    # With these settings ToMA alone must give exactly the result that ToMA gives with the feature.
    same_as: Mapping[str, Any] | None = None
    # The model to sample. None: the kit's model.
    model: Any = None
    # Settings of ToMA.
    settings: Mapping[str, Any] = field(default_factory=dict)
    # Checks the merged result by assertions.
    check: Callable[[Tensor], None] | None = None
    name: str = ""

    @property
    def patches(self) -> bool:
        """Return whether the feature's node patches the model. Such a node may come before or after ToMA's node."""
        return self.patch is not _nothing

    def run(self, kit: Kit, model: Any) -> Tensor:
        """Sample the model with this graph."""
        return kit.sample(model, **self.options) if self.sample is None else self.sample(model)


@dataclass(frozen=True)
class Expected:
    """The expected report of ToMA."""

    # True: every block that ToMA merges without the feature is merged, at least in part. False: no block is merged.
    merged: bool = True
    # Ids of the reasons why parts are not merged -> number of parts.
    unmerged: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Refused:
    """The outcome where ComfyUI itself cannot run the feature on this family."""

    error: type[Exception]


@dataclass(frozen=True)
class NotFor:
    """The outcome where there is nothing to run. why: the cell's text."""

    why: str


Outcome = Expected | Refused | NotFor
MERGED = Expected()
NONE = NotFor("-")
NOT_TRIED = NotFor("not tried")
# For rows whose graphs do the same on each model. To save time, they are not tried on Flux.2, whose text always has 512
# tokens, or on Z-Image, the widest of the small models. Lumina 2, which has Z-Image's class, is tried.
CHEAP: dict[str, Outcome] = {**dict.fromkeys(OTHERS, MERGED), "flux2": NOT_TRIED, "z_image": NOT_TRIED}
CHEAP |= dict.fromkeys(SOUND, NOT_TRIED)
FOR_UNETS = NotFor("for UNets")
FOR_FLUX = NotFor("for Flux")
# In ComfyUI's WanDancer, a frame's number of tokens must be a multiple of the music's number of tokens.
FEWER_SIZES = NotFor("not in ComfyUI")


def unmerged(reason: str, parts: int) -> Expected:
    """Expect that nothing is merged, for one reason."""
    return Expected(merged=False, unmerged={reason: parts})


@dataclass(frozen=True)
class Row:
    """A line of the tables. expected: the outcome for each family on which the row is tried."""

    feature: str
    group: str
    make: Callable[[Kit], Graph | Iterator[Graph]]
    expected: Mapping[str, Outcome]
    quick: bool = False
    pack: str = ""

    def graphs(self, kit: Kit) -> list[Graph]:
        """Make the graphs for one family, and import what they need."""
        made = self.make(kit)
        return [made] if isinstance(made, Graph) else list(made)


class Table:
    """The rows of the table, in the order of their definition."""

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
        latest: Mapping[str, Outcome] | None = None,
        pack: str = "",
    ) -> Callable[[Callable[[Kit], Any]], Callable[[Kit], Any]]:
        """Decorate the function that makes the graphs.

        others: one outcome for all families of `OTHERS`, or outcomes by family for those that have the feature.
        only: as `others`, for a feature that SDXL and Flux do not have.
        quick: whether the row also runs on the oldest supported ComfyUI.
        sound: whether the row is also tried on the families of `SOUND` and `LATEST`.
        latest: outcomes by family of `LATEST`, MERGED for families not named.
        pack: the folder of the feature's community pack.
        """
        expected: dict[str, Outcome] = {} if only else {"sdxl": sdxl, "flux": flux}
        others = only or others
        if others is not None:
            silent = {} if sound else dict.fromkeys(SOUND, NOT_TRIED)
            have = others if isinstance(others, Mapping) else {**dict.fromkeys(OTHERS, others), **silent}
            expected |= {family: have.get(family, NONE) for family in OTHERS}

        if sound or latest is not None:
            expected |= {**dict.fromkeys(LATEST, MERGED), **(latest or {})}

        def add(make: Callable[[Kit], Any]) -> Callable[[Kit], Any]:
            assert feature not in {row.feature for row in self.rows}, f"two rows are called {feature}"
            self.rows.append(Row(feature, group, make, expected, quick, pack))
            return make

        return add
