import copy
import dataclasses
import pickle
from typing import Any

import pytest

from tests.loop import loop
from toma_core.config import ConfigError, Granularity, setting_spec
from toma_core.presets import PRESETS, ModelKind, UserSettings

OWN = {"balanced": {"skip_first_blocks": 0.15, "full_step_interval": 3}, "quality": {"granularity": "block"}}


@loop("preset", PRESETS)
def test_presets_are_valid_and_leave_the_ratio_alone(preset: str) -> None:
    assert list(PRESETS[preset]) == list(ModelKind)
    for kind, given in PRESETS[preset].items():
        config = UserSettings(preset).resolved(kind)
        assert "ratio" not in given
        changed = {name for name, value in vars(config).items() if value != setting_spec(name).default}
        assert changed <= set(given) <= set(vars(config)), "a preset lists what differs from the defaults"


@loop("preset", ["", "Balanced", "none", None, 3, ["quality"]])
def test_unknown_presets_are_refused(preset: Any) -> None:
    with pytest.raises(ConfigError, match=r"setting=preset, value=.*, choices=\(balanced, quality, paper\)"):
        UserSettings(preset)


def test_what_is_set_wins_over_the_model_and_that_over_the_preset() -> None:
    config = UserSettings("balanced", {"ratio": 0.3, "full_step_interval": 7}).resolved(own=OWN)
    assert (config.ratio, config.full_step_interval, config.skip_first_blocks) == (0.3, 7, 0.15)
    assert config.selection_interval == 3
    assert UserSettings("quality").resolved(own=OWN).granularity is Granularity.BLOCK
    assert UserSettings("quality").resolved().granularity is Granularity.STACK
    assert UserSettings("paper").resolved(own=OWN) == UserSettings("paper").resolved()


def test_windows_are_wider_where_few_tokens_are_kept() -> None:
    def side(kind: ModelKind = ModelKind.TRANSFORMER, **over: Any) -> int:
        return UserSettings("balanced", over).resolved(kind).window_size

    assert [side(ratio=ratio) for ratio in (0.5, 0.6, 0.2 * 3, 0.61, 0.75)] == [4, 4, 4, 8, 8]
    assert (side(ratio=0.75, window_size=4), side(ratio=0.75, window_size=16)) == (4, 16)
    assert side(ModelKind.UNET, ratio=0.5) == side(kv_cache=False, ratio=0.75, window_size=8) == 8


def test_values_are_refused_before_there_is_a_model() -> None:
    for over, why in (
        ({"window_size": 0}, "setting=window_size, value=0,"),
        ({"start_percent": 0.9, "end_percent": 0.8}, r"start_after_end: start=0\.9, end=0\.8"),
        ({"full_step_interval": 1}, "full_step_interval_one"),
    ):
        with pytest.raises(ConfigError, match=why):
            UserSettings("quality", over)
    with pytest.raises(TypeError, match="no_such_field"):
        UserSettings("quality", {"no_such_field": 1})


def test_off_is_known_before_there_is_a_model() -> None:
    assert UserSettings("balanced", {"ratio": 0}).off
    assert UserSettings("quality", {"start_percent": 0.4, "end_percent": 0.4}).off
    assert not UserSettings("paper").off


@loop("copied", [copy.copy, copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))])  # noqa: S301 - our own
def test_settings_are_frozen_and_can_be_copied(copied: Any) -> None:
    chosen = {"ratio": 0.25}
    settings = UserSettings("balanced", chosen)
    chosen["ratio"] = 0.75
    assert copied(settings) == settings == UserSettings("balanced", {"ratio": 0.25}) != UserSettings("balanced")
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.preset = "quality"  # type: ignore[misc]
    with pytest.raises(TypeError, match="not support item assignment"):
        copied(settings).overrides["ratio"] = 0.4
