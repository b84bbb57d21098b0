"""Test the kinds of Wan that have references, context, poses or music beside the video, and kinds that are not
supported."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scripts.comfy_pack import pack_module
from testbed import models
from tests.loop import loop
from tests.nodes.adapters.families.layouts import HEIGHT, LAYOUTS, WIDTH, current, first_fixed, noise
from tests.nodes.adapters.helpers import balanced

Reason = pack_module("toma_core.reasons").Reason

(LAYOUT,) = LAYOUTS["wan"]
FRAME = HEIGHT // 2 * (WIDTH // 2)


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
    layout = replace(LAYOUT, before=before)
    block = merged_block(model, layout, lambda m: models.sample(m, HEIGHT, WIDTH, steps=1, cfg=1.0, **asked))
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
    conds = {"positive": models.conditioning(model, seed=1, **options)}
    stats = run_unmerged(model, frames=3, **conds)
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
    "vace": (
        {"base": "WAN21_Vace", "kind": "WAN21_Vace", "vace_layers": 3, "vace_in_dim": 96, "layers": 6},
        [1, 2, 2, 1],
    ),
    "camera": ({"base": "WAN21_Camera", "kind": "WAN22_Camera", "model_type": "camera_2.2", "layers": 6}, [6]),
    "animate": ({"base": "WAN22_Animate", "kind": "WAN22_Animate", "layers": 7}, [1, 5, 1]),
    "wandancer": (
        {
            "base": "WAN22_WanDancer",
            "kind": "WAN22_WanDancer",
            "in_dim": 36,
            "layers": 6,
            "audio_inject_layers": [0, 4],
        },
        [1, 4, 1],
    ),
}


@loop("kind", KINDS)
def test_kinds_that_read_all_tokens_between_blocks(kind: str, attach: Any, record: Any, stats_of: Any) -> None:
    settings, chains = KINDS[kind]
    model = models.wan(**{"model_type": kind, **settings})
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
def test_references_are_frames_and_poses_follow(kind: str, references: int, merged_block: Any, stats_of: Any) -> None:
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
    layout = replace(LAYOUT, before=before)
    block = merged_block(model, layout, lambda m: models.sample(m, HEIGHT, WIDTH, steps=1, cfg=1.0, **asked))
    assert (block.plan.tokens, block.tokens.shape[1]) == (3 * FRAME, before + 3 * FRAME + 3 * 5 * 7)
    block.agrees()
    preset = balanced(model)
    assert models.sample(preset, HEIGHT, WIDTH, steps=4, cfg=3.0, **asked).isfinite().all()
    assert (stats_of(preset).unmerged, stats_of(preset).unmerged_calls) == ({}, {})


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
