"""Widgets made from the config's own metadata, so that a range, default or tooltip is written once."""

from __future__ import annotations

from enum import Enum
from typing import Any

from comfy_api.latest import io

from ..toma_core.config import PRESETS, field_default, field_spec

CATEGORY = "model/patch/ToMA"
SEARCH_ALIASES = ["token merging", "token merge", "tome", "toma", "speed up", "faster"]

# What most people may want to touch; the rest is folded away behind the node's advanced toggle.
_BASIC = ("ratio", "granularity", "start_percent", "end_percent", "selector", "window_size")


def widget(name: str, *, grouped: bool = False) -> Any:
    """The input widget for a field of `ToMAConfig`, set as in the first preset. grouped: show the field's group in
    front of its name."""
    spec, default = field_spec(name), next(iter(PRESETS.values())).get(name, field_default(name))
    label = name.replace("_", " ")
    common: dict[str, Any] = {
        "display_name": f"{spec.group.lower()}: {label}" if grouped else label,
        "tooltip": spec.tooltip,
        "advanced": True if grouped and name not in _BASIC else None,
    }
    if isinstance(default, Enum):
        options = [str(member.value) for member in type(default)]
        return io.Combo.Input(name, options=options, default=default.value, **common)
    if isinstance(default, bool):
        return io.Boolean.Input(name, default=default, **common)
    kind = io.Int if isinstance(default, int) else io.Float
    number = int if isinstance(default, int) else float
    limits = {"min": number(spec.minimum), "max": number(spec.maximum), "step": number(spec.step)}  # type: ignore[arg-type]
    return kind.Input(name, default=default, **limits, **common)
