"""Define the field, range and default of every setting. Presets override the defaults; `locales` holds the tooltips."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

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
    """Raised for a value that cannot be used. The message names the setting, what is allowed and what to do."""


@dataclass(frozen=True)
class SettingSpec:
    """Default of a setting; for a number also its range (both ends allowed) and step."""

    default: Any
    minimum: float = 0.0
    maximum: float = 0.0
    step: float = 0.0
    internal: bool = field(default=False, kw_only=True)  # only presets set it; it is on no node


def option(default: Any, *bounds: float, internal: bool = False) -> Any:
    """Return a dataclass field with a `SettingSpec`. bounds: a number's minimum, maximum and step."""
    return field(default=default, metadata={"spec": SettingSpec(default, *bounds, internal=internal)})


def shown(value: Any) -> str:
    """Return a value as text for a message, on one line."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to write integers of thousands of digits
        text = f"a very large {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


class Granularity(str, Enum):
    """What runs between a merge and its unmerge: one module of a block, one block, or several consecutive blocks."""

    MODULE = "module"
    BLOCK = "block"
    STACK = "stack"


class KVCache(str, Enum):
    """Whether merged blocks attend to all tokens, and where cached keys and values lie. Members convert from and to
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
    """All settings of merging for one model, the same in all its runs. Strings are accepted for the enum fields, and a
    bool for `kv_cache`. The defaults merge every block at every step. Raises `ConfigError` on a refused value."""

    ratio: float = option(0.5, 0.0, 0.95, 0.05)  # share of the image tokens that is merged away; 0 switches ToMA off
    min_tokens: int = option(0, 0, 1_048_576, 1)  # token grids with fewer tokens are not merged; 0: see `cost_model`
    granularity: Granularity = option(Granularity.STACK)
    # How many blocks are not merged; a value below 1 is a share of all blocks.
    skip_first_blocks: float = option(0.0, 0.0, 1000.0, 0.05)
    skip_last_blocks: float = option(0.0, 0.0, 1000.0, 0.05)
    merge_references: bool = option(False)  # whether reference images are merged too, each on its own grid
    # Steps are merged only between these two fractions of the sampling process.
    start_percent: float = option(0.0, 0.0, 1.0, 0.01)
    end_percent: float = option(1.0, 0.0, 1.0, 0.01)
    full_step_interval: int = option(0, 0, 1000, 1)  # every Nth step is full, see `Schedule`; 0: none
    selection_interval: int = option(10, 1, 1000, 1)  # destinations are selected every N steps
    weight_interval: int = option(5, 1, 1000, 1, internal=True)  # merge weights are computed every N steps
    window_size: int = option(8, 2, 64, 1)  # side of a window in tokens
    sharpness: float = option(300.0, 1.0, 10_000.0, 10.0)  # of the softmax that gives merge weights
    kv_cache: KVCache = option(KVCache.OFF)

    def __post_init__(self) -> None:
        for item in fields(self):
            object.__setattr__(self, item.name, check(item.name, getattr(self, item.name)))
        if self.start_percent > self.end_percent:
            raise ConfigError(Refusal.START_AFTER_END(start=self.start_percent, end=self.end_percent))
        if self.full_step_interval == 1:
            raise ConfigError(Refusal.FULL_STEP_INTERVAL_ONE())

    @property
    def uses_cache(self) -> bool:
        """Whether full steps fill both caches, and merge plans are made from the predicted picture. With granularity
        `MODULE` nothing is cached: each module of a block would need an update of its own."""
        return bool(self.kv_cache) and self.full_step_interval > 0 and self.granularity is not Granularity.MODULE

    @property
    def off(self) -> bool:
        """Whether these settings never merge anything."""
        return self.ratio == 0.0 or self.start_percent == self.end_percent


def setting_spec(name: str) -> SettingSpec:
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
