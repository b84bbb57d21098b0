"""Test the calibration node on real models: its profiles and texts."""

from __future__ import annotations

import dataclasses
import json
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from scripts.comfy_pack import pack_module
from testbed import models
from tests.loop import loop

calibrate = pack_module("nodes.calibrate")
patch = pack_module("nodes.toma")
run = pack_module("nodes.adapters.patch_model")
profiles, registry = pack_module("toma_core.profile"), pack_module("nodes.adapters.registry")
report_text = pack_module("nodes.adapters.report_text")
Node = calibrate.ToMACalibrate
STEPS = 4


def call(model: Any, side: int = 40, **inputs: Any) -> tuple[Any, str, torch.Tensor, Any]:
    given = {
        "latent": {"samples": torch.zeros(1, 4, side, side)},
        "target": "balanced", "steps": STEPS, "cfg": 3.0, "sampler_name": "euler", "scheduler": "simple",
        "negative": models.conditioning(model, seed=2), "positive": models.conditioning(model, seed=1), **inputs,
    }  # fmt: skip
    answer = Node.execute(model, **given)
    return (*answer.args, answer)


@pytest.fixture
def calibrated(previews: None) -> Any:
    """calibrated(model, **inputs): return the node's outputs (model, profile, picture) and its complete result."""
    return call


@pytest.fixture(scope="module")
def plain_profile(unet: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the small UNet's profile for the default inputs of `call`."""
    import folder_paths

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folder_paths, "temp_directory", str(tmp_path_factory.mktemp("previews")))
        return call(unet)[1]


def sampled(model: Any, side: int = 40) -> torch.Tensor:
    return models.sample(model, side, side, steps=3)


@pytest.mark.compat
def test_gives_out_what_it_found(unet: Any, calibrated: Any, no_state_left: None) -> None:
    model, text, picture, answer = calibrated(unet)
    assert picture.shape[0] == 1
    assert 0 <= picture.min() <= picture.max() <= 1
    assert len(answer.ui["images"]) == 1
    said = answer.ui["toma"][0]["text"]
    assert said.startswith(("Less error for the same work: 0.", "The preset 'balanced' is kept: "))
    assert "The preset 'balanced' at ratio 0.5: error 0." in said
    assert any(any(ratios) for ratios in profiles.parsed(text).ratios.values())
    assert len(text.encode()) <= 2000
    # A ToMA node that receives the profile gives the same latents as the calibration node's model.
    again = patch.ToMA.execute(unet, 0.5, "quality", text).args[0]
    assert run.attachment_of(again).ratio_schedule
    assert torch.equal(sampled(again), sampled(patch.ToMAAdvanced.execute(unet, **advanced(profile=text)).args[0]))
    assert torch.equal(sampled(again), sampled(model))


def advanced(**values: Any) -> dict[str, Any]:
    usual = {i.id: i.default for i in patch.ToMAAdvanced.define_schema().inputs if i.id != "model"}
    return {**usual, **values}


def found_profile(model: Any) -> str:
    """Return a valid profile for the model, without calibration."""
    first, *_ = registry.blocks_of(model)
    config = pack_module("toma_core").ToMAConfig()
    return profiles.Profile(registry.fingerprint(model), config, (2.0, 0.0), {first.name: (0.75, 0.5)}).text()


def test_small_grids_have_nothing_to_merge(unet: Any, calibrated: Any) -> None:
    model, text, _, answer = calibrated(unet, side=16)
    assert text == ""
    assert answer.ui["toma"][0]["text"].startswith("Nothing can be merged here")
    assert torch.equal(sampled(model, 16), sampled(unet, 16))


def test_a_prompt_that_begins_later(unet: Any, calibrated: Any) -> None:
    late = models.conditioning(unet, seed=1, start_percent=0.3, end_percent=1.0)
    _, text, _, _ = calibrated(unet, steps=8, positive=late)
    assert profiles.parsed(text).ratios


def test_a_word_that_is_none_is_refused(unet: Any, calibrated: Any) -> None:
    error = pack_module("toma_core.config").ConfigError
    with pytest.raises(error, match=r"target is 'nope'\. Allowed: quality, balanced, fast\. Choose one"):
        calibrated(unet, target="nope")


def test_another_node_that_answers_for_the_sampler(unet: Any, calibrated: Any) -> None:
    """The other node evaluates the model without ToMA's wrappers."""
    import comfy.samplers

    odd = unet.clone()
    odd.model_options["sampler_calc_cond_batch_function"] = lambda given: comfy.samplers._calc_cond_batch(
        given["model"], given["conds"], given["input"], given["sigma"], given["model_options"]
    )
    _, text, _, answer = calibrated(odd)
    assert "another node answers for the model" in answer.ui["toma"][0]["text"]
    assert text == ""


def test_a_step_cache_is_left_out_of_measuring_only(unet: Any, calibrated: Any, plain_profile: str) -> None:
    from comfy_extras.nodes_easycache import EasyCacheNode

    cached = EasyCacheNode.execute(unet, 3.0, 0.0, 1.0, False).args[0]
    model, text, _, _ = calibrated(cached)
    assert text == plain_profile
    assert model.get_wrappers("diffusion_model", "easycache")


def wrapped(model: Any, wrapper: Any) -> Any:
    model = model.clone()
    model.add_wrapper_with_key("diffusion_model", "another", wrapper)
    return model


def test_a_step_cache_of_another_pack(unet: Any, calibrated: Any) -> None:
    held: list[torch.Tensor] = []

    def cached(executor: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not held or len(held[0]) < len(x):
            held[:] = [executor(x, *args, **kwargs)]
        return held[0][: len(x)].clone()

    _, text, _, answer = calibrated(wrapped(unet, cached))
    said = answer.ui["toma"][0]["text"]
    assert not text or "is kept" in said


@loop("merged_too", [True, False])
def test_values_that_are_no_numbers(unet: Any, calibrated: Any, merged_too: bool) -> None:
    """NaN comes from every evaluation, or only from evaluations with merged blocks."""

    def broken(executor: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        out = executor(x, *args, **kwargs)
        merges = any("forward" in vars(m) for m in unet.model.diffusion_model.modules())
        return out * float("nan") if merged_too or merges else out

    model, text, picture, answer = calibrated(wrapped(unet, broken))
    said = answer.ui["toma"][0]["text"]
    assert said.startswith("Nothing was measured" if merged_too else "Nothing is merged")
    assert "NaN" in said
    assert text == ""
    assert picture.isfinite().all()
    assert run.attachment_of(model) is None


def test_cancelled_without_a_trace(
    unet: Any, calibrated: Any, no_state_left: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user cancels while a probe runs."""
    import comfy.model_management
    import comfy.utils

    def cancel(value: int, *_: Any, **__: Any) -> None:
        if value >= 4:  # not == 4: ComfyUI drops updates that follow the previous one too soon
            comfy.model_management.interrupt_current_processing()

    monkeypatch.setattr(comfy.utils, "PROGRESS_BAR_HOOK", cancel)
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        calibrated(unet)
    assert not comfy.model_management.processing_interrupted()


def test_the_same_again(unet: Any, calibrated: Any, plain_profile: str) -> None:
    """Earlier runs do not affect the profile. Calibration does not change the global random generator."""
    sampled(unet, 24)
    torch.manual_seed(3)
    drawn = torch.randn(2)
    torch.manual_seed(3)
    _, text, _, _ = calibrated(unet)
    assert torch.equal(torch.randn(2), drawn)
    assert text == plain_profile


def test_the_preset_as_a_profile(unet: Any, calibrated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the calibrated ratios have a larger error than the preset, the node keeps the preset. The node's model and its
    profile then give the preset's latent bit for bit."""
    errors = iter((0.1, 9.0))
    monkeypatch.setattr(calibrate, "error", lambda *_: next(errors))
    made, text, _, answer = calibrated(unet, target="fast")
    said = answer.ui["toma"][0]["text"]
    assert "The preset 'balanced' is kept: the choice was no better, with error 9.000." in said
    assert "The preset 'balanced' at ratio 0.6: error 0.100 at " in said
    preset = sampled(patch.ToMA.execute(unet, 0.6, "balanced").args[0])
    assert torch.equal(sampled(made), preset)
    assert torch.equal(sampled(patch.ToMA.execute(unet, 0.5, "quality", text).args[0]), preset)
    assert not torch.equal(preset, sampled(unet))


@loop("kind", ["flux", "wan", "ltx_av", "h3"])
def test_a_preset_with_full_steps_is_kept_without_measuring(kind: str, model_of: Any, calibrated: Any) -> None:
    model = model_of(kind)
    latent = {"samples": models.empty(model, 12, 16)}
    made, text, picture, answer = calibrated(model, target="fast", latent=latent)
    assert answer.ui["toma"][0]["text"] == str(calibrate.Found.FULL_STEPS(preset="balanced"))
    assert text == "", "with an empty profile a ToMA node runs its preset"
    by_hand = patch.ToMA.execute(model, 0.6, "balanced").args[0]
    assert run.attachment_of(made).settings == run.attachment_of(by_hand).settings
    assert picture.isfinite().all()


def test_one_picture_that_turned_out_otherwise_decides_nothing(pack: ModuleType) -> None:
    unmerged = torch.ones(3, 4, 2, 2)
    preset, choice = unmerged + 0.1, unmerged + 0.2
    preset[0] = -1.0
    assert not calibrate._mostly_closer(choice, preset, unmerged)
    assert calibrate._mostly_closer(preset, choice, unmerged)
    assert not calibrate._mostly_closer(unmerged * float("nan"), preset, unmerged)


def test_the_gain_comes_first() -> None:
    found = calibrate.Calibrated(None, None, (0.15, 0.0123), (0.8, 0.79))
    assert list(map(str, calibrate._notes(found, "fast"))) == [
        "Less error for the same work: 0.012 instead of 0.150, at 79 % of the blocks' work.",
        "The preset 'balanced' at ratio 0.6: error 0.150 at 80 %.",
        "",
        str(pack_module("nodes.report_charts").Caption.WORK()),
    ]
    assert [(bar.name, bar.value, bar.error) for bar in calibrate._bars(found, "fast")] == [
        ("balanced", 0.8, 0.15),
        ("profile", 0.79, 0.0123),
    ]


def test_a_sampler_with_another_cfg_is_named() -> None:
    """Only samplers whose model comes from the calibration node count. Other nodes may be in between."""
    prompt = {
        "1": {"inputs": {"cfg": 4.0}},
        "2": {"inputs": {"model": ["1", 0]}},
        "3": {"inputs": {"model": ["2", 0], "cfg": 7.0}},
        "4": {"inputs": {"model": ["9", 0], "cfg": 1.0}},
        "5": {"inputs": {"model": [], "cfg": 2.0}},  # ComfyUI does not validate inputs of a node that no output needs
    }
    assert calibrate._cfgs_of_samplers(SimpleNamespace(unique_id="1", prompt=prompt)) == [7.0]


def test_what_is_no_profile_is_said_and_the_preset_runs(unet: Any, flux: Any) -> None:
    preset = sampled(patch.ToMA.execute(unet, 0.5, "balanced").args[0])
    newer = json.dumps({**json.loads(found_profile(unet)), "toma_profile": 9})
    for text, why in (
        ("nonsense", "damaged"),
        (5, "not the text"),
        (torch.ones(2), "not the text"),
        ("[" * 9000, "damaged"),
        (newer, "newer version"),
        (found_profile(flux), "of another model"),
    ):
        answer = patch.ToMA.execute(unet, 0.5, "balanced", text)
        assert why in answer.ui["toma"][0]["text"]
        assert torch.equal(sampled(answer.args[0]), preset)
        assert run.attachment_of(answer.args[0]).ratio_schedule == ()


def test_what_is_set_by_hand_is_above_the_profile(unet: Any) -> None:
    text = found_profile(unet)
    node = patch.ToMAAdvanced
    by_hand = node.execute(unet, **advanced(profile=text, preset="quality", window_size=4)).args[0]
    config = run.attachment_of(by_hand).settings.resolved()
    plain = run.attachment_of(node.execute(unet, **advanced(profile=text)).args[0]).settings.resolved()
    assert plain == profiles.parsed(text).config
    assert config == dataclasses.replace(plain, window_size=4)


@pytest.mark.compat
def test_a_profile_is_said_on_the_node_and_in_the_report(unet: Any, stats_of: Any) -> None:
    names, found = [block.name for block in registry.blocks_of(unet)], registry.fingerprint(unet)
    config = pack_module("toma_core").ToMAConfig(min_tokens=4)
    text = profiles.Profile(found, config, (0.0,), {names[0]: (0.25,), names[-1]: (0.75,)}).text()
    answer = patch.ToMA.execute(unet, 0.5, "balanced", text)
    assert answer.ui["toma"][0]["text"] == "By the profile: ratio and preset do nothing."
    assert run.attachment_of(answer.args[0]).watcher is None
    sampled(answer.args[0])
    stats = stats_of(answer.args[0])
    assert str(report_text.headline(stats)).startswith("On: up to 75 % of the tokens merged, 2 of ")
    assert "400 -> 100+ (20 x 20)" in report_text.summary(stats)
    assert "at ratio up to 0.75" in report_text.summary(stats)


def test_off_is_off_and_no_profile_is_none(unet: Any) -> None:
    assert patch.ToMA.execute(unet, 0.0, "balanced", found_profile(unet)).args[0] is unet
    for empty in ("", None, " \n\t "):
        attachment = run.attachment_of(patch.ToMA.execute(unet, 0.5, "balanced", empty).args[0])
        assert attachment.ratio_schedule == ()
        assert attachment.settings.preset == "balanced"


@loop("later", [False, True])
def test_other_nodes_evaluate_the_negative_prompt_alone(unet: Any, calibrated: Any, later: bool) -> None:
    """Skip layer guidance evaluates it without the positive prompt, which may take part in a part of the run only."""
    import node_helpers
    from comfy_extras.nodes_slg import SkipLayerGuidanceDiTSimple

    model = SkipLayerGuidanceDiTSimple.execute(unet, 0.0, 1.0, "1", "1").args[0]
    positive = models.conditioning(unet, seed=1)
    if later:
        positive = node_helpers.conditioning_set_values(positive, {"start_percent": 0.5, "end_percent": 1.0})
    assert json.loads(calibrated(model, positive=positive)[1])


def test_a_call_that_is_unknown_to_this_version_is_not_measured(unet: Any, calibrated: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(pack_module("nodes.adapters.streams"), "shapes_of", lambda conds: conds.renamed)
    _, text, _, answer = calibrated(unet)
    assert not text
    assert answer.ui["toma"][0]["text"].startswith("Nothing can be merged here")
