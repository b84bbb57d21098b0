"""Test the calibration node on real models: its profiles and texts."""

import dataclasses
import json
from types import SimpleNamespace
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


@pytest.fixture
def calibrated(previews: None) -> Any:
    """calibrated(model, **inputs): return the node's model and profile, and the text that it shows."""

    def call(model: Any, side: int = 40, **inputs: Any) -> tuple[Any, str, str]:
        given = {
            "latent": {"samples": torch.zeros(1, 4, side, side)},
            "target": "balanced", "steps": 4, "cfg": 3.0, "sampler_name": "euler", "scheduler": "simple",
            "negative": models.conditioning(model, seed=2), "positive": models.conditioning(model, seed=1), **inputs,
        }  # fmt: skip
        answer = calibrate.ToMACalibrate.execute(model, **given)
        assert len(answer.ui["images"]) == 1
        made, profile, picture = answer.args
        assert 0 <= picture.min() <= picture.max() <= 1
        return made, profile, answer.ui["toma"][0]["text"]

    return call


def sampled(model: Any, side: int = 40) -> torch.Tensor:
    return models.sample(model, side, side, steps=3)


@pytest.mark.compat
def test_gives_out_what_it_found(unet: Any, calibrated: Any, no_state_left: None) -> None:
    model, text, said = calibrated(unet)
    assert said.startswith(("Less error for the same work: 0.", "The preset 'balanced' is kept: "))
    assert "The preset 'balanced' at ratio 0.5: error 0." in said
    assert any(any(ratios) for ratios in profiles.parsed(text).ratios.values())
    assert len(text.encode()) <= 2000
    # A ToMA node that receives the profile gives the same latents as the calibration node's model.
    again = patch.ToMA.execute(unet, 0.5, "quality", text).args[0]
    assert run.attachment_of(again).ratio_schedule
    assert torch.equal(sampled(again), sampled(advanced(unet, profile=text)))
    assert torch.equal(sampled(again), sampled(model))


def advanced(model: Any, **values: Any) -> Any:
    """Return the model merged by ToMA Advanced."""
    usual = {i.id: i.default for i in patch.ToMAAdvanced.define_schema().inputs if i.id != "model"}
    return patch.ToMAAdvanced.execute(model, **{**usual, **values}).args[0]


def found_profile(model: Any) -> str:
    """Return a valid profile for the model, without calibration."""
    first, *_ = registry.blocks_of(model)
    config = pack_module("toma_core").ToMAConfig()
    return profiles.Profile(registry.fingerprint(model), config, (2.0, 0.0), {first.name: (0.75, 0.5)}).text()


@loop("unknown", [False, True])
def test_nothing_can_be_merged(unknown: bool, unet: Any, calibrated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The latent's grids are too small, or ComfyUI passes arguments that this version of ToMA does not know."""
    if unknown:
        monkeypatch.setattr(pack_module("nodes.adapters.streams"), "shapes_of", lambda conds: conds.renamed)
    side = 40 if unknown else 16
    model, text, said = calibrated(unet, side)
    assert text == ""
    assert said.startswith("Nothing can be merged here")
    assert torch.equal(sampled(model, side), sampled(unet, side))


@loop(("skips", "start"), [(False, 0.3), (True, 0.0), (True, 0.5)])
def test_a_prompt_that_begins_later(skips: bool, start: float, unet: Any, calibrated: Any) -> None:
    """Skip layer guidance evaluates the negative prompt without the positive prompt."""
    from comfy_extras.nodes_slg import SkipLayerGuidanceDiTSimple

    model = SkipLayerGuidanceDiTSimple.execute(unet, 0.0, 1.0, "1", "1").args[0] if skips else unet
    late = models.conditioning(unet, seed=1, start_percent=start, end_percent=1.0)
    assert profiles.parsed(calibrated(model, steps=8, positive=late)[1]).ratios


def test_a_word_that_is_none_is_refused(unet: Any, calibrated: Any) -> None:
    error = pack_module("toma_core.config").ConfigError
    with pytest.raises(error, match=r"target is 'nope'\. Allowed: quality, balanced, fast\. Choose one"):
        calibrated(unet, target="nope")


def test_another_node_that_answers_for_the_sampler(unet: Any, calibrated: Any) -> None:
    """Another node's function evaluates the model without ToMA's wrappers."""
    import comfy.samplers

    odd = unet.clone()
    odd.model_options["sampler_calc_cond_batch_function"] = lambda given: comfy.samplers._calc_cond_batch(
        given["model"], given["conds"], given["input"], given["sigma"], given["model_options"]
    )
    _, text, said = calibrated(odd)
    assert "another node answers for the model" in said
    assert text == ""


def test_the_same_again(unet: Any, calibrated: Any) -> None:
    """Earlier runs and the step cache of another node do not affect the profile. Calibration does not change the global
    random generator."""
    from comfy_extras.nodes_easycache import EasyCacheNode

    _, text, _ = calibrated(unet)
    sampled(unet, 24)
    torch.manual_seed(3)
    drawn = torch.randn(2)
    torch.manual_seed(3)
    model, again, _ = calibrated(EasyCacheNode.execute(unet, 3.0, 0.0, 1.0, False).args[0])
    assert torch.equal(torch.randn(2), drawn)
    assert again == text
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

    _, text, said = calibrated(wrapped(unet, cached))
    assert not text or "is kept" in said


@loop(("merged_too", "problem"), [(True, "Nothing was measured"), (False, "Nothing is merged")])
def test_values_that_are_no_numbers(unet: Any, calibrated: Any, merged_too: bool, problem: str) -> None:
    """The model gives NaN in every evaluation, or only in evaluations with merged blocks."""

    def broken(executor: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        out = executor(x, *args, **kwargs)
        merges = any("forward" in vars(m) for m in unet.model.diffusion_model.modules())
        return out * float("nan") if merged_too or merges else out

    model, text, said = calibrated(wrapped(unet, broken))
    assert said.startswith(problem)
    assert "NaN" in said
    assert text == ""
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


def test_the_preset_as_a_profile(unet: Any, calibrated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the calibrated ratios have a larger error than the preset, the node keeps the preset. Then the model and the
    profile from the node both give the preset's latent bit for bit."""
    errors = iter((0.1, 9.0))
    monkeypatch.setattr(calibrate, "error", lambda *_: next(errors))
    made, text, said = calibrated(unet, target="fast")
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
    made, text, said = calibrated(model, target="fast", latent=latent)
    assert said == str(calibrate.Found.FULL_STEPS(preset="balanced"))
    assert text == "", "with an empty profile a ToMA node runs its preset"
    by_hand = patch.ToMA.execute(model, 0.6, "balanced").args[0]
    assert run.attachment_of(made).settings == run.attachment_of(by_hand).settings


def test_one_picture_that_turned_out_otherwise_decides_nothing() -> None:
    unmerged = torch.ones(3, 4, 2, 2)
    preset, choice = unmerged + 0.1, unmerged + 0.2
    preset[0] = -1.0
    assert not calibrate._mostly_closer(choice, preset, unmerged)
    assert calibrate._mostly_closer(preset, choice, unmerged)
    assert not calibrate._mostly_closer(unmerged * float("nan"), preset, unmerged)


def test_the_gain_comes_first() -> None:
    found = calibrate.Calibrated(None, None, (0.15, 0.0123), (0.8, 0.79))
    assert list(map(str, calibrate._notes(found, "fast")))[:2] == [
        "Less error for the same work: 0.012 instead of 0.150, at 79 % of the blocks' work.",
        "The preset 'balanced' at ratio 0.6: error 0.150 at 80 %.",
    ]
    bars = [(bar.name, bar.value, bar.error) for bar in calibrate._bars(found, "fast")]
    assert bars == [("balanced", 0.8, 0.15), ("profile", 0.79, 0.0123)]


def test_a_sampler_with_another_cfg_is_named() -> None:
    """Only samplers whose model comes from the calibration node count. Other nodes may be between the two."""
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
        (torch.ones(2), "not the text"),
        (newer, "newer version"),
        (found_profile(flux), "of another model"),
    ):
        answer = patch.ToMA.execute(unet, 0.5, "balanced", text)
        assert why in answer.ui["toma"][0]["text"]
        assert torch.equal(sampled(answer.args[0]), preset)
        assert run.attachment_of(answer.args[0]).ratio_schedule == ()


def test_what_is_set_by_hand_is_above_the_profile(unet: Any) -> None:
    text = found_profile(unet)
    made = advanced(unet, profile=text), advanced(unet, profile=text, preset="quality", window_size=4)
    plain, by_hand = (run.attachment_of(each).settings.resolved() for each in made)
    assert plain == profiles.parsed(text).config
    assert by_hand == dataclasses.replace(plain, window_size=4)


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
