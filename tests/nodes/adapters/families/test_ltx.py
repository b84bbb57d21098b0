"""Test LTX-Video and LTX-2: frames, modulation per frame and per token, guides, and the audio stream."""

import inspect
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from scripts.comfy_pack import pack_module
from testbed import models
from tests.loop import loop
from tests.nodes.adapters.families.layouts import LAYOUTS, errors, first_fixed, noise
from tests.nodes.adapters.helpers import balanced, prompts_of

Reason = pack_module("toma_core.reasons").Reason

HEIGHT, WIDTH, FRAMES = 6, 8, 5
FRAME = HEIGHT * WIDTH
BOTH = ("ltx", "ltx_av")
RUN: dict[str, Any] = {"height": HEIGHT, "width": WIDTH, "frames": FRAMES, "cfg": 1.0}


def sampled(model: Any, **options: Any) -> list[Tensor]:
    return models.sample_streams(model, **{**RUN, "steps": 2, **options})


def masked(family: str, kind: str) -> Any:
    """Return a mask that fixes the first frame ("frame"), or partly fixes the left half of every frame ("half")."""
    from comfy.nested_tensor import NestedTensor

    video = first_fixed(FRAMES, HEIGHT, WIDTH)
    if kind == "half":
        video[:] = 1
        video[..., : WIDTH // 2] = 0.3
    return video if family == "ltx" else NestedTensor([video, torch.ones(1, *models.AUDIO["LTXAV"](FRAMES))])


@loop("kind", ["frame", "half"])
@loop("family", BOTH)
def test_modulation_follows_the_destinations(family: str, kind: str, model_of: Any, merged_block: Any) -> None:
    """Modulation is per frame, as in LTX-2 with a fixed first frame, or per token."""
    (layout,) = LAYOUTS[family]
    block = merged_block(model_of(family), layout, **RUN, noise_mask=masked(family, kind))
    names = ("timestep",)
    if family == "ltx_av":
        names = ("v_timestep", "v_cross_scale_shift_timestep", "v_cross_gate_timestep")
        assert (block.given["v_timestep"].patches_per_frame > 1) is (kind == "frame")
    for name in names:
        rows = block.given[name].expand() if family == "ltx_av" else block.given[name]
        assert rows.shape[1] == FRAMES * FRAME
        block.seen[name] = rows[:, block.plan.destinations[0]]
    block.agrees()
    block.needs(**{name: block.seen[name].flip(1) for name in names})


@loop("family", BOTH)
@loop("kind", ["frame", "half"])
def test_given_video_stays_as_it_was(family: str, kind: str, model_of: Any, run_preset: Any) -> None:
    own, found = run_preset(model_of(family), **RUN, noise_mask=masked(family, kind))
    assert kind == "half" or torch.equal(found[0][:, :, 0], own[0][:, :, 0])


def test_the_audio_attends_to_all_tokens(model_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the audio attended only to merged video tokens, its error would be more than 1.4 times as large."""
    family, model = pack_module("nodes.adapters.families.ltx"), model_of("ltx_av")
    # Usually the tokens that the previous step computed are selected less. Switch this off, because it would hide a
    # fault.
    monkeypatch.setattr(pack_module("toma_core.run"), "RECENT", 1.0)
    merged = balanced(model)
    own = sampled(model, steps=8)
    _, error = errors(sampled(merged, steps=8), own)
    monkeypatch.delattr(family.AVSignature, "attention_spans")
    _, isolated = errors(sampled(merged, steps=8), own)
    assert 1.4 * error < isolated


def test_without_audio_and_with_that_of_a_reference(model_of: Any, attach: Any, run_merged: Any) -> None:
    model = model_of("ltx_av")
    run_merged(model, {}, **RUN, latent=torch.zeros(1, 128, FRAMES, HEIGHT, WIDTH))
    conds = {"positive": models.conditioning(model, seed=1, ref_audio={"tokens": noise(1, 6, 128)})}
    run_merged(model, {}, **RUN, **conds)
    merged = attach(model)
    assert not any(map(torch.equal, sampled(merged, **conds), sampled(merged)))


def guided(model: Any, strength: float = 1.0, smaller: int = 1) -> dict[str, Any]:
    """Return sampling options with a guide of one frame, as ComfyUI's node adds it. strength: factor of the attention
    to the guide. smaller: the video's sides divided by the guide's sides."""
    from comfy_extras.nodes_lt import LTXVAddGuide, _append_guide_attention_entry

    latent, mask = torch.zeros(1, 128, FRAMES, HEIGHT, WIDTH), torch.ones(1, 1, FRAMES, HEIGHT, WIDTH)
    guide, more = noise(1, 128, 1, HEIGHT // smaller, WIDTH // smaller), dict[str, Any]()
    if smaller > 1:
        guide, more["guide_mask"] = LTXVAddGuide.dilate_latent(guide, smaller)
        more["latent_downscale_factor"] = smaller
    *conds, latent, mask = LTXVAddGuide.append_keyframe(
        *prompts_of(model).values(), 8, latent, mask, guide, 1.0, (8, 32, 32), **more
    )
    if smaller == 1:
        conds = _append_guide_attention_entry(*conds, FRAME, [1, HEIGHT, WIDTH], strength)
    return {"latent": latent, "noise_mask": mask, "positive": conds[0], "negative": conds[1]}


@loop("family", BOTH)
def test_guides_are_merged_behind_the_video(family: str, model_of: Any, run_merged: Any, run_unmerged: Any) -> None:
    """A guide with a strength other than 1 scales attention to its tokens. Guides of an IC-LoRA have fewer tokens per
    frame than the video. With either guide a run is not merged, with others it is."""
    model, strong = model_of(family), guided(model_of(family))
    stats = run_merged(model, {}, **RUN, **strong)
    assert stats.grids == {(FRAMES + 1, HEIGHT, WIDTH): (FRAMES + 1) * FRAME // 2}
    own = sampled(model, **strong)[0]
    for guide, reason in (
        (guided(model, 0.5), Reason.ARGUMENT_IN_USE(arguments=("self_attention_mask",))),
        (guided(model, smaller=2), Reason.SMALLER_GUIDES()),
    ):
        assert list(run_unmerged(model, **RUN, **guide).unmerged) == [reason]
        assert not torch.equal(sampled(model, **guide)[0], own)


def test_calls_without_a_stream_have_caches_of_their_own(model_of: Any, stats_of: Any) -> None:
    """Guidance may add calls with the video, or its attention to the audio, switched off. The order of these calls may
    differ from step to step."""
    import comfy.samplers
    from comfy.model_patcher import create_model_options_clone

    model, steps = model_of("ltx_av"), list[bool]()

    def guided_by(alternates: bool) -> Any:
        def guide(args: dict[str, Any]) -> Tensor:
            names, found = ["a2v_cross_attn", "run_vx"], {}
            steps.append(alternates and steps[-1:] != [True])
            for name in reversed(names) if steps[-1] else names:
                options = create_model_options_clone(args["model_options"])
                options["transformer_options"][name] = False
                conds = args["model"], [args["cond"]], args["input"], args["sigma"], options
                (found[name],) = comfy.samplers.calc_cond_batch(*conds)
            denoised: Tensor = args["denoised"]
            for name in names:
                denoised = denoised + 0.3 * (args["cond_denoised"] - found[name])
            return denoised

        own = model.clone()
        own.set_model_sampler_post_cfg_function(guide)
        return balanced(own)

    one, other = guided_by(False), guided_by(True)
    assert all(map(torch.equal, sampled(one, steps=6), sampled(other, steps=6)))
    assert len(set(steps)) == 2
    assert stats_of(one).merged_steps == stats_of(other).merged_steps != {}


@loop("settings", ["tokens", "balanced"])
def test_context_windows(settings: str, model_of: Any, attach: Any, stats_of: Any) -> None:
    from comfy_extras.nodes_context_windows import LTXVContextWindowsNode

    model = model_of("ltx_av")
    given = {"model": model, "context_length": 33, "context_overlap": 8, "context_schedule": "standard_static"}
    defaults = {each.id: getattr(each, "default", None) for each in LTXVContextWindowsNode.define_schema().inputs}
    windowed = LTXVContextWindowsNode.execute(**{**defaults, **given}).result[0]
    merged = attach(windowed) if settings == "tokens" else balanced(windowed)
    asked = {"frames": 9, "steps": 4, "cfg": 1.0}
    streams, own = (models.sample_streams(m, HEIGHT, WIDTH, **asked) for m in (merged, windowed))
    assert all(stream.isfinite().all() for stream in streams)
    assert 0 < errors(streams, own)[0] < 0.2
    assert {grid[0] for grid in stats_of(merged).grids} <= {5, 6}
    assert stats_of(merged).unmerged == {}


# By stage of ComfyUI's templates for LTX-2.5: sigmas, and the number of steps that the preset `balanced` merges.
STAGES = {
    "first": ((1.0, 0.99375, 0.9875, 0.98125, 0.975, 0.909375, 0.725, 0.421875, 0.0), 3),
    "second": ((0.85, 0.725, 0.4219, 0.0), 0),
}


@loop("stage", list(STAGES))
def test_the_stages_of_ltx_25(stage: str, stats_of: Any) -> None:
    """LTX-2.5 is the model of LTX-2.3 with the settings below. In the first stage, the sampler draws so little new
    noise that steps are merged."""
    import comfy.sample
    import comfy.samplers
    from comfy.ldm.lightricks.av_model import LTXAVModel

    sigmas, number = STAGES[stage]
    settings = {"ff_bias": False, "audio_ff_bias": False, "use_keyframes_abs_pos_embedding": True}
    known = inspect.signature(LTXAVModel).parameters
    model = models.ltx_av(**{name: value for name, value in settings.items() if name in known})
    dual = getattr(import_module("comfy_extras.nodes_lt"), "Guider_LTXAVDualCFG", None)

    def sampled_stage(model: Any) -> list[Tensor]:
        guider = (dual or comfy.samplers.CFGGuider)(model)
        guider.set_conds(*prompts_of(model).values())
        guider.set_cfg(*((1.0, 1.0) if dual else (1.0,)))
        latent, sampler = models.empty(model, 20, 28, frames=3), comfy.samplers.sampler_object("euler_ancestral")
        given = comfy.sample.prepare_noise(latent, 5), latent, sampler, torch.tensor(sigmas)
        with torch.no_grad():
            return list(guider.sample(*given, disable_pbar=True, seed=5).unbind())

    merged = balanced(model)
    own, found = sampled_stage(model), sampled_stage(merged)
    stats, error = stats_of(merged), errors(found, own)[0]
    assert (stats.unmerged, stats.unmerged_calls, len(stats.merged_steps)) == ({}, {}, number)
    assert 0 < error < 0.2 if number else error == 0
    assert all(map(torch.equal, sampled_stage(merged), found))
