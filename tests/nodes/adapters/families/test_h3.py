"""Test MiniMax H3: tokens have no batch axis, modulation is by segments of tokens, and text and audio come before the
video."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from testbed import models
from tests.loop import loop
from tests.nodes.adapters.families.layouts import LAYOUTS, TEXT, errors, noise
from tests.nodes.adapters.helpers import prompts_of

HEIGHT, WIDTH, FRAMES = 12, 16, 5
FRAME = HEIGHT // 2 * (WIDTH // 2)
AUDIO = 2 * models.AUDIO["MiniMaxH3"](FRAMES)[-1]
(LAYOUT,) = LAYOUTS["h3"]
RUN: dict[str, Any] = {"height": HEIGHT, "width": WIDTH, "frames": FRAMES, "cfg": 1.0}


def sampled(model: Any, **options: Any) -> list[Tensor]:
    return models.sample_streams(model, **{**RUN, "steps": 2, **options})


def first_frame() -> dict[str, Any]:
    keyframe = {"resolved_frame_index": 0, "latent": noise(1, 24, 1, HEIGHT, WIDTH)}
    return {"minimax_keyframes": [keyframe], "minimax_frame_count": 17}


def references() -> dict[str, Any]:
    """Return conditioning options for three references: a picture, a video with its sound, and a sound."""
    return {
        "minimax_refs": [
            {"kind": "image", "latent_h": 6, "latent_w": 8, "latent": noise(1, 24, 1, 6, 8)},
            {
                **{"kind": "video_audio", "latent_t": 2, "latent_h": 4, "latent_w": 6, "ref_audio_t": 3},
                **{"latent": noise(1, 24, 2, 4, 6), "audio_latent": noise(1, 32, 2, 3)},
            },
            {"kind": "audio", "ref_audio_t": 4, "audio_latent": noise(1, 32, 2, 4)},
        ]
    }


# By case: conditioning options, and the number of tokens that they add before the video.
BEFORE: dict[str, tuple[dict[str, Any], int]] = {
    "audio alone": ({}, 0),
    "a first frame": (first_frame(), FRAME),
    "references": (references(), 3 * 4 + 2 * 3 + 2 * 2 * 3 + 2 * 4),
    "tags": ({"minimax_token_tags": torch.tensor([[1, 1, 0, 0, 0, 1, 1]])}, 0),
}


@loop("what", BEFORE)
def test_a_block(what: str, model_of: Any, merged_block: Any) -> None:
    """Only the video is merged. It is the last segment of modulation, so this segment becomes shorter."""
    model, (options, others) = model_of("h3"), BEFORE[what]
    before, positive = TEXT + others + AUDIO, models.conditioning(model, seed=1, **options)
    block = merged_block(model, replace(LAYOUT, before=before), lambda m: sampled(m, steps=1, positive=positive))
    assert block.stats.grids == {(FRAMES, HEIGHT // 2, WIDTH // 2): FRAMES * FRAME // 2}
    *segments, (start, end, row) = block.given["mod_segments"]
    assert (start, end) == (before, before + FRAMES * FRAME) == (before, len(block.given["x"]))
    block.seen["mod_segments"] = [*segments, (start, start + block.plan.num_destinations, row)]
    block.agrees()
    assert all(each.bincount().tolist() == [FRAME // 2] * FRAMES for each in block.plan.destinations // FRAME)


@loop("what", BEFORE)
@loop(("sampler", "cfg"), [("euler", 1.0), ("res_multistep", 1.0), ("res_multistep", 3.0)])
def test_runs_of_the_preset(what: str, sampler: str, cfg: float, model_of: Any, run_preset: Any) -> None:
    model, (options, _) = model_of("h3"), BEFORE[what]
    run_preset(model, **{**RUN, "cfg": cfg}, sampler=sampler, **prompts_of(model, **options))


def in_int8(model: Any) -> Any:
    """Return the model as ComfyUI loads it from an int8 checkpoint, which has a scale for each row of the blocks'
    linear layers."""
    import comfy.sd

    found: dict[str, Tensor] = {}
    for key, value in model.model.diffusion_model.state_dict().items():
        found[key] = value.clone()
        if not key.startswith("blocks.") or value.ndim != 2 or "adaln" in key:
            continue
        scale = value.abs().amax(1, keepdim=True) / 127
        marker = torch.tensor(list(json.dumps({"format": "int8_tensorwise"}).encode()), dtype=torch.uint8)
        stem = key.removesuffix(".weight")
        found |= {key: (value / scale).round().to(torch.int8), f"{stem}.weight_scale": scale}
        found[f"{stem}.comfy_quant"] = marker
    loaded = comfy.sd.load_diffusion_model_state_dict(found, model_options={"dtype": torch.float32})
    assert "Quantized" in type(loaded.model.diffusion_model.blocks[0].mlp.fc1.weight.data).__name__
    return loaded


def test_int8_weights_and_a_lora(run_preset: Any) -> None:
    import comfy.sd

    plain = models.h3()
    model = in_int8(plain)
    error = errors(sampled(model), sampled(plain))
    assert 0 < error[0] < 0.1
    lora = {}
    for name, weight in plain.model.diffusion_model.named_parameters():
        if name.startswith("blocks.") and name.endswith((".fc1.weight", ".qkv_proj.weight")):
            stem = f"diffusion_model.{name.removesuffix('.weight')}"
            lora[f"{stem}.lora_up.weight"] = 0.3 * noise(weight.shape[0], 2)
            lora[f"{stem}.lora_down.weight"] = noise(2, weight.shape[1]) / weight.shape[1] ** 0.5
    fast, _ = comfy.sd.load_lora_for_models(model, None, lora, 1.0, 0.0)
    own, _ = run_preset(fast, 0.1, **RUN, sampler="res_multistep")
    assert not torch.equal(own[0], sampled(model, steps=8, sampler="res_multistep")[0])
