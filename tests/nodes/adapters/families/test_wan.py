"""Test videos of Wan and Cosmos: modulation by frame, two models, context windows and regions. Test the kinds of Wan
that have references, context, poses or music beside the video, and kinds that are not supported."""

import importlib
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from scripts.comfy_pack import pack_module
from testbed import models
from tests.loop import loop
from tests.nodes.adapters.families.layouts import HEIGHT, LAYOUTS, PREDICTED, WIDTH, current, first_fixed, noise
from tests.nodes.adapters.helpers import balanced, prompts_of

Reason = pack_module("toma_core.reasons").Reason

(LAYOUT,) = LAYOUTS["wan"]
FRAME = HEIGHT // 2 * (WIDTH // 2)
# Wan 2.2 5B has a sigma for each frame.
WAN22 = {"base": "WAN22", "kind": "WAN22_T2V", "in_dim": 48, "out_dim": 48}


@pytest.fixture(scope="module")
def wan(model_of: Any) -> Any:
    return model_of("wan")


def destinations_of(frames: int) -> int:
    return frames * FRAME // 2


def test_modulation_by_frame(merged_block: Any) -> None:
    """Each destination is modulated by the sigma of its frame."""
    frames = 4
    block = merged_block(models.wan(**WAN22), LAYOUT, frames=frames, noise_mask=first_fixed(frames))
    e, frame = block.given["e"], block.plan.destinations[0] // FRAME
    assert e.shape[:3] == (1, frames, 6)
    assert frame.bincount().tolist() == [FRAME // 2] * frames
    block.seen["e"] = e[:, frame]
    block.agrees()
    block.needs(e=e[:, frame.flip(0)])


def test_blocks_are_not_merged_if_frames_do_not_explain_modulation(run_merged: Any, run_unmerged: Any) -> None:
    """Frames behind the video have no sigmas of their own. ComfyUI stretches the video's sigmas over all frames, so
    tokens get the sigmas of other frames."""
    model = models.wan(**WAN22)
    behind = models.conditioning(model, seed=1, time_dim_concat=noise(1, 48, 1, HEIGHT, WIDTH))
    asked = {"frames": 3, "positive": behind}
    assert list(run_unmerged(model, noise_mask=first_fixed(3), **asked).unmerged) == [Reason.OWN_MODULATION()]
    # Without a fixed first frame, all frames have the same sigma, so blocks are merged.
    run_merged(model, {}, steps=1, cfg=1.0, **asked)


def in_two(high: Any, low: Any, frames: int = 5) -> Tensor:
    """Sample a video in four steps: two by `high`, then two by `low`."""
    import comfy.sample

    conds = prompts_of(high).values()
    latent = torch.zeros(1, 16, frames, HEIGHT, WIDTH)
    noise = comfy.sample.prepare_noise(latent, 5)
    for model, span in ((high, {"last_step": 2}), (low, {"start_step": 2, "force_full_denoise": True})):
        options = {**span, "disable_noise": model is low, "disable_pbar": True}
        given = torch.zeros_like(noise) if model is low else noise
        latent = comfy.sample.sample(model, given, 4, 5.0, "euler", "simple", *conds, latent, **options)
    return latent


@loop(
    ("name", "frames", "steps"),
    [("", 5, [[0, 1], [0, 1]]), ("balanced", 5, [[1], [1]]), ("quality", 5, [[1], []]), ("balanced", 1, [[1], [1]])],
)
def test_two_models_one_after_the_other(
    name: str, frames: int, steps: list[list[int]], wan: Any, attach: Any, stats_of: Any, no_state_left: None
) -> None:
    """Wan 2.2 14B has one model for high noise and one for low noise, each with its own ToMA settings. name: the
    preset, or empty for none. steps: the merged steps of each model."""
    low, apply = models.wan(seed=1), partial(balanced, name=name) if name else attach
    merged = apply(wan, ratio=0.5), apply(low, ratio=0.25)
    out = in_two(*merged, frames=frames)
    assert out.isfinite().all()
    assert [sorted(stats_of(m).merged_steps) for m in merged] == steps
    assert [sorted(stats_of(m).steps) for m in merged] == [[0, 1], [0, 1]]
    assert [stats_of(m).unmerged_calls for m in merged] == [{}, {}]
    if not name:
        grid = (5, HEIGHT // 2, WIDTH // 2)
        assert [stats_of(m).grids for m in merged] == [{grid: destinations_of(5)}, {grid: 5 * round(0.75 * FRAME)}]
    assert torch.equal(in_two(*merged, frames=frames), out)
    only = in_two(merged[0], low, frames)
    assert torch.equal(only, out) is (steps[1] == [])
    assert not torch.equal(only, in_two(wan, low, frames))


def windowed(model: Any) -> Any:
    """Return the model with context windows of 5 latent frames that overlap by 3. ComfyUI may add a frame before each
    window but the first."""
    node = importlib.import_module("comfy_extras.nodes_context_windows").WanContextWindowsManualNode
    return node.execute(model, 17, 12, "standard_static", 1, False, "pyramid", False).result[0]


def test_room_is_asked_for_context_windows(wan: Any, stats_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each context window has its own cache, so a frame in two windows is cached twice."""
    run, merged, asked = pack_module("nodes.adapters.patch_model"), balanced(windowed(wan)), list[int]()
    reserved = run.reserved
    monkeypatch.setattr(run, "reserved", lambda model, more: asked.append(more) or reserved(model, more))
    models.sample(merged, HEIGHT, WIDTH, frames=13, steps=4, cfg=5.0)
    held = stats_of(merged).cache_bytes
    assert held <= asked[0] < 1.1 * held


@loop("settings", [{}, PREDICTED], ids=["tokens", "prediction"])
def test_context_windows_over_frames(settings: Any, wan: Any, run_merged: Any, plan_calls: Any) -> None:
    """A plan belongs to the frames of one context window. Both conditions share the plan."""
    run_merged(windowed(wan), settings, frames=7, cfg=5.0)
    grids = {call.grid[0] for call in plan_calls}
    assert grids in ({5}, {5, 6})
    shown = {frames for call in plan_calls for _, frames in call.copies}
    assert (0, 1, 2, 3, 4) in shown
    assert len(shown) > 1
    assert all(len({frames for _, frames in call.copies}) == 1 for call in plan_calls)


def test_regions_of_a_video(wan: Any, run_merged: Any) -> None:
    """A prompt for an area of the picture applies to this area in every frame."""
    positive = models.conditioning(wan, seed=1) + models.conditioning(wan, seed=3, area=(12, 16, 4, 8))
    assert set(run_merged(wan, {}, frames=3, steps=2, cfg=1.0, positive=positive).grids) == {(3, 10, 14), (3, 6, 8)}


def test_attention_receives_the_number_of_tokens_per_frame(wan: Any, attach: Any) -> None:
    seen = set()

    def override(function: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.add((q.shape[1], tuple(kwargs["transformer_options"]["grid_sizes"])))
        return function(q, k, v, *args, **kwargs)

    patched = wan.clone()
    patched.model_options["transformer_options"]["optimized_attention_override"] = override
    models.sample(attach(patched), HEIGHT, WIDTH, frames=3, steps=1, cfg=1.0)
    assert seen == {(destinations_of(3), (3, 1, FRAME // 2))}


def test_a_video_that_is_no_video_of_this_model(model_of: Any, run_unmerged: Any) -> None:
    """Latents of Qwen-Image have an axis of frames. A latent with several frames is not merged."""
    stats = run_unmerged(model_of("qwen_image"), frames=3)
    assert [reason.id.value for reason in stats.unmerged_calls] == ["unknown_latent"]


def test_presets_merge_a_video_of_a_picture(model_of: Any, run_preset: Any) -> None:
    """In image to video of Cosmos, the first frame is fixed and has its own sigma."""
    run_preset(model_of("cosmos"), 0.5, height=HEIGHT, width=WIDTH, frames=5, cfg=1.0, noise_mask=first_fixed(5))


def test_anima_has_the_blocks_of_cosmos(pack: Any) -> None:
    import comfy.ops
    from comfy.ldm.anima.model import Anima

    config = models.cosmos().model.model_config.unet_config
    device = torch.device("meta")  # allocates nothing: the text encoder has a hundred million weights
    network = Anima(**{**config, "device": device, "operations": comfy.ops.disable_weight_init})
    found = list(pack_module("nodes.adapters.registry").find(network).hook_pairs())
    assert [module for module, _ in found] == list(network.blocks)


@loop("what", ["reference", "context", "further frames"])
def test_other_frames_are_not_merged(what: str, merged_block: Any, run_merged: Any) -> None:
    if what == "context" and not current():
        pytest.skip("this ComfyUI may have no context latents")
    before = FRAME if what == "reference" else 0
    model = models.wan(**({"in_dim_ref_conv": 16} if before else {}))
    options, others = {
        "reference": ({"reference_latents": [noise(1, 16, 1, HEIGHT, WIDTH)]}, FRAME),
        "context": ({"context_latents": [noise(1, 16, 1, 8, 12), noise(1, 16, 2, HEIGHT, WIDTH)]}, 4 * 6 + 2 * FRAME),
        "further frames": ({"time_dim_concat": noise(1, 16, 2, HEIGHT, WIDTH)}, 2 * FRAME),
    }[what]
    asked = {"frames": 3, "positive": models.conditioning(model, seed=1, **options)}
    block = merged_block(model, replace(LAYOUT, before=before), **asked)
    assert block.tokens.shape[1] == 3 * FRAME + others
    block.agrees()
    run_merged(model, {}, steps=2, cfg=5.0, **asked)


# Stands in for the CLIP vision output of a picture.
SEEN = SimpleNamespace(penultimate_hidden_states=noise(1, 257, 1280))


def test_blocks_are_not_merged_with_reference_and_context(run_unmerged: Any) -> None:
    """Blocks do not receive the number of reference and context tokens, so ToMA cannot know where the video begins."""
    if not current():
        pytest.skip("this ComfyUI may have no context latents")
    model = models.wan(in_dim_ref_conv=16)
    options = {"reference_latents": [noise(1, 16, 1, HEIGHT, WIDTH)], "context_latents": [noise(1, 16, 1, 8, 12)]}
    stats = run_unmerged(model, frames=3, positive=models.conditioning(model, seed=1, **options))
    assert list(stats.unmerged) == [Reason.UNKNOWN_IMAGE_POSITION()]


def test_an_image_to_video_model(run_merged: Any) -> None:
    """The first frame and its mask are channels of the latent. The frame's CLIP vision output is treated as text."""
    model = models.wan(kind="WAN21_I2V", model_type="i2v", in_dim=36)
    model.model.image_to_video = True
    options = {"concat_latent_image": noise(1, 16, 5, HEIGHT, WIDTH), "concat_mask": first_fixed(5)}
    positive = models.conditioning(model, seed=1, **options, clip_vision_output=SEEN)
    run_merged(model, {}, frames=5, steps=2, cfg=1.0, positive=positive)


# By kind: options of the model, and the number of blocks of each chain.
KINDS: dict[str, tuple[dict[str, Any], list[int]]] = {
    "vace": ({"base": "WAN21_Vace", "kind": "WAN21_Vace", "vace_layers": 3, "vace_in_dim": 96}, [1, 2, 2, 1]),
    "camera": ({"base": "WAN21_Camera", "kind": "WAN22_Camera", "model_type": "camera_2.2"}, [6]),
    "animate": ({"base": "WAN22_Animate", "kind": "WAN22_Animate"}, [1, 5, 1]),
    "wandancer": (
        {"base": "WAN22_WanDancer", "kind": "WAN22_WanDancer", "in_dim": 36, "audio_inject_layers": [0, 4]},
        [1, 4, 1],
    ),
}


@loop("kind", KINDS)
def test_kinds_that_read_all_tokens_between_blocks(kind: str, attach: Any, record: Any, stats_of: Any) -> None:
    settings, chains = KINDS[kind]
    model = models.wan(**{"model_type": kind, "layers": sum(chains), **settings})
    blocks, height = model.model.diffusion_model.blocks, HEIGHT
    options: dict[str, Any] = {"camera_conditions": noise(1, 24, 3, 8 * HEIGHT, 8 * WIDTH)} if kind == "camera" else {}
    if kind == "wandancer":  # the model cuts each frame into 8 equal parts, one per piece of music
        height, options = 16, {"audio_embed": noise(1, 20, 35), "clip_vision_output": SEEN}
    conds = {"positive": models.conditioning(model, seed=1, **options)}
    asked = {"frames": 3, "steps": 1, "cfg": 1.0, **conds}
    calls, merged = [record(block) for block in blocks], attach(model)
    out = models.sample(merged, height, WIDTH, **asked)
    assert out.isfinite().all()
    assert stats_of(merged).unmerged == {}
    assert len(stats_of(merged).merged_blocks) == len(blocks)
    starts = [index for index, (call,) in enumerate(calls) if call.args[0].shape[1] == 3 * height // 2 * WIDTH // 2]
    assert starts == [sum(chains[:n]) for n in range(len(chains))]
    plain = models.sample(model, height, WIDTH, **asked)
    assert not torch.equal(out, plain)
    small = models.sample(attach(model, ratio=0.02), height, WIDTH, **asked) - plain
    assert small.norm() < 0.5 * (out - plain).norm()


@loop("kind", ["scail", "scail2"])
@loop("references", [0, 2])
def test_references_are_frames_and_poses_follow(kind: str, references: int, merged_block: Any, run_preset: Any) -> None:
    """Poses of SCAIL may have half the height and width of the video. Neither references nor poses are merged."""
    import comfy.model_base

    name = kind.upper()
    if not hasattr(comfy.model_base, f"WAN21_{name}"):
        pytest.skip(f"this ComfyUI has no {name}")
    model = models.wan(base=f"WAN21_{name}", kind=f"WAN21_{name}", model_type=kind, in_dim=20)
    options: dict[str, Any] = {"pose_video_latent": noise(1, 16, 3, 10, 14), "clip_vision_output": SEEN}
    if references:
        options["reference_latents"] = [noise(1, 16, 1, HEIGHT, WIDTH)] * references
    if kind == "scail2":
        options["driving_mask_28ch"] = noise(1, 3, 28, 10, 14)
        options["ref_mask_28ch"] = noise(1, 3 + references, 28, HEIGHT, WIDTH)
        options["ref_mask_flag"] = False
    asked = {"frames": 3, "positive": models.conditioning(model, seed=1, **options)}
    before = references * FRAME
    block = merged_block(model, replace(LAYOUT, before=before), **asked)
    assert (block.plan.tokens, block.tokens.shape[1]) == (3 * FRAME, before + 3 * FRAME + 3 * 5 * 7)
    block.agrees()
    run_preset(model, 0.5, height=HEIGHT, width=WIDTH, cfg=3.0, **asked)


UNKNOWN: dict[str, dict[str, Any]] = {
    "CausalWanModel": {"base": "WAN21_CausalAR", "kind": "WAN21_CausalAR_T2V"},
    "HumoWanModel": {"base": "WAN21_HuMo", "kind": "WAN21_HuMo", "model_type": "humo"},
}


@loop("name", UNKNOWN)
def test_kinds_that_are_not_known_are_refused(name: str, attach: Any) -> None:
    import comfy.model_base

    if not hasattr(comfy.model_base, UNKNOWN[name]["base"]):
        pytest.skip(f"this ComfyUI has no {name}")
    with pytest.raises(pack_module("nodes.adapters.registry").UnsupportedModelError, match=name):
        attach(models.wan(**UNKNOWN[name]))
