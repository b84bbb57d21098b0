"""What a user can set, in one place: fields, ranges, defaults, tooltips, presets.

`ToMAConfig` is frozen: it rides on a model and is shared by every run of it. What changes during a run lives in
`state.RunState`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any

from .fields import ConfigError, FieldSpec, checked, option, shown


class Granularity(str, Enum):
    """How much of a transformer runs on merged tokens between one merge and its unmerge."""

    MODULE = "module"
    BLOCK = "block"
    STACK = "stack"


class WindowKind(str, Enum):
    """The shape of the local windows in which destinations are selected and tokens merged."""

    TILE = "tile"
    STRIPE = "stripe"
    GLOBAL = "global"


class SelectorKind(str, Enum):
    """Which rule picks the destination tokens."""

    FACILITY_LOCATION = "facility location"
    FARTHEST_POINT = "farthest point"
    GRID = "grid"
    RANDOM = "random"
    TOME = "tome"


class Share(str, Enum):
    """Which blocks use one plan (destinations and weights) within a step."""

    BLOCK = "block"
    STACK = "stack"
    LEVEL = "level"


class Levels(str, Enum):
    """Which resolutions of a UNet are merged. Flux has one resolution and ignores this."""

    ALL = "all"
    FINEST = "finest"
    COARSER = "coarser"


@dataclass(frozen=True)
class ToMAConfig:
    """Every setting of the merge. Raises `ConfigError` on a value outside its range.

    Strings are accepted for the enum fields. The defaults merge every step; nodes begin with the `balanced` preset.
    """

    ratio: float = option(
        0.5,
        "Share of the image tokens that is merged away. 0.25 is careful, 0.5 the usual choice, 0.75 fast and visibly "
        "softer. 0 switches ToMA off.",
        "Tokens",
        (0.0, 0.95, 0.05),
    )
    ratio_decay: float = option(
        0.0,
        "How much of the ratio is given up between the first and the last merged step: 0 keeps it constant, 1 lets "
        "it fall to zero. Try 0.5 when fine detail suffers; costs speed in the late steps.",
        "Tokens",
        (0.0, 1.0, 0.05),
    )
    min_tokens: int = option(
        0,
        "Token grids with fewer tokens than this stay whole, because merging them costs more than it saves. 0 (Auto): "
        "256 tokens, and on NVIDIA GPUs also what is too little work to gain. Raise it if small images get slower.",
        "Tokens",
        (0, 1_048_576, 16),
    )
    granularity: Granularity = option(
        Granularity.STACK,
        "How long tokens stay merged. 'module': around each attention and feed-forward, as in the paper. 'block': "
        "around each transformer block. 'stack': around each chain of transformer blocks, the fastest.",
        "Where",
    )
    self_attention: bool = option(
        True,
        "Merge around self-attention. Only for granularity 'module'.",
        "Where",
    )
    cross_attention: bool = option(
        True,
        "Merge around cross-attention (UNet). Only for granularity 'module'.",
        "Where",
    )
    feed_forward: bool = option(
        True,
        "Merge around the feed-forward layers (in Flux: the image MLPs of the double blocks). Only for granularity "
        "'module'. Off costs about half of the speed gain.",
        "Where",
    )
    levels: Levels = option(
        Levels.ALL,
        "Which resolutions of a UNet are merged: all, only the finest, or only the coarser ones. Most of SDXL's "
        "blocks are at the coarser one.",
        "Where",
    )
    unet_whole_last: int = option(
        0,
        "The last so many stacks of transformer blocks of a UNet stay whole: they draw, and change most from step to "
        "step. 3 (of 11 in SDXL) are ten times closer to the original than 0 and give up a seventh of the gain.",
        "Where",
        (0, 1000, 1),
    )
    flux_whole_double: int = option(
        5,
        "The first so many double blocks of Flux stay whole; the released method uses 5 of 19. Fewer is faster and "
        "less faithful.",
        "Where",
        (0, 1000, 1),
    )
    flux_whole_single: int = option(
        5,
        "The first so many single blocks of Flux stay whole; the released method uses 5 of 38.",
        "Where",
        (0, 1000, 1),
    )
    merge_references: bool = option(
        False,
        "Merge reference images too, each on a grid of its own. In editing models (Flux.1 Kontext, Flux.2, Krea 2, "
        "Qwen-Image-Edit) they are half to two thirds of the tokens: whole they hold the speed back, merged they may "
        "be followed less closely.",
        "Where",
    )
    start_percent: float = option(
        0.0,
        "Merging starts at this share of the sampling process (0 = from the start).",
        "When",
        (0.0, 1.0, 0.01),
    )
    end_percent: float = option(
        1.0,
        "Merging stops at this share of the sampling process (1 = to the end). 0.7 to 0.9 lets the last steps "
        "restore fine detail, at the price of their speed.",
        "When",
        (0.0, 1.0, 0.01),
    )
    unet_whole_every: int = option(
        0,
        "UNet: every so many steps, beginning with the first, one step runs whole, and so does the last step of a run "
        "(0 = never; at least 2). Where unet_whole_last is 3, 0 is close already.",
        "When",
        (0, 1000, 1),
    )
    flux_whole_every: int = option(
        0,
        "Flux: every so many steps, beginning with the first, one step runs whole, and so does the last step of a run "
        "(0 = never; at least 2). With detail_reuse, 3 is much closer than 0 and gives up a third of the gain.",
        "When",
        (0, 1000, 1),
    )
    select_every: int = option(
        10,
        "Destinations are selected anew every so many steps. The paper uses 10; 3 is closer, with detail_reuse as "
        "often as a step runs whole. Lower costs a little time at each selection.",
        "When",
        (1, 1000, 1),
    )
    weigh_every: int = option(
        5,
        "Merge weights are computed anew every so many steps; the paper uses 5. Cheaper than selecting.",
        "When",
        (1, 1000, 1),
    )
    selector: SelectorKind = option(
        SelectorKind.FACILITY_LOCATION,
        "How destinations are picked. 'facility location' is the method of the paper; 'farthest point' is close; "
        "'grid', 'random' and 'tome' are there for comparison.",
        "How",
    )
    window_kind: WindowKind = option(
        WindowKind.TILE,
        "Destinations are picked inside local windows. 'tile': squares, the best choice. 'stripe': bands over the "
        "full width. 'global': the whole image at once, very slow to select on large images.",
        "How",
    )
    window_size: int = option(
        8,
        "Side of a window in tokens; stripes hold about its square. 8 is the usual choice, 4 selects faster and "
        "represents less well, 16 costs four times as much to select.",
        "How",
        (2, 64, 1),
    )
    shift_windows: bool = option(
        False,
        "Move the windows by half a side at every other selection, so that their borders do not stay in one place: "
        "closer, the more often destinations are selected.",
        "How",
    )
    scale: float = option(
        300.0,
        "Sharpness of the merge weights: high sends each token to its nearest destination only, low blurs over "
        "several. 300 measured best or tied; the released code uses 1000; below 50 is blurry.",
        "How",
        (1.0, 10_000.0, 10.0),
    )
    share: Share = option(
        Share.STACK,
        "Which blocks share one plan within a step: each 'block' its own, one per 'stack', or one per 'level' "
        "(resolution); in Flux both are one per kind of block. Wider sharing selects less often.",
        "How",
    )
    random_seed: int = option(
        0,
        "Seed of the 'random' selector's own generator; other selectors do not use it.",
        "How",
        (0, 2**32 - 1, 1),
    )
    detail_reuse: bool = option(
        False,
        "Whole steps keep what each stack or block adds, and the merged steps after them only move it by what has "
        "changed since: much closer at the same speed. Holds one activation per stack or block. Where no step runs "
        "whole, or with granularity 'module', it does nothing.",
        "How",
    )

    def __post_init__(self) -> None:
        for item in fields(self):
            object.__setattr__(self, item.name, check(item.name, getattr(self, item.name)))
        if self.start_percent > self.end_percent:
            raise ConfigError(
                f"ToMA: start_percent ({self.start_percent}) is larger than end_percent ({self.end_percent}). "
                "Merging would never be active. Allowed: start_percent <= end_percent; lower start_percent or raise "
                "end_percent."
            )
        for name in ("unet_whole_every", "flux_whole_every"):
            if getattr(self, name) == 1:
                raise ConfigError(
                    f"ToMA: {name} is 1, so every step would run whole. Allowed: 0 (never) or 2 and more; to switch "
                    "ToMA off, set ratio to 0."
                )

    @property
    def off(self) -> bool:
        """True when nothing could ever be merged, whatever the model and the step."""
        return self.ratio == 0.0 or self.start_percent == self.end_percent

    @classmethod
    def from_preset(cls, preset: str, **overrides: Any) -> ToMAConfig:
        """The named preset with some fields replaced. Raises `ConfigError` for an unknown preset."""
        if not isinstance(preset, str) or preset not in PRESETS:
            raise ConfigError(f"ToMA: preset is {shown(preset)}. Allowed: {', '.join(PRESETS)}. Choose one of them.")
        return replace(cls(), **{**PRESETS[preset], **overrides})


def field_spec(name: str) -> FieldSpec:
    """The `FieldSpec` of a field of `ToMAConfig`."""
    spec: FieldSpec = ToMAConfig.__dataclass_fields__[name].metadata["spec"]
    return spec


def field_default(name: str) -> Any:
    """The default of a field of `ToMAConfig`."""
    return ToMAConfig.__dataclass_fields__[name].default


def check(name: str, value: Any) -> Any:
    """The value as a field of `ToMAConfig` holds it (enum, int, float or bool). Raises `ConfigError`."""
    return checked(name, value, field_default(name), field_spec(name))


def _close(every: int, last: int) -> Mapping[str, Any]:
    """Settings that stay close to the unmerged picture. Flux runs one of `every` steps whole, which hands on its
    detail; a UNet its `last` stacks, which change most. Plans are made once for each resolution and live `every` steps,
    each in windows that lie elsewhere than those before."""
    plans = {"share": Share.LEVEL, "select_every": every, "weigh_every": every, "shift_windows": True}
    return {"unet_whole_last": last, "flux_whole_every": every, "detail_reuse": True, **plans}


# Nodes begin with the first. `faithful` follows the paper and its released code to the letter; the others leave as much
# whole as docs/fidelity.md found worth its time. `ratio` is the user's own choice and in no preset.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "balanced": _close(3, last=3),
    "faithful": {"granularity": Granularity.MODULE, "scale": 1000.0, "share": Share.LEVEL},
    "quality": _close(2, last=4),
    # The third last stack of a UNet is merged here, and plans of the first ones, of its resolution, do not suit it.
    "fast": {**_close(5, last=2), "share": Share.STACK, "flux_whole_double": 1, "flux_whole_single": 1},
}
