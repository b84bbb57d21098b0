"""Make widgets from the metadata of `ToMAConfig`, so that ranges, defaults and tooltips are written only there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from enum import Enum
from typing import Any

from comfy_api.latest import io

from ..toma_core.config import ToMAConfig, setting_spec
from ..toma_core.presets import PRESETS, ModelKind
from ..toma_core.user_settings import UserSettings
from .adapters.report_text import label

CATEGORY = "model/patch/ToMA"
SEARCH_ALIASES = ["token merging", "token merge", "tome", "toma", "accelerate", "speed", "faster", "cache"]

_FRONT = ("skip_last_blocks", "full_step_interval", "end_percent")  # always shown; all other settings are advanced
# Values that leave a field to the preset: `_PRESET` in lists and switches, `_UNSET` in numbers, because no number of a
# config is negative.
_PRESET, _UNSET = "preset", -1
_SWITCH = {"on": True, "off": False}


def ratio() -> Any:
    """Return the input for the share of tokens that is merged away."""
    spec = setting_spec("ratio")
    limits = {"min": spec.minimum, "max": spec.maximum, "step": spec.step}
    return io.Float.Input("ratio", default=spec.default, tooltip=spec.tooltip, display_name="ratio", **limits)


def preset() -> Any:
    """Return the input that selects a preset by its name."""
    return io.Combo.Input(
        "preset",
        options=list(PRESETS),
        default=next(iter(PRESETS)),
        tooltip="balanced: the usual choice. quality: merges less, closer to the original. In Flux and other "
        "transformers some steps run in full, and merged blocks attend to all tokens, which takes memory. "
        "paper: the paper's own settings, at every step. To be faster, raise the ratio.",
    )


def profile() -> Any:
    """Return the input for the text of a profile, which is saved in the workflow."""
    return io.String.Input(
        "profile",
        default="",
        optional=True,
        advanced=True,
        tooltip="What ToMA Calibrate found out about this model: connect its profile output, or paste the text so that "
        "the workflow carries it. It says how much is merged where; ratio and preset then do nothing, but a ratio of "
        "0 is still off. Empty, damaged or of another model: the preset runs.",
    )


def overrides() -> list[Any]:
    """Return an input for every field of `ToMAConfig` except `ratio` and internal fields. An input that is not set
    stands for the preset's value."""
    return [_override(name) for name in dict.fromkeys((*_FRONT, *_fields()))]


def overridden(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that the user has set, by name. values: the widgets' values, by name; names that are no field,
    as in workflows of an older version, are ignored."""
    given = {name: values[name] for name in _fields() if name in values and _is_set(values[name])}
    return {name: _SWITCH.get(value, value) if isinstance(value, str) else value for name, value in given.items()}


def _fields() -> list[str]:
    names = [field.name for field in fields(ToMAConfig) if field.name != "ratio"]
    return [name for name in names if not setting_spec(name).internal]


def _override(name: str) -> Any:
    spec = setting_spec(name)
    default = spec.default
    common: dict[str, Any] = {"display_name": label(name), "advanced": None if name in _FRONT else True}
    limits = [spec.minimum, spec.maximum, default.value if isinstance(default, Enum) else default]
    common["extra_dict"] = {"presets": {preset: _values(preset, name) for preset in PRESETS}, "limits": limits}
    if isinstance(default, (bool, Enum)):
        choices = _SWITCH if isinstance(default, bool) else [str(member.value) for member in type(default)]
        tooltip = f"{spec.tooltip} '{_PRESET}': the preset's value for this model."
        return io.Combo.Input(name, options=[_PRESET, *choices], default=_PRESET, tooltip=tooltip, **common)
    kind, number = (io.Int, int) if isinstance(default, int) else (io.Float, float)
    bounds = {"min": number(_UNSET), "max": number(spec.maximum), "step": number(spec.step)}
    tooltip = f"{spec.tooltip} {_UNSET}: the preset's value for this model."
    return kind.Input(name, default=number(_UNSET), tooltip=tooltip, **bounds, **common)


def _values(preset: str, name: str) -> list[Any]:
    """Return the values of a field in a preset, for UNets and for transformers: the page shows both until a run reveals
    the kind of the model."""
    kinds = ModelKind.UNET, ModelKind.TRANSFORMER
    values = [getattr(UserSettings(preset).resolved(kind), name) for kind in kinds]
    return list(dict.fromkeys(value.value if isinstance(value, Enum) else value for value in values))


def _is_set(value: Any) -> bool:
    # Test for any negative number, because the arrows of a widget turn -1 into -0.95. Compare only numbers and strings,
    # because a value from a link may be an object with its own `==`.
    if isinstance(value, (int, float)):
        return not value < 0
    return not isinstance(value, str) or value != _PRESET
