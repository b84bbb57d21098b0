"""The calibration node: what it finds, gives out and says, on real models."""

from __future__ import annotations

import dataclasses
import json
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import models
from scripts.comfy_pack import pack_module
from tests.loop import loop

calibrate = pack_module("nodes.calibrate")
calibrating = pack_module("nodes.calibration_run")
patch = pack_module("nodes.toma")
run = pack_module("nodes.adapters.patch_model")
profiles = pack_module("toma_core.profile")
calibration = pack_module("toma_core.calibration")
Node = calibrate.ToMACalibrate
STEPS = 6


@pytest.fixture
def calibrated(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """calibrated(model, **inputs): model, profile, picture and the node's whole answer."""
    import folder_paths

    monkeypatch.setattr(folder_paths, "temp_directory", str(tmp_path))

    def call(model: Any, side: int = 40, **inputs: Any) -> tuple[Any, str, torch.Tensor, Any]:
        given = {
            "latent": {"samples": torch.zeros(1, 4, side, side)},
            "target": "balanced", "error": 0.1, "steps": STEPS, "cfg": 3.0, "sampler_name": "euler",
            "scheduler": "simple", "seed": 5, "negative": models.conditioning(model, seed=2),
            "positive": models.conditioning(model, seed=1), **inputs,
        }  # fmt: skip
        answer = Node.execute(model, **given)
        return (*answer.args, answer)

    return call


def sampled(model: Any, side: int = 40) -> torch.Tensor:
    return models.sample(model, side, side, steps=STEPS)


@pytest.mark.compat
def test_gives_out_what_it_found(unet: Any, calibrated: Any, no_state_left: None) -> None:
    model, text, picture, answer = calibrated(unet)
    assert picture.shape[0] == 1
    assert 0 <= picture.min() <= picture.max() <= 1
    assert len(answer.ui["images"]) == 1
    said = answer.ui["toma"][0]["text"]
    assert "Predicted 0." in said
    assert "The preset 'balanced' at ratio 0.5: error 0." in said
    assert not profiles.parsed(text).empty
    assert len(text.encode()) <= 2000
    # A ToMA node does the same with the profile, in another graph and on another day.
    again = patch.ToMA.execute(unet, 0.5, "quality", text).args[0]
    assert run.attachment_of(again).ratio_schedule
    assert torch.equal(sampled(again), sampled(patch.ToMAAdvanced.execute(unet, **advanced(profile=text)).args[0]))
    assert torch.equal(sampled(again), sampled(model))


def advanced(**values: Any) -> dict[str, Any]:
    usual = {i.id: i.default for i in patch.ToMAAdvanced.define_schema().inputs if i.id != "model"}
    return {**usual, **values}


def found_profile(model: Any) -> str:
    """A profile of some kind for the model."""
    identity = pack_module("nodes.adapters.fingerprint")
    names = [block.name for block in identity.blocks_of(model)]
    return profiles.Profile(identity.fingerprint(model), {}, (2.0, 0.0), {names[0]: (0.75, 0.5)}).text()


def test_by_distance(unet: Any, calibrated: Any) -> None:
    near, _, _, answer = calibrated(unet, target="error", error=0.02)
    far, *_ = calibrated(unet, target="error", error=0.9)
    whole = sampled(unet)
    assert (sampled(near) - whole).norm() < (sampled(far) - whole).norm()
    assert "Predicted" in answer.ui["toma"][0]["text"] or "Nothing" in answer.ui["toma"][0]["text"]


def test_small_grids_have_nothing_to_merge(unet: Any, calibrated: Any) -> None:
    model, text, _, answer = calibrated(unet, side=16)
    assert profiles.parsed(text).empty
    assert answer.ui["toma"][0]["text"].startswith("Nothing can be merged here")
    assert torch.equal(sampled(model, 16), sampled(unet, 16))
    again = patch.ToMA.execute(unet, 0.5, "balanced", text)
    assert "merges nothing" in again.ui["toma"][0]["text"]
    assert torch.equal(sampled(again.args[0], 40), sampled(unet, 40))


@loop(("kind", "near", "ratio"), [("unet", "balanced", 0.5), ("unet", "fast", 0.6), ("flux", "balanced", 0.5)])
def test_the_preset_as_a_profile(
    kind: str, near: str, ratio: float, model_of: Any, calibrated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the choice came out farther, what is given out is the preset to the bit, on paper too."""
    model, true = model_of(kind), calibrating.Run.error
    asked: list[float] = []

    def farther(self: Any, whole: Any) -> float:
        asked.append(true(self, whole))
        return asked[-1] if len(asked) == 1 else 9.0

    monkeypatch.setattr(calibrating.Run, "error", farther)
    monkeypatch.setattr(
        calibrating.Run, "squared_errors", lambda self, whole, steps: [0.1 * n for n in range(steps + 1)]
    )
    made, text, _, answer = calibrated(model, target=near)
    said = answer.ui["toma"][0]["text"]
    assert "The preset 'balanced' is kept: the choice was no better, with error 9.000." in said
    assert f"The preset 'balanced' at ratio {ratio:g}: error 0." in said
    preset = sampled(patch.ToMA.execute(model, ratio, "balanced").args[0])
    assert torch.equal(sampled(made), preset)
    assert torch.equal(sampled(patch.ToMA.execute(model, 0.5, "quality", text).args[0]), preset)
    assert not torch.equal(preset, sampled(model))


def test_a_video(model_of: Any, calibrated: Any, no_state_left: None) -> None:
    """A latent of five dimensions with several frames."""
    wan = model_of("wan")
    _, text, _, answer = calibrated(wan, latent={"samples": torch.zeros(1, 16, 3, 32, 32)})
    assert "The preset 'balanced' at ratio 0.5: error 0." in answer.ui["toma"][0]["text"]
    assert not profiles.parsed(text).empty
    profiles.fitted(
        profiles.parsed(text),
        pack_module("nodes.adapters.fingerprint").fingerprint(wan),
        [block.name for block in pack_module("nodes.adapters.fingerprint").blocks_of(wan)],
    )


def test_a_video_measures_no_more_sites_than_it_has_room_for(
    model_of: Any, calibrated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each site keeps its own detail, and a video whose detail is too much gives up all of it."""
    wan = model_of("wan")
    facts = pack_module("nodes.adapters.fingerprint").blocks_of(wan, torch.zeros(1, 16, 3, 32, 32))
    one = max(fact.tokens * fact.width for fact in facts) * 2 * 4
    for module in (calibrating, pack_module("toma_core.cache")):
        monkeypatch.setattr(module, "MAX_CACHE_BYTES", int(2.4 * one))
    _, text, _, answer = calibrated(wan, latent={"samples": torch.zeros(1, 16, 3, 32, 32)})
    said = answer.ui["toma"][0]["text"]
    assert "Predicted" in said
    assert "nothing was found out" not in said
    assert len(profiles.parsed(text).ratios) <= 2


def clip(frames: int = 3, side: int = 32) -> dict[str, torch.Tensor]:
    return {"samples": torch.zeros(1, 16, frames, side, side)}


@loop("at", [6, 16, 22])
def test_memory_that_runs_out_is_no_measurement(
    at: int, model_of: Any, calibrated: Any, monkeypatch: pytest.MonkeyPatch, no_state_left: None
) -> None:
    """While probes are made, in the preset's run and in the choice's: what is left of it is whole, and so near that it
    would be believed."""
    wan, calls = model_of("wan"), list[int]()
    network = type(wan.model.diffusion_model)
    forward = network.forward

    def short(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == at:
            raise torch.OutOfMemoryError
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(network, "forward", short)
    model, text, _, answer = calibrated(wan, latent=clip(side=24))
    said = answer.ui["toma"][0]["text"].split("\n")
    assert said[1] == "There was too little memory for it: try a smaller latent or batch."
    if at == 6:
        assert said[0] == "Nothing could be measured, so the preset 'balanced' is given out."
        return
    assert said[0] == "Nothing could be measured, so there is no profile."
    assert text == ""
    assert run.attachment_of(model) is None


def test_memory_that_runs_out_for_a_plan_is_no_measurement(
    model_of: Any, calibrated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    wan, state, calls = model_of("wan"), pack_module("toma_core.run").RunState, list[int]()
    plan = state.plan

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == last:
            raise torch.OutOfMemoryError
        return plan(self, *args, **kwargs)

    monkeypatch.setattr(state, "plan", counted)
    last = 0
    calibrated(wan, latent=clip(side=24))
    last = len(calls) - 1
    calls.clear()
    _, text, _, answer = calibrated(wan, latent=clip(side=24))
    assert answer.ui["toma"][0]["text"].startswith("Nothing could be measured, so there is no profile.")
    assert text == ""


def test_the_preset_is_the_one_that_a_run_with_these_conditions_has(
    model_of: Any, calibrated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A card with room for what two conditions keep, and not for three."""
    import comfy.model_management

    wan = model_of("wan")
    two = [*models.conditioning(wan, seed=1), *models.conditioning(wan, seed=3)]
    needed: list[int] = []
    keep = pack_module("nodes.adapters.patch_model").reserved
    with monkeypatch.context() as patched:
        patched.setattr(run, "reserved", lambda model, more: needed.append(more) or keep(model, more))
        patched.setattr(pack_module("nodes.adapters.patch_model"), "memory_left", lambda *_: 0)
        models.sample(patch.ToMA.execute(wan, 0.5, "balanced").args[0], 32, 32, frames=3, steps=2)
    monkeypatch.setattr(comfy.model_management, "get_total_memory", lambda *_, **__: 1.2 * needed[0] / 0.55)
    _, text, _, _ = calibrated(wan, latent=clip(), steps=8, positive=two)
    assert profiles.parsed(text).config().kv_cache is False
    _, text, _, _ = calibrated(wan, latent=clip(), steps=8)
    assert profiles.parsed(text).config().kv_cache is True


@loop("kind", ["two", "cfg_pp", "vace"])
def test_a_video_measures_what_it_has_room_for(
    kind: str, model_of: Any, calibrated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted in conditions that are evaluated, and with the chains that the model itself breaks."""
    import comfy.model_management

    monkeypatch.setattr(comfy.model_management, "get_total_memory", lambda *_, **__: 1000)  # without keys
    vace = {"base": "WAN21_Vace", "kind": "WAN21_Vace", "model_type": "vace", "vace_layers": 4, "vace_in_dim": 96}
    wan = models.wan(layers=8, **vace) if kind == "vace" else model_of("wan")
    facts = pack_module("nodes.adapters.fingerprint").blocks_of(wan, clip()["samples"])
    one = max(fact.tokens * fact.width for fact in facts) * 2 * 4
    for module in (calibrating, pack_module("toma_core.cache")):
        monkeypatch.setattr(module, "MAX_CACHE_BYTES", int({"two": 2.4, "cfg_pp": 1.7, "vace": 5.0}[kind] * one))
    given: dict[str, Any] = {
        "two": {"positive": [*models.conditioning(wan, seed=1), *models.conditioning(wan, seed=3)]},
        "cfg_pp": {"sampler_name": "euler_cfg_pp", "cfg": 1.0},
        "vace": {},
    }[kind]
    _, _, _, answer = calibrated(wan, latent=clip(), steps=8, **given)
    assert "Predicted" in answer.ui["toma"][0]["text"]


def test_too_little_memory_is_said(model_of: Any, calibrated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where not one site has room, by a number and by a word."""
    import comfy.model_management

    monkeypatch.setattr(comfy.model_management, "get_total_memory", lambda *_, **__: 1000)
    monkeypatch.setattr(pack_module("toma_core.cache"), "MAX_CACHE_BYTES", 1)
    short, wan = "There was too little memory for it: try a smaller latent or batch.", model_of("wan")
    _, text, _, answer = calibrated(wan, latent=clip(), steps=8)
    assert answer.ui["toma"][0]["text"].startswith(
        f"Nothing could be measured, so the preset 'balanced' is given out.\n{short}\nThe preset"
    )
    assert not profiles.parsed(text).empty
    _, text, _, answer = calibrated(wan, latent=clip(), steps=8, target="error", error=1.0)
    assert answer.ui["toma"][0]["text"] == f"Nothing could be measured, so there is no profile.\n{short}"
    assert text == ""


@loop("distance", [float("nan"), -1.0, 0.0, 2.0])
def test_a_distance_that_is_none_is_refused(distance: float, unet: Any, calibrated: Any) -> None:
    error = pack_module("toma_core.settings").ConfigError
    with pytest.raises(error, match=r"error is .*\. Allowed: a number from 0\.005 to 1\. Try 0\.1\."):
        calibrated(unet, target="error", error=distance)
    calibrated(unet, error=distance, steps=2)  # it is not asked for


def test_a_prompt_that_begins_later(unet: Any, calibrated: Any) -> None:
    """While it takes no part there is nothing to measure, and later there is."""
    late = models.conditioning(unet, seed=1, start_percent=0.3, end_percent=1.0)
    _, _, _, answer = calibrated(unet, steps=12, positive=late)
    assert "Predicted" in answer.ui["toma"][0]["text"]


def test_a_profile_in_too_few_steps_says_why_nothing_was_merged(flux: Any, stats_of: Any) -> None:
    identity = pack_module("nodes.adapters.fingerprint")
    names = [block.name for block in identity.blocks_of(flux)]
    config = pack_module("toma_core").Settings("balanced").resolved(pack_module("nodes.adapters.family").PRESETS)
    found = profiles.Profile(
        identity.fingerprint(flux), {**profiles.changed(config), "min_tokens": 4}, (0.0,), {names[0]: (0.5,)}
    )
    merged = patch.ToMA.execute(flux, 0.5, "balanced", found.text()).args[0]
    models.sample(merged, 40, 40, steps=2)
    assert str(stats_of(merged).headline()).startswith("Nothing was merged: ")


def test_attention_that_asks_nobody_is_measured_as_it_runs(
    model_of: Any, calibrated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another pack's: a run goes on with other settings then, and these are what is measured."""
    import comfy.ldm.wan.model

    def theirs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, *_: Any, **__: Any) -> torch.Tensor:
        parts = [t.unflatten(2, (heads, -1)).transpose(1, 2) for t in (q, k, v)]
        return torch.nn.functional.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2)

    monkeypatch.setattr(comfy.ldm.wan.model, "optimized_attention", theirs)
    _, text, _, _ = calibrated(model_of("wan"), latent=clip(), steps=8)
    config = profiles.parsed(text).config()
    assert (config.kv_cache, config.full_step_interval) == (False, 3)


def test_a_word_that_is_none_is_refused(unet: Any, calibrated: Any) -> None:
    error = pack_module("toma_core.settings").ConfigError
    with pytest.raises(error, match=r"target is 'nope'\. Allowed: quality, balanced, fast, error\. Choose one"):
        calibrated(unet, target="nope")


def test_another_node_that_answers_for_the_sampler(unet: Any, calibrated: Any) -> None:
    """Evaluations that go past our wrappers."""
    import comfy.samplers

    odd = unet.clone()
    odd.model_options["sampler_calc_cond_batch_function"] = lambda given: comfy.samplers._calc_cond_batch(
        given["model"], given["conds"], given["input"], given["sigma"], given["model_options"]
    )
    _, text, _, answer = calibrated(odd)
    assert "another node answers for the model" in answer.ui["toma"][0]["text"]
    assert profiles.parsed(text).empty


def test_too_few_steps_for_the_preset(flux: Any, calibrated: Any) -> None:
    model, text, _, answer = calibrated(flux, steps=2)
    said = str(calibrating.Problem.TOO_FEW_STEPS(steps=2))
    assert answer.ui["toma"][0]["text"] == said
    assert text == "", "a profile that merges nothing would hold for 20 steps too"
    assert run.attachment_of(model) is None


def test_a_step_cache_is_left_out_of_measuring_only(unet: Any, calibrated: Any) -> None:
    from comfy_extras.nodes_easycache import EasyCacheNode

    cached = EasyCacheNode.execute(unet, 3.0, 0.0, 1.0, False).args[0]
    model, text, _, answer = calibrated(cached)
    _, plain, _, _ = calibrated(unet)
    assert text == plain
    assert "Measured without EasyCache, which the model keeps." in answer.ui["toma"][0]["text"]
    assert model.get_wrappers("diffusion_model", "easycache")


def test_a_step_cache_of_another_pack(unet: Any, calibrated: Any) -> None:
    """One that answers from the second evaluation on: nothing can be found out, so that the preset stays."""
    held: list[torch.Tensor] = []

    def cached(executor: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not held or len(held[0]) < len(x):
            held[:] = [executor(x, *args, **kwargs)]
        return held[0][: len(x)].clone()

    hurried = unet.clone()
    hurried.add_wrapper_with_key("diffusion_model", "another", cached)
    _, text, _, answer = calibrated(hurried)
    said = answer.ui["toma"][0]["text"]
    assert profiles.parsed(text).empty or "Nothing could be measured" in said
    assert "is kept" not in said


@loop("merged_too", [True, False])
def test_values_that_are_no_numbers(unet: Any, calibrated: Any, merged_too: bool) -> None:
    """Of the model itself, or only where it is merged: said, and left whole."""

    def broken(executor: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        out = executor(x, *args, **kwargs)
        merges = any("forward" in vars(m) for m in unet.model.diffusion_model.modules())
        return out * float("nan") if merged_too or merges else out

    bad = unet.clone()
    bad.add_wrapper_with_key("diffusion_model", "broken", broken)
    model, text, picture, answer = calibrated(bad)
    said = answer.ui["toma"][0]["text"]
    assert said.startswith("Nothing was measured" if merged_too else "Nothing is merged")
    assert "NaN" in said
    assert text == "" if merged_too else profiles.parsed(text).empty
    assert picture.isfinite().all()
    assert run.attachment_of(model) is None


def test_blocks_that_nobody_knows_are_refused(unet: Any, calibrated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A known family, in a ComfyUI that has changed it."""
    registry = pack_module("nodes.adapters.registry")
    monkeypatch.setattr(registry, "find", lambda model: registry._Plain("another forward"))
    with pytest.raises(registry.UnsupportedModelError, match=r"^ToMA cannot calibrate this model \(UNetModel\)"):
        calibrated(unet)
    monkeypatch.setattr(registry, "find", lambda model: None)
    with pytest.raises(registry.UnsupportedModelError, match=r"^ToMA cannot speed up this model \(UNetModel\)"):
        calibrated(unet)


def test_the_page_draws_no_seed_of_its_own() -> None:
    """A widget called seed gets a control that randomizes it, unless it is told not to: every queue would measure."""
    seed = next(i for i in Node.define_schema().inputs if i.id == "seed")
    assert seed.as_dict()["control_after_generate"] is False


def test_cancelled_without_a_trace(unet: Any, calibrated: Any, no_state_left: None) -> None:
    """ComfyUI's own flag, set while a probe runs."""
    import comfy.model_management
    import comfy.utils

    def cancel(value: int, *_: Any, **__: Any) -> None:
        if value >= 4:  # ComfyUI leaves out what follows another too soon
            comfy.model_management.interrupt_current_processing()

    before = comfy.utils.PROGRESS_BAR_HOOK
    comfy.utils.set_progress_bar_global_hook(cancel)
    try:
        with pytest.raises(comfy.model_management.InterruptProcessingException):
            calibrated(unet)
    finally:
        comfy.utils.set_progress_bar_global_hook(before)
    assert not comfy.model_management.processing_interrupted()


def test_the_same_again(flux: Any, calibrated: Any) -> None:
    """What it finds depends on the seed, not on what ran before, and leaves the global generator alone."""
    torch.manual_seed(3)
    drawn = torch.randn(2)
    torch.manual_seed(3)
    _, first, _, _ = calibrated(flux)
    assert torch.equal(torch.randn(2), drawn)
    sampled(flux)
    _, second, _, _ = calibrated(flux)
    assert first == second


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
    config = run.attachment_of(
        node.execute(unet, **advanced(profile=text, preset="quality", window_size=4)).args[0]
    ).config
    plain = run.attachment_of(node.execute(unet, **advanced(profile=text)).args[0]).config
    assert plain == profiles.parsed(text).config()
    assert config == dataclasses.replace(plain, window_size=4)


@pytest.mark.compat
def test_a_profile_is_said_on_the_node_and_in_the_report(unet: Any, stats_of: Any) -> None:
    names = [block.name for block in pack_module("nodes.adapters.fingerprint").blocks_of(unet)]
    found = pack_module("nodes.adapters.fingerprint").fingerprint(unet)
    text = profiles.Profile(found, {"min_tokens": 4}, (0.0,), {names[0]: (0.25,), names[-1]: (0.75,)}).text()
    answer = patch.ToMA.execute(unet, 0.5, "balanced", text)
    assert answer.ui["toma"][0]["text"] == "By the profile: ratio and preset do nothing."
    assert run.attachment_of(answer.args[0]).watcher is None
    sampled(answer.args[0])
    stats = stats_of(answer.args[0])
    assert str(stats.headline()).startswith("On: up to 75 % of the tokens merged, 2 of ")
    assert "400 -> 100+ (20 x 20)" in stats.summary()
    assert "at ratio up to 0.75" in stats.text()


def test_off_is_off_and_no_profile_is_none(unet: Any) -> None:
    assert patch.ToMA.execute(unet, 0.0, "balanced", found_profile(unet)).args[0] is unet
    for empty in ("", None, " \n\t "):
        attachment = run.attachment_of(patch.ToMA.execute(unet, 0.5, "balanced", empty).args[0])
        assert attachment.ratio_schedule == ()
        assert attachment.config == pack_module("toma_core").Settings("balanced").resolved(
            pack_module("nodes.adapters.families.unet").PRESETS
        )


def test_a_prediction_that_failed_is_not_believed() -> None:
    Choice, Option = calibration.Choice, calibration.Option
    chosen = Choice({("a", 0): Option(0.5, 0.01, 0.2)})
    given: dict[str, Any] = {"model": None, "profile": None, "choices": [chosen], "chosen": chosen, "probes": 3}
    far = calibrating.Calibrated(
        found=0.2, usual=calibrating.Usual("balanced", 0.5, 0.8, 0.15), keeps_preset=True, **given
    )
    assert (
        str(calibrate._notes(far, None)[0])
        == "The preset 'balanced' is kept: the choice was no better, with error 0.200."
    )
    doubted = dataclasses.replace(far, found=0.14, keeps_preset=False)
    assert "the chart's line cannot be trusted here. What was found counts." in "\n".join(
        map(str, calibrate._notes(doubted, None))
    )
    small = dataclasses.replace(far, found=0.00123, keeps_preset=False)
    assert str(calibrate._notes(small, None)[0]) == (
        "Less error for the same work: 0.0012 instead of 0.150, at 80 % of the blocks' work."
    )
    nearer = dataclasses.replace(far, found=0.14, unmeasured=["a"])
    assert str(calibrate._notes(nearer, None)[0]) == (
        "The preset 'balanced' is kept: the choice had error 0.140, not as predicted, and so small a gain "
        "cannot be trusted."
    )
    assert "Not merged" not in "\n".join(map(str, calibrate._notes(nearer, None))), "the preset merges them"
    broken = calibrate._notes(dataclasses.replace(far, found=float("nan")), None)
    assert str(broken[0]).startswith("The choice ends in values that are no numbers (NaN), so the preset 'balanced'")
    assert "nan" not in "\n".join(map(str, broken))
    close = calibrating.Calibrated(found=0.11, usual=calibrating.Usual("balanced", 0.5, 0.8, 0.15), **given)
    assert str(calibrate._notes(close, None)[0]) == (
        "Less error for the same work: 0.110 instead of 0.150, at 80 % of the blocks' work."
    )
    assert "cannot be trusted" not in "\n".join(map(str, calibrate._notes(close, None)))
    assert "more than 0.1" in str(calibrate._notes(close, 0.1)[-1])


def test_one_picture_that_turned_out_otherwise_decides_nothing(pack: ModuleType) -> None:
    run = pack_module("nodes.calibration_run").Run
    whole, states = torch.ones(3, 4, 2, 2), torch.zeros(1)
    preset, choice = whole + 0.1, whole + 0.2
    preset[0] = -1.0
    runs = [run(latent, states) for latent in (whole, preset, choice)]
    assert runs[2].error(runs[0]) < runs[1].error(runs[0])
    assert not runs[2].mostly_closer(runs[1], runs[0])
    assert runs[1].mostly_closer(runs[2], runs[0])
    assert not run(whole * float("nan"), states).mostly_closer(runs[1], runs[0])


def test_a_sampler_with_another_cfg_is_named() -> None:
    """Also behind a node that hands the model on; one that samples another model does not count."""
    prompt = {
        "1": {"inputs": {"cfg": 4.0}},
        "2": {"inputs": {"model": ["1", 0]}},
        "3": {"inputs": {"model": ["2", 0], "cfg": 7.0}},
        "4": {"inputs": {"model": ["9", 0], "cfg": 1.0}},
    }
    cfgs = pack_module("nodes.calibrate")._cfgs_of_samplers
    assert cfgs(SimpleNamespace(unique_id="1", prompt=prompt)) == [7.0]
    assert cfgs(None) == []
