"""Define the field, range, default and tooltip of every setting. Presets override the defaults."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, NamedTuple

from .reasons import MessageError, MessageId


class Refusal(MessageId):
    """Why a value or a model is refused, and what to do. Comments describe the parameters of messages."""

    NOT_A_SWITCH = "not_a_switch"  # setting: id of the setting; value: the refused value
    OUT_OF_RANGE = "out_of_range"  # setting, value: as above; kind: of number; low, high: the range; usual: the default
    NOT_A_CHOICE = "not_a_choice"  # setting, value: as above; choices: the values that are allowed
    START_AFTER_END = "start_after_end"  # start, end: values of `start_percent` and `end_percent`
    FULL_STEP_INTERVAL_ONE = "full_step_interval_one"
    A_NUMBER = "a_number"
    A_WHOLE_NUMBER = "a_whole_number"
    # Profiles.
    PROFILE_NOT_TEXT = "profile_not_text"
    PROFILE_DAMAGED = "profile_damaged"  # what: the damage, in English
    PROFILE_OTHER_MODEL = "profile_other_model"  # made, model: fingerprints of the profile's model and of this model
    PROFILE_NEWER = "profile_newer"  # schema: version of the profile; known: the newest version that can be read
    PROFILE_UNUSED = "profile_unused"  # problem: a message


class ConfigError(MessageError):
    """A value that cannot be used. The message names the setting, what is allowed and what to do."""


@dataclass(frozen=True)
class SettingSpec:
    """Default and help text of a setting; for a number also its range (both ends allowed) and step."""

    default: Any
    tooltip: str
    minimum: float = 0.0
    maximum: float = 0.0
    step: float = 0.0
    internal: bool = field(default=False, kw_only=True)  # only presets set it; it is on no node


def option(default: Any, tooltip: str, bounds: tuple[float, ...] = (), *, internal: bool = False) -> Any:
    """Return a dataclass field with a `SettingSpec`. bounds: a number's minimum, maximum and step."""
    return field(default=default, metadata={"spec": SettingSpec(default, tooltip, *bounds, internal=internal)})


def shown(value: Any) -> str:
    """Return a value as text for a message, on one line."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to write integers of thousands of digits
        text = f"a very large {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


class Granularity(str, Enum):
    """How much of a transformer runs on merged tokens between one merge and its unmerge."""

    MODULE = "module"
    BLOCK = "block"
    STACK = "stack"


class SimilarityFrom(str, Enum):
    """The values by which tokens are compared when destinations are selected and merge weights are computed."""

    TOKENS = "tokens"
    PREDICTION = "prediction"


class RatioAdvice(NamedTuple):
    """The ratios that tooltips, templates and pages recommend for a kind of model."""

    careful: float
    usual: float
    most: float


# In UNets, `most` is the highest ratio that was measured. In transformers, merging at a ratio above `most` has a larger
# error than an unmerged run of fewer steps with the same work (docs/fidelity.md).
UNET_RATIOS = RatioAdvice(0.25, 0.5, 0.75)
TRANSFORMER_RATIOS = RatioAdvice(0.25, 0.5, 0.6)


class KVCache(str, Enum):
    """Whether merged blocks attend to all tokens, and where cached keys and values may lie. Converts from and to
    bool."""

    ON = "on"
    CARD_ONLY = "on the card only"
    OFF = "off"

    @classmethod
    def _missing_(cls, value: object) -> KVCache | None:
        return (cls.ON if value else cls.OFF) if isinstance(value, bool) else None

    def __bool__(self) -> bool:
        return self is not KVCache.OFF


@dataclass(frozen=True)
class ToMAConfig:
    """Every setting of the merge for one model, shared by its runs. Strings are accepted for the enum fields, and a
    bool for `kv_cache`. The defaults merge every block at every step. Raises `ConfigError` on a refused value."""

    ratio: float = option(
        UNET_RATIOS.usual,
        f"Share of the image tokens that is merged away. {UNET_RATIOS.careful} is careful, {UNET_RATIOS.usual} the "
        f"usual choice. For more speed at most {UNET_RATIOS.most} in SDXL and other UNets, {TRANSFORMER_RATIOS.most} "
        "in Flux and other transformers. 0 switches ToMA off.",
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
        "How long tokens stay merged. 'module': around each attention and feed-forward layer, as in the paper, in "
        "UNets; elsewhere as 'block'. 'block': around each transformer block. 'stack': around each chain of "
        "transformer blocks, the fastest.",
    )
    skip_first_blocks: float = option(
        0.0,
        "Number of first blocks of each kind that are not merged (UNet: stacks of blocks). Below 1: a fraction of "
        "them. The authors' code skips 5 of each kind in Flux. Skipping fewer is faster and less accurate.",
        (0.0, 1000.0, 0.05),
    )
    skip_last_blocks: float = option(
        0.0,
        "Number of last blocks that are not merged (UNet: stacks of blocks). Below 1: a fraction of them. In SDXL "
        "they form fine detail: skipping 3 of 11 instead of 0 cuts the error many times for a seventh of the gain.",
        (0.0, 1000.0, 0.05),
    )
    merge_references: bool = option(
        False,
        "Merge reference images too, each on its own grid. In editing models (Flux.1 Kontext, Flux.2, Krea 2, "
        "Qwen-Image-Edit) they are half to two thirds of the tokens; those of Qwen-Image 2.1 are never merged. Not "
        "merged, they limit the gain; merged, the model may follow them less closely.",
    )
    start_percent: float = option(
        0.0, "Start merging at this fraction of the sampling process. 0: at the first step.", (0.0, 1.0, 0.01)
    )
    end_percent: float = option(
        1.0,
        "Stop merging at this fraction of the sampling process. 1: after the last step. With 0.7 to 0.9 the last "
        "steps are full: they restore fine detail and take their full time.",
        (0.0, 1.0, 0.01),
    )
    full_step_interval: int = option(
        0,
        "Run every Nth step on all tokens; the first and the last step are always full. Full steps refresh the caches "
        "that keep merged steps accurate, for some memory. 0: no full steps; else 2 or more.",
        (0, 1000, 1),
    )
    selection_interval: int = option(
        10,
        "Select new destination tokens every N steps. Fewer steps are more accurate and cost a little time.",
        (1, 1000, 1),
    )
    weight_interval: int = option(
        5,
        "Compute new merge weights every N steps. Cheaper than a selection.",
        (1, 1000, 1),
        internal=True,
    )
    window_size: int = option(
        8,
        "Side of a window in tokens. Selection in windows of twice the side takes four times as long.",
        (2, 64, 1),
    )
    sharpness: float = option(
        300.0,
        "Sharpness of the merge weights. High: each token is merged into its most similar destination only. Low: into "
        "several; below 50 is blurry.",
        (1.0, 10_000.0, 10.0),
    )
    similarity_from: SimilarityFrom = option(
        SimilarityFrom.TOKENS,
        "What tokens are compared by. 'tokens': the tokens themselves, as in the paper. 'prediction': the picture that "
        "the previous step predicted, and detailed parts of it keep more tokens. More accurate in few steps; the first "
        "step is then full.",
    )
    kv_cache: KVCache = option(
        KVCache.OFF,
        "Merged blocks attend to all tokens: full steps cache keys and values, merged steps update them. Much more "
        "accurate, for memory: 2.9 GB in Flux.1 at 1024 x 1024, 7.9 GB in Wan 14B at 832 x 480 x 81, twice that with "
        "cfg above 1. What does not fit on the card lies in main memory, except with 'on the card only'. Needs full "
        "steps. No effect in UNets, in ERNIE-Image and with granularity 'module'.",
    )

    def __post_init__(self) -> None:
        for item in fields(self):
            object.__setattr__(self, item.name, check(item.name, getattr(self, item.name)))
        if self.start_percent > self.end_percent:
            raise ConfigError(Refusal.START_AFTER_END(start=self.start_percent, end=self.end_percent))
        if self.full_step_interval == 1:
            raise ConfigError(Refusal.FULL_STEP_INTERVAL_ONE())

    @property
    def uses_cache(self) -> bool:
        """Whether full steps cache updates. With granularity `MODULE` they do not: a block would need three entries."""
        return self.full_step_interval > 0 and self.granularity is not Granularity.MODULE

    @property
    def uses_prediction(self) -> bool:
        """Whether merge plans are made from the predicted picture and leave more tokens in windows with more detail."""
        return self.similarity_from is SimilarityFrom.PREDICTION

    @property
    def off(self) -> bool:
        """Whether nothing can be merged, whatever the model and the step."""
        return self.ratio == 0.0 or self.start_percent == self.end_percent


def setting_spec(name: str) -> SettingSpec:
    """Return the `SettingSpec` of a field of `ToMAConfig`."""
    spec: SettingSpec = ToMAConfig.__dataclass_fields__[name].metadata["spec"]
    return spec


def check(name: str, value: Any) -> Any:
    """Return a value of the setting `name` in the setting's type: enum, int, float or bool. Raises `ConfigError`."""
    spec = setting_spec(name)
    default = spec.default
    if isinstance(default, Enum):
        try:
            return type(default)(value)
        except ValueError:
            choices = tuple(str(member.value) for member in type(default))
            raise ConfigError(Refusal.NOT_A_CHOICE(setting=name, value=shown(value), choices=choices)) from None
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise ConfigError(Refusal.NOT_A_SWITCH(setting=name, value=shown(value)))
        return value
    kind = Refusal.A_WHOLE_NUMBER() if isinstance(default, int) else Refusal.A_NUMBER()
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    inside = number and spec.minimum <= value <= spec.maximum  # NaN is in no range
    if not inside or (isinstance(default, int) and value != int(value)):
        limits = {"kind": kind, "low": spec.minimum, "high": spec.maximum, "usual": default}
        raise ConfigError(Refusal.OUT_OF_RANGE(setting=name, value=shown(value), **limits))
    return int(value) if isinstance(default, int) else float(value)


def resolve_count(amount: float, count: int) -> int:
    """Return how many of `count` blocks are skipped. amount: the value of `skip_first_blocks` or `skip_last_blocks`; a
    value below 1 is a share of the blocks, rounded up."""
    wanted = amount * count if amount < 1 else amount
    return min(count, math.ceil(wanted - 1e-9))  # an excess of less than 1e-9 is a rounding error
