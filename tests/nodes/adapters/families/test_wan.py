"""Test videos of Wan and Cosmos: modulation by frame, two models, context windows and regions."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from scripts.comfy_pack import pack_module
from testbed import models
from tests.loop import loop
from tests.nodes.adapters.families.layouts import HEIGHT, LAYOUTS, PREDICTED, WIDTH, first_fixed, noise
from tests.nodes.adapters.helpers import balanced

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
    """Merged tokens have the sigma of their frame."""
    frames = 4
    asked = {"frames": frames, "noise_mask": first_fixed(frames), "steps": 1, "cfg": 1.0}
    block = merged_block(models.wan(**WAN22), LAYOUT, lambda m: models.sample(m, HEIGHT, WIDTH, **asked))
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
    """Sample a video in four steps: two by each model."""
    import comfy.sample

    conds = [models.conditioning(high, seed=seed) for seed in (1, 2)]
    latent = torch.zeros(1, 16, frames, HEIGHT, WIDTH)
    noise = comfy.sample.prepare_noise(latent, 5)
    for model, span in ((high, {"last_step": 2}), (low, {"start_step": 2, "force_full_denoise": True})):
        options = {**span, "disable_noise": model is low, "disable_pbar": True}
        given = torch.zeros_like(noise) if model is low else noise
        latent = comfy.sample.sample(model, given, 4, 5.0, "euler", "simple", *conds, latent, **options)
    return latent


@loop(
    ("name", "frames", "steps"), [("balanced", 5, ([1], [1])), ("quality", 5, ([1], [])), ("balanced", 1, ([1], [1]))]
)
def test_presets_where_two_models_take_two_steps_each(
    name: str, frames: int, steps: tuple[list[int], list[int]], wan: Any, stats_of: Any
) -> None:
    merged = balanced(wan, name), balanced(models.wan(seed=1), name)
    assert in_two(*merged, frames=frames).isfinite().all()
    assert tuple(sorted(stats_of(m).merged_steps) for m in merged) == steps
    assert [stats_of(m).unmerged_calls for m in merged] == [{}, {}]


def test_two_models_one_after_the_other(wan: Any, attach: Any, stats_of: Any, no_state_left: None) -> None:
    """Wan 2.2 14B has one model for high noise and one for low noise, each with its own ToMA settings."""
    low = models.wan(seed=1)
    merged = attach(wan, ratio=0.5), attach(low, ratio=0.25)
    out = in_two(*merged)
    assert out.isfinite().all()
    grid = (5, HEIGHT // 2, WIDTH // 2)
    assert [stats_of(m).grids for m in merged] == [{grid: destinations_of(5)}, {grid: 5 * round(0.75 * FRAME)}]
    assert [sorted(stats_of(m).steps) for m in merged] == [[0, 1], [0, 1]]
    assert torch.equal(in_two(*merged), out)
    only = in_two(merged[0], low)
    assert not torch.equal(only, out)
    assert not torch.equal(only, in_two(wan, low))


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
    """A plan belongs to the frames of one context window. Both conditions share it."""
    run_merged(windowed(wan), settings, frames=7, steps=2, cfg=5.0)
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
