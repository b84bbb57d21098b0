"""The two nodes that attach ToMA: what they make of their widgets, and what they say about bad values."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from benchmarks import models
from scripts.comfy_pack import pack_module

nodes = pack_module("nodes.patch")
config = pack_module("toma_core.config")
run = pack_module("nodes.adapters.run")


def defaults(node: Any) -> dict[str, Any]:
    return {i.id: i.default for i in node.define_schema().inputs if i.id != "model"}


@pytest.mark.compat
def test_toma_attaches_ratio_and_preset(unet: Any) -> None:
    for preset in config.PRESETS:
        patched = nodes.ToMA.execute(unet, 0.4, preset).args[0]
        assert run.attachment_of(patched).config == config.ToMAConfig.from_preset(preset, ratio=0.4)
    assert nodes.ToMA.execute(unet, 0.0, "balanced").args[0] is unet


@pytest.mark.compat
def test_advanced_with_its_defaults_is_the_balanced_preset(unet: Any) -> None:
    patched = nodes.ToMAAdvanced.execute(unet, **defaults(nodes.ToMAAdvanced)).args[0]
    assert run.attachment_of(patched).config == config.ToMAConfig.from_preset("balanced", ratio=0.5)
    simple = nodes.ToMA.execute(unet, **defaults(nodes.ToMA)).args[0]
    latents = [models.sample(model, 32, 32, steps=4) for model in (unet, simple, patched)]
    assert torch.equal(*latents[1:])
    assert not torch.equal(*latents[:2])


def test_advanced_hands_every_widget_over(unet: Any) -> None:
    other = {
        "ratio": 0.3, "ratio_decay": 0.1, "min_tokens": 20, "granularity": "module", "self_attention": False,
        "cross_attention": False, "feed_forward": False, "levels": "finest", "unet_whole_last": 1,
        "flux_whole_double": 2, "flux_whole_single": 3, "start_percent": 0.1, "end_percent": 0.8,
        "unet_whole_every": 4, "flux_whole_every": 5,
        "select_every": 4, "weigh_every": 2, "selector": "random", "window_kind": "stripe", "window_size": 4,
        "shift_windows": False, "scale": 50.0, "share": "block", "random_seed": 7,
        "detail_reuse": False,
    }  # fmt: skip
    usual = defaults(nodes.ToMAAdvanced)
    assert other.keys() <= usual.keys()
    assert all(usual[name] != value for name, value in other.items())
    made = run.attachment_of(nodes.ToMAAdvanced.execute(unet, **{**usual, **other}).args[0]).config
    assert {name: getattr(made, name) for name in other} == other


@pytest.mark.compat
def test_a_setting_that_is_no_more_is_passed_over(unet: Any) -> None:
    """A graph in API format may still name it: ComfyUI hands over what the node has inputs for, and all links."""
    from execution import get_input_data

    saved = {"model": unet, **defaults(nodes.ToMAAdvanced), "unmerge": "pseudo-inverse"}
    handed = {name: value for name, (value,) in get_input_data(saved, nodes.ToMAAdvanced, "1")[0].items()}
    assert handed.keys() == saved.keys() - {"unmerge"}
    made = run.attachment_of(nodes.ToMAAdvanced.execute(**handed, unmerge="linked").args[0]).config
    assert made == config.ToMAConfig.from_preset("balanced", ratio=0.5)


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"ratio": 1.5}, ("ratio is 1.5", "0 to 0.95", "Try 0.5")),
        ({"ratio": -0.1}, ("ratio is -0.1", "0 to 0.95", "Try 0.5")),
        ({"ratio": float("nan")}, ("ratio is nan", "0 to 0.95", "Try 0.5")),
        ({"ratio": float("inf")}, ("ratio is inf", "0 to 0.95", "Try 0.5")),
        ({"ratio": "half"}, ("ratio is 'half'", "0 to 0.95", "Try 0.5")),
        ({"window_size": 0}, ("window_size is 0", "2 to 64", "Try 8")),
        ({"window_size": 7.5}, ("window_size is 7.5", "whole number", "Try 8")),
        (
            {"start_percent": 0.8, "end_percent": 0.2},
            ("start_percent (0.8)", "end_percent (0.2)", "lower start_percent"),
        ),
        ({"unet_whole_every": 1}, ("unet_whole_every is 1", "0 (never) or 2", "set ratio to 0")),
        ({"flux_whole_every": 1}, ("flux_whole_every is 1", "0 (never) or 2", "set ratio to 0")),
        ({"granularity": "layer"}, ("granularity is 'layer'", "module, block, stack", "Choose one")),
        ({"shift_windows": 3}, ("shift_windows is 3", "true or false", "Set one")),
    ],
)
def test_bad_value_names_field_range_and_fix(unet: Any, settings: Any, parts: tuple[str, ...]) -> None:
    with pytest.raises(config.ConfigError) as refused:
        nodes.ToMAAdvanced.execute(unet, **{**defaults(nodes.ToMAAdvanced), **settings})
    for part in ("ToMA: ", *parts):
        assert part in str(refused.value)


@pytest.mark.compat
@pytest.mark.parametrize("ratio", [1.5, -0.1, float("nan")])
def test_ratio_is_refused_before_the_prompt_runs(ratio: float) -> None:
    answer = nodes.ToMA.validate_inputs(ratio=ratio)
    assert isinstance(answer, str)
    assert "ratio is" in answer
    assert "0 to 0.95" in answer
    assert nodes.ToMA.validate_inputs(ratio=0.95) is True
    assert nodes.ToMA.validate_inputs() is True, "a ratio that comes over a link is not known yet"


def test_unknown_preset_lists_the_known_ones(unet: Any) -> None:
    with pytest.raises(config.ConfigError, match=r"preset is 'best'.*balanced, faithful, quality, fast"):
        nodes.ToMA.execute(unet, 0.5, "best")


@pytest.mark.compat
def test_unsupported_model_says_what_is_supported(stranger: Any) -> None:
    for call in (
        lambda: nodes.ToMA.execute(stranger, 0.5, "balanced"),
        lambda: nodes.ToMAAdvanced.execute(stranger, **defaults(nodes.ToMAAdvanced)),
    ):
        with pytest.raises(ValueError, match=r"MMDiT.*Supported: UNet.*Flux"):
            call()


def test_nothing_is_kept_between_executions() -> None:
    """ComfyUI caches the patched model and hands it to the next run: the nodes themselves hold no state."""
    for node in (nodes.ToMA, nodes.ToMAAdvanced):
        assert not [n for n, v in vars(node).items() if isinstance(v, (list, dict, set)) and not n.startswith("_")]
        assert not inspect.signature(node.execute).parameters.get("self")
