"""Describe, check and refuse the value of a setting."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from .reasons import MessageError, MessageId


class Refusal(MessageId):
    """Why a value or a model is refused, and what to do. Comments describe the parameters of messages."""

    NOT_A_SWITCH = "not_a_switch"  # setting: its id; value: what was given
    OUT_OF_RANGE = "out_of_range"  # setting, value: as above; kind: of number; low, high: its range; usual: its default
    NOT_A_CHOICE = "not_a_choice"  # setting, value: as above; choices: the values that are allowed
    START_AFTER_END = "start_after_end"  # start, end: the two fractions
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
    """Default and help text of a setting; for a number also its range (both ends allowed) and step. internal: whether
    no node has the setting, only presets and comparisons set it."""

    default: Any
    tooltip: str
    minimum: float = 0.0
    maximum: float = 0.0
    step: float = 0.0
    internal: bool = field(default=False, kw_only=True)


def option(default: Any, tooltip: str, bounds: tuple[float, ...] = (), *, internal: bool = False) -> Any:
    """Return a dataclass field with this default. bounds: a number's minimum, maximum and step. internal: no node has
    the setting."""
    return field(default=default, metadata={"spec": SettingSpec(default, tooltip, *bounds, internal=internal)})


def checked(name: str, value: Any, spec: SettingSpec) -> Any:
    """Return the value in the type of the field's default (enum, int, float or bool). Raises `ConfigError` if the value
    is out of range."""
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
    # NaN is in no range. The message shows the value unrounded, because a value just beyond the limit must not read as
    # the limit itself.
    inside = number and spec.minimum <= value <= spec.maximum
    if not inside or (isinstance(default, int) and value != int(value)):
        limits = {"kind": kind, "low": spec.minimum, "high": spec.maximum, "usual": default}
        raise ConfigError(Refusal.OUT_OF_RANGE(setting=name, value=shown(value), **limits))
    return int(value) if isinstance(default, int) else float(value)


def shown(value: Any) -> str:
    """Return a value as text for a message, on one line."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to write integers of thousands of digits
        text = f"a very large {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"
