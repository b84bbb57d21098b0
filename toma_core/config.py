"""What a user can set, in one place: fields, ranges, defaults, tooltips. What a preset makes of them is in `presets`.

`ToMAConfig` is frozen: it rides on a model and is shared by every run of it. What changes during a run lives in
`state.RunState`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from .fields import ConfigError, FieldSpec, Refusal, checked, option


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


class PlanFrom(str, Enum):
    """What tokens are compared by, when destinations are selected and weighed."""

    TOKENS = "tokens"
    PREDICTION = "prediction"


@dataclass(frozen=True)
class ToMAConfig:
    """Every setting of the merge for one model. Raises `ConfigError` on a value outside its range.

    Strings are accepted for the enum fields. The defaults merge every block at every step; nodes begin with the
    `balanced` preset.
    """

    ratio: float = option(
        0.5,
        "Share of the image tokens that is merged away. 0.25 is careful, 0.5 the usual choice, 0.75 the fastest: "
        "hardly softer on SDXL, visibly on Flux and other transformers. 0 switches ToMA off.",
        (0.0, 0.95, 0.05),
    )
    min_tokens: int = option(
        0,
        "Token grids with fewer tokens than this stay unmerged, because merging them would cost more than it "
        "saves. 0 (Auto): 256 tokens, and on NVIDIA GPUs also grids with too little work to gain. Raise it if "
        "small images get slower.",
        (0, 1_048_576, 1),
    )
    granularity: Granularity = option(
        Granularity.STACK,
        "How long tokens stay merged. 'module': around each attention and feed-forward layer, as in the paper. "
        "'block': around each transformer block. 'stack': around each chain of transformer blocks, the fastest.",
    )
    whole_first: float = option(
        0.0,
        "How many of the first blocks stay unmerged, of each kind of block (in a UNet: stacks of blocks). Below 1: "
        "a share of them. The released code keeps 5 of each kind in Flux. Fewer is faster and less faithful.",
        (0.0, 1000.0, 0.05),
    )
    whole_last: float = option(
        0.0,
        "How many of the last stacks of a UNet stay unmerged. They form fine detail: with 3 of SDXL's 11 the "
        "picture is many times closer to the original than with 0, for a seventh of the speed gain. Below 1: a "
        "share of them. In other models: the last blocks.",
        (0.0, 1000.0, 0.05),
    )
    merge_references: bool = option(
        False,
        "Merge reference images too, each on its own grid. In editing models (Flux.1 Kontext, Flux.2, Krea 2, "
        "Qwen-Image-Edit) they are half to two thirds of the tokens. Unmerged they hold the speed back; merged "
        "they may be followed less closely.",
    )
    start_percent: float = option(
        0.0,
        "Merging starts at this share of the sampling process. 0: with the first step.",
        (0.0, 1.0, 0.01),
    )
    end_percent: float = option(
        1.0,
        "Merging stops at this share of the sampling process. 1: after the last step. With 0.7 to 0.9 the last "
        "steps restore fine detail and take their full time.",
        (0.0, 1.0, 0.01),
    )
    whole_every: int = option(
        0,
        "Every so many steps one runs in full, on all tokens: the first, and the last too. In Flux and other "
        "transformers 4 in 'balanced' and 2 in 'quality'. Merged steps start from what blocks added in the full step, "
        "which is much closer to the original, for some memory. 0: no step; else 2 or more.",
        (0, 1000, 1),
    )
    select_every: int = option(
        10,
        "Every so many steps it is decided anew which tokens stay. 10 in the paper; 3 is closer to the original. "
        "With full steps: as often as they come; where merged blocks look at all tokens: every step. Lower costs a "
        "little time.",
        (1, 1000, 1),
    )
    weigh_every: int = option(
        5,
        "Every so many steps it is computed anew how much each token counts where it is merged; 5 in the paper. "
        "Cheaper than deciding which stay.",
        (1, 1000, 1),
    )
    window_kind: WindowKind = option(
        WindowKind.TILE,
        "Tokens are picked and merged inside local windows. 'tile': squares, the best choice. 'stripe': bands over "
        "the full width. 'global': the whole image at once, very slow on large images.",
    )
    window_size: int = option(
        8,
        "Side of a window in tokens; stripes hold about its square. The presets have 8 in UNets "
        "and 4 in Flux and other transformers. 16 takes four times as long to pick.",
        (2, 64, 1),
    )
    scale: float = option(
        300.0,
        "Sharpness of the merge weights. High: each token goes into its nearest one only. Low: it is spread over "
        "several. The presets have 300 in UNets and 1000 in Flux and other transformers; below 50 is blurry.",
        (1.0, 10_000.0, 10.0),
    )
    plan_from: PlanFrom = option(
        PlanFrom.TOKENS,
        "What tokens are compared by. 'tokens': by themselves, as in the paper. 'prediction': by the picture that "
        "the previous step predicted, and busy parts of it keep more of them. That is much closer to the original in "
        "few steps; the first step then runs in full.",
    )
    all_keys: bool = option(
        False,
        "Merged blocks still look at all tokens of the picture. Much closer to the original, for memory: 2.9 GB in "
        "Flux.1 at 1024 x 1024, 7.9 GB in Wan 14B at 832 x 480 x 81, twice that with cfg above 1. Only with full "
        "steps. Does nothing in UNets, in ERNIE-Image and with granularity 'module'.",
    )

    def __post_init__(self) -> None:
        for item in fields(self):
            object.__setattr__(self, item.name, check(item.name, getattr(self, item.name)))
        if self.start_percent > self.end_percent:
            raise ConfigError(Refusal.START_AFTER_END(start=self.start_percent, end=self.end_percent))
        if self.whole_every == 1:
            raise ConfigError(Refusal.FULL_STEP_INTERVAL_ONE())

    @property
    def reuses_detail(self) -> bool:
        """Whether full steps keep what blocks add. Not around modules: that would be three activations a block."""
        return self.whole_every > 0 and self.granularity is not Granularity.MODULE

    @property
    def moves_windows(self) -> bool:
        """Whether every second selection is in windows that lie half a window further. Not as in the paper."""
        return self.granularity is not Granularity.MODULE

    @property
    def moves_budget(self) -> bool:
        """Whether windows with more in them keep more tokens: it takes a picture to tell."""
        return self.plan_from is PlanFrom.PREDICTION

    @property
    def off(self) -> bool:
        """True when nothing could ever be merged, whatever the model and the step."""
        return self.ratio == 0.0 or self.start_percent == self.end_percent


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


def so_many(amount: float, count: int) -> int:
    """How many of `count` blocks `whole_first` or `whole_last` means: below 1 a share of them, rounded up; from 1 on so
    many of them."""
    wanted = amount * count if amount < 1 else amount
    # What only rounding lifts above a whole number is that number.
    return min(count, math.ceil(wanted - 1e-9))
