"""Test that the table of presets is valid for every kind of model and contains no ratio."""

from __future__ import annotations

import dataclasses

from tests.loop import loop
from toma_core.config import ToMAConfig, setting_spec
from toma_core.presets import PRESETS, ModelKind
from toma_core.user_settings import UserSettings

FIELDS = [item.name for item in dataclasses.fields(ToMAConfig)]


@loop("preset", PRESETS)
def test_presets_are_valid_and_leave_the_ratio_alone(preset: str) -> None:
    assert list(PRESETS[preset]) == list(ModelKind)
    for kind, given in PRESETS[preset].items():
        config = UserSettings(preset).resolved(kind)
        assert "ratio" not in given
        changed = {name for name in FIELDS if getattr(config, name) != setting_spec(name).default}
        assert changed <= set(given) <= set(FIELDS), "a preset lists what differs from the defaults"


def test_balanced_is_what_nodes_begin_with() -> None:
    assert next(iter(PRESETS)) == "balanced"
