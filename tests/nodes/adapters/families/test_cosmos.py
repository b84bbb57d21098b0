"""Test Cosmos-Predict2 and Anima, whose tokens are (B, frames, height, width, C)."""

from __future__ import annotations

from typing import Any

import torch

from scripts.comfy_pack import pack_module
from testbed import models
from tests.nodes.adapters.families.layouts import HEIGHT, WIDTH, first_fixed
from tests.nodes.adapters.helpers import balanced


def test_presets_merge_a_video_of_a_picture(model_of: Any, stats_of: Any) -> None:
    """In image to video, the first frame is fixed and has its own sigma."""
    model = model_of("cosmos")
    merged = balanced(model)
    asked: dict[str, Any] = {"frames": 5, "steps": 4, "cfg": 1.0, "noise_mask": first_fixed(5)}
    out, plain = (models.sample(each, HEIGHT, WIDTH, **asked) for each in (merged, model))
    stats = stats_of(merged)
    assert (stats.unmerged, stats.without_kv_cache, sorted(stats.merged_steps)) == ({}, None, [1, 2])
    assert 0 < (out - plain).norm() < 0.5 * plain.norm()


def test_patches_inside_a_block_see_all_tokens(model_of: Any, attach: Any) -> None:
    model, seen = model_of("cosmos"), []

    def patch(args: dict[str, Any]) -> dict[str, Any]:
        seen.append(args["x"].shape)
        return args

    patched = model.clone()
    patched.set_model_patch(patch, "mlp_patch")
    out = models.sample(attach(patched), HEIGHT, WIDTH, steps=1, cfg=1.0)
    assert {tuple(shape[1:4]) for shape in seen} == {(1, HEIGHT // 2, WIDTH // 2)}
    assert torch.equal(out, models.sample(model, HEIGHT, WIDTH, steps=1, cfg=1.0))


def test_anima_has_the_same_blocks(pack: Any) -> None:
    import comfy.ops
    from comfy.ldm.anima.model import Anima

    config = models.cosmos().model.model_config.unet_config
    device = torch.device("meta")  # allocates nothing: the text encoder has a hundred million weights
    network = Anima(**{**config, "device": device, "operations": comfy.ops.disable_weight_init})
    found = list(pack_module("nodes.adapters.registry").find(network).hook_pairs())
    assert [module for module, _ in found] == list(network.blocks)
