"""Make the schemas of nodes. Only `ToMAConfig` has the ranges and defaults of settings, only `locales` the texts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Any

from comfy_api.latest import io

from ..toma_core.config import ToMAConfig, setting_spec
from ..toma_core.presets import PRESETS, ModelKind, UserSettings
from .adapters.report_text import label

# Read once: an update may replace the file while ComfyUI runs.
_TEXTS = json.loads((Path(__file__).parents[1] / "locales" / "en" / "nodeDefs.json").read_text(encoding="utf-8"))
_SEARCH_ALIASES = ["token merging", "token merge", "tome", "toma", "accelerate", "speed", "faster", "cache"]

_FRONT = ("skip_last_blocks", "full_step_interval", "end_percent")  # always shown; all other settings are advanced
# Widget values that leave a field to the preset: `_PRESET` in lists, `_UNSET` in numbers (no setting is negative).
_PRESET, _UNSET = "preset", -1
_SWITCH = {"on": True, "off": False}


def schema(node_id: str, inputs: list[Any], *outputs: Any, words: Sequence[str] = (), **more: Any) -> io.Schema:
    """Return a node's schema with its English texts. words: more search terms. more: arguments of `io.Schema`."""
    texts = _TEXTS[node_id]
    for item in inputs:
        item.tooltip = texts["inputs"][item.id]["tooltip"]
        if item.display_name is None and (name := texts["inputs"][item.id]["name"]) != item.id:
            item.display_name = name
    for item, text in zip(outputs, texts["outputs"].values(), strict=True):
        item.tooltip = text["tooltip"]
        item.display_name = text.get("name")
    names = {name: texts[name] for name in ("display_name", "description")}
    aliases = [*_SEARCH_ALIASES, *words]
    common = {"category": "model/patch/ToMA", "search_aliases": aliases, "hidden": [io.Hidden.unique_id]}
    return io.Schema(node_id=node_id, inputs=inputs, outputs=list(outputs), **names, **common, **more)


def ratio() -> Any:
    spec = setting_spec("ratio")
    limits = {"min": spec.minimum, "max": spec.maximum, "step": spec.step}
    return io.Float.Input("ratio", default=spec.default, display_name="ratio", **limits)


def preset() -> Any:
    return io.Combo.Input("preset", options=list(PRESETS), default=next(iter(PRESETS)))


def overrides() -> list[Any]:
    """Return an input for every field of `ToMAConfig` that a user may override, except `ratio`."""
    return [_override(name) for name in dict.fromkeys((*_FRONT, *_fields()))]


def overridden(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that the user has set. values: widgets' values by name; unknown names are ignored."""
    given = {name: values[name] for name in _fields() if name in values and _is_set(values[name])}
    return {name: _SWITCH.get(value, value) if isinstance(value, str) else value for name, value in given.items()}


def _fields() -> list[str]:
    return [f.name for f in fields(ToMAConfig) if f.name != "ratio" and not setting_spec(f.name).internal]


def _override(name: str) -> Any:
    spec = setting_spec(name)
    default = spec.default
    limits = [spec.minimum, spec.maximum, default.value if isinstance(default, Enum) else default]
    data = {"presets": {preset: _values(preset, name) for preset in PRESETS}, "limits": limits}
    common: dict[str, Any] = {"display_name": label(name), "extra_dict": data, "advanced": name not in _FRONT or None}
    if isinstance(default, (bool, Enum)):
        choices = _SWITCH if isinstance(default, bool) else [str(member.value) for member in type(default)]
        return io.Combo.Input(name, options=[_PRESET, *choices], default=_PRESET, **common)
    kind, number = (io.Int, int) if isinstance(default, int) else (io.Float, float)
    bounds = {"min": number(_UNSET), "max": number(spec.maximum), "step": number(spec.step)}
    return kind.Input(name, default=number(_UNSET), **bounds, **common)


def _values(preset: str, name: str) -> list[Any]:
    """Return a field's value in a preset, for UNets and, if different, for transformers. Before a run the page shows
    both values."""
    settings = UserSettings(preset)
    values = [getattr(settings.resolved(kind), name) for kind in (ModelKind.UNET, ModelKind.TRANSFORMER)]
    return list(dict.fromkeys(value.value if isinstance(value, Enum) else value for value in values))


def _is_set(value: Any) -> bool:
    # Test for any negative number, because the arrows of a widget turn -1 into -0.95. Compare only numbers and strings,
    # because a value from a link may be an object with its own `==`.
    if isinstance(value, (int, float)):
        return not value < 0
    return not isinstance(value, str) or value != _PRESET
