"""Presets with overrides: the resulting config for a model, and refused values."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest

from tests.loop import loop
from toma_core.config import Granularity, ToMAConfig, setting_spec
from toma_core.presets import PRESETS, ModelKind, Settings
from toma_core.settings import ConfigError

FIELDS = [item.name for item in dataclasses.fields(ToMAConfig)]
OWN = {"balanced": {"skip_first_blocks": 0.15, "full_step_interval": 3}, "quality": {"granularity": "block"}}


@loop("preset", PRESETS)
def test_presets_are_valid_and_leave_the_ratio_alone(preset: str) -> None:
    assert list(PRESETS[preset]) == list(ModelKind)
    for kind, given in PRESETS[preset].items():
        config = Settings(preset).resolved(kind)
        assert "ratio" not in given
        changed = {name for name in FIELDS if getattr(config, name) != setting_spec(name).default}
        assert changed <= set(given) <= set(FIELDS), "a preset lists what differs from the defaults"


def test_balanced_is_what_nodes_begin_with() -> None:
    assert next(iter(PRESETS)) == "balanced"


@loop("preset", ["", "Balanced", "none", None, 3, ["quality"]])
def test_unknown_presets_are_refused(preset: Any) -> None:
    with pytest.raises(ConfigError, match=r"preset is .* Allowed: balanced, quality, paper\. Choose"):
        Settings(preset)


def test_what_is_set_wins_over_the_model_and_that_over_the_preset() -> None:
    config = Settings("balanced", {"ratio": 0.3, "full_step_interval": 7}).resolved(own=OWN)
    assert (config.ratio, config.full_step_interval, config.skip_first_blocks) == (0.3, 7, 0.15)
    assert (config.selection_interval, config.uses_cache) == (3, True)
    assert Settings("quality").resolved(own=OWN).granularity is Granularity.BLOCK
    assert Settings("quality").resolved().granularity is Granularity.STACK
    assert Settings("paper").resolved(own=OWN) == Settings("paper").resolved()


def test_values_are_refused_before_there_is_a_model() -> None:
    with pytest.raises(ConfigError, match=r"window size is 0\."):
        Settings("quality", {"window_size": 0})
    with pytest.raises(ConfigError, match=r"Start percent \(0\.9\) is larger than end percent \(0\.8\)"):
        Settings("quality", {"start_percent": 0.9, "end_percent": 0.8})
    with pytest.raises(ConfigError, match="every step would be a full step"):
        Settings("balanced", {"full_step_interval": 1})
    with pytest.raises(TypeError, match="no_such_field"):
        Settings("quality", {"no_such_field": 1})


def test_off_is_known_before_there_is_a_model() -> None:
    assert Settings("balanced", {"ratio": 0}).off
    assert Settings("quality", {"start_percent": 0.4, "end_percent": 0.4}).off
    assert not Settings("paper").off


def test_frozen() -> None:
    chosen = {"ratio": 0.25}
    settings = Settings("balanced", chosen)
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.preset = "quality"  # type: ignore[misc]
    chosen["ratio"] = 0.75
    assert settings == Settings("balanced", {"ratio": 0.25}) != Settings("balanced")


@loop("copied", [copy.copy, copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))])  # noqa: S301 - our own
def test_settings_can_be_copied(copied: Any) -> None:
    settings = Settings("quality", {"ratio": 0.3})
    assert copied(settings) == settings
    with pytest.raises(TypeError, match="not support item assignment"):
        copied(settings).overrides["ratio"] = 0.4
