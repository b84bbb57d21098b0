"""Test the two nodes that apply ToMA: the settings that their widgets give, and errors for invalid values."""

import inspect
from dataclasses import fields
from enum import Enum
from typing import Any

import pytest

from scripts.comfy_pack import pack_module
from testbed import models
from tests.loop import loop

nodes = pack_module("nodes.toma")
config = pack_module("toma_core.config")
core = pack_module("toma_core")
run = pack_module("nodes.adapters.patch_model")
OWN = {"unet": (core.ModelKind.UNET,), "flux": (core.ModelKind.TRANSFORMER, {"paper": {"skip_first_blocks": 5}})}


def defaults(node: Any) -> dict[str, Any]:
    return {i.id: i.default for i in node.define_schema().inputs if i.id != "model"}


def made_by(node: Any, model: Any, **values: Any) -> Any:
    return config_of(node.execute(model, **{**defaults(node), **values}).args[0])


def config_of(model: Any) -> Any:
    return run.config_for(run.attachment_of(model).settings, model)


@pytest.mark.compat
@loop("kind", ["unet", "flux"])
@loop("preset", core.PRESETS)
def test_preset_is_as_the_model_has_it(request: pytest.FixtureRequest, kind: str, preset: str) -> None:
    # This Flux has as many blocks as Flux.1. In smaller models, `paper` skips a share of the blocks instead of five.
    model = request.getfixturevalue(kind) if kind == "unet" else models.flux(double=19, single=38)
    expected = core.UserSettings(preset, {"ratio": 0.4}).resolved(*OWN[kind])
    assert made_by(nodes.ToMA, model, ratio=0.4, preset=preset) == expected
    assert made_by(nodes.ToMAAdvanced, model, ratio=0.4, preset=preset) == expected


def test_advanced_hands_every_widget_over(flux: Any) -> None:
    other = {
        "ratio": 0.3, "min_tokens": 20, "granularity": "module", "skip_first_blocks": 0.25, "skip_last_blocks": 2,
        "merge_references": True, "start_percent": 0.1, "end_percent": 0.8, "full_step_interval": 5,
        "selection_interval": 4, "window_size": 16, "sharpness": 50.0, "kv_cache": "on the card only",
    }  # fmt: skip
    usual = defaults(nodes.ToMAAdvanced)
    assert other.keys() == usual.keys() - {"preset", "profile"}
    standard = made_by(nodes.ToMAAdvanced, flux)
    assert all(getattr(standard, name) != value for name, value in other.items())
    switched = {name: ("off", "on")[value] if isinstance(value, bool) else value for name, value in other.items()}
    made = made_by(nodes.ToMAAdvanced, flux, **switched)
    assert {name: getattr(made, name) for name in other} == other


def test_every_choice_is_taken(flux: Any) -> None:
    for item in nodes.ToMAAdvanced.define_schema().inputs[2:]:
        if choices := getattr(item, "options", None):
            assert choices[0] == item.default == "preset"
            made = [getattr(made_by(nodes.ToMAAdvanced, flux, **{item.id: choice}), item.id) for choice in choices]
            assert made[0] in made[1:]
            assert [value.value if isinstance(value, Enum) else value for value in made[1:]] == (
                [True, False] if choices[1:] == ["on", "off"] else choices[1:]
            )


def test_what_most_people_touch_is_in_front() -> None:
    inputs = nodes.ToMAAdvanced.define_schema().inputs[1:]
    assert [item.id for item in inputs if not item.advanced] == [
        "preset", "ratio", "skip_last_blocks", "full_step_interval", "end_percent",
    ]  # fmt: skip
    assert [bool(item.advanced) for item in inputs] == sorted(bool(item.advanced) for item in inputs)
    assert inputs[-1].id == "profile"


@pytest.mark.compat
def test_a_setting_that_is_no_more_is_passed_over(unet: Any) -> None:
    """A graph in API format may still have a removed setting. ComfyUI passes the setting to the node only if a link
    gives its value."""
    from execution import get_input_data

    saved = {"model": unet, **defaults(nodes.ToMAAdvanced), "unmerge": "pseudo-inverse"}
    handed = {name: value for name, (value,) in get_input_data(saved, nodes.ToMAAdvanced, "1")[0].items()}
    assert handed.keys() == saved.keys() - {"unmerge"}
    made = config_of(nodes.ToMAAdvanced.execute(**handed, unmerge="linked").args[0])
    assert made == made_by(nodes.ToMA, unet)


@loop(
    ("settings", "parts"),
    [
        ({"ratio": float("nan")}, ("ratio is nan", "0 to 0.95", "Try 0.5")),
        ({"window_size": 7.5}, ("window size is 7.5", "whole number", "2 to 64", "Try 8")),
        ({"start_percent": 0.8, "end_percent": 0.2}, ("Start percent (0.8)", "end percent (0.2)", "Lower start")),
        ({"full_step_interval": 1}, ("full step interval is 1", "0 (never) or 2", "set the ratio to 0")),
        ({"granularity": "layer"}, ("granularity is 'layer'", "module, block, stack", "Choose one")),
        ({"kv_cache": 3}, ("KV cache is 3", "on, on the card only, off")),
    ],
)
def test_bad_value_names_field_range_and_fix(unet: Any, settings: Any, parts: tuple[str, ...]) -> None:
    with pytest.raises(config.ConfigError) as refused:
        nodes.ToMAAdvanced.execute(unet, **{**defaults(nodes.ToMAAdvanced), **settings})
    for part in ("ToMA: ", *parts):
        assert part in str(refused.value)


# Settings of ToMA Advanced, each with a number that is too small. The widgets' ranges begin at -1 (the preset's value),
# so they cannot exclude these numbers.
TOO_SMALL = {"full_step_interval": 1, "selection_interval": 0, "window_size": 1, "sharpness": 0.5}


@pytest.mark.compat
def test_a_number_out_of_range_is_refused_before_the_prompt_runs() -> None:
    """Numbers that come over a link are not known yet, so ComfyUI does not pass them to `validate_inputs`."""
    for ratio in (1.5, -0.1, float("nan")):
        assert f"ratio is {ratio}. Allowed: a number from 0 to 0.95" in nodes.ToMA.validate_inputs(ratio=ratio)
    assert nodes.ToMA.validate_inputs(ratio=0.95) is True
    assert nodes.ToMA.validate_inputs() is True
    validate = nodes.ToMAAdvanced.validate_inputs
    assert "Lower start percent" in validate(start_percent=0.8, end_percent=0.2)
    assert "end percent is 1.5" in validate(start_percent=-1, end_percent=1.5)
    assert validate(start_percent=0.8, end_percent=-1) is True, "the preset's end is 1"
    assert validate(end_percent=0.2) is True
    assert validate(**dict.fromkeys(TOO_SMALL, -1)) is True, "all are the preset's"
    for name, value in TOO_SMALL.items():
        refused = validate(**{name: value})
        assert f"{name.replace('_', ' ')} is {value}" in refused
        assert "Allowed: " in refused


def test_every_number_that_the_widgets_range_does_not_check_is_validated() -> None:
    specs = {item.name: item.metadata["spec"] for item in fields(config.ToMAConfig)}
    unchecked = {name for name, spec in specs.items() if spec.minimum > 0 and not spec.internal}
    assert {*unchecked, "full_step_interval"} == {*TOO_SMALL}
    found = inspect.signature(nodes.ToMAAdvanced.validate_inputs).parameters.keys()
    assert found == {"start_percent", "end_percent", *TOO_SMALL}


@loop("value", [-1, -1.0, -0.95, -0.99, "preset"])
def test_negative_numbers_leave_a_field_to_the_preset(unet: Any, value: Any) -> None:
    """A click on a widget's arrow turns -1 into -0.95. Like -1, -0.95 stands for the preset's value."""
    name = "granularity" if value == "preset" else "skip_last_blocks"
    assert made_by(nodes.ToMAAdvanced, unet, **{name: value}) == made_by(nodes.ToMAAdvanced, unet)
