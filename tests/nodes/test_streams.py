"""Test latents of several streams, such as a video with its sound: only the first stream is merged, measured and
drawn."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from scripts.comfy_pack import pack_module
from testbed import models
from tests.loop import loop
from tests.nodes.adapters.kv_helpers import preset

streams = pack_module("nodes.adapters.streams")
run, kv_memory = pack_module("nodes.adapters.patch_model"), pack_module("nodes.adapters.kv_memory")
HEIGHT, WIDTH, FRAMES = 12, 16, 3
BOTH = loop("kind", ["ltx_av", "h3"])


def test_the_first_of_a_pack_is_a_view() -> None:
    import comfy.utils

    video, audio = torch.randn(2, 4, 3, 5, 6), torch.randn(2, 8, 7)
    packed, shapes = comfy.utils.pack_latents([video, audio])
    found = streams.first(packed, shapes)
    assert torch.equal(found, video)
    assert found.untyped_storage().data_ptr() == packed.untyped_storage().data_ptr()
    assert streams.first(video, [video.shape]) is video
    assert streams.first(video, None) is video


@BOTH
def test_plans_are_made_from_the_predicted_video(kind: str, model_of: Any, attach: Any, stats_of: Any) -> None:
    """All blocks and both conditions share one plan in each merged step."""
    model = model_of(kind)
    settings = {"similarity_from": "prediction", "selection_interval": 1, "weight_interval": 1, "kv_cache": True}
    merged = attach(model, full_step_interval=4, **settings)
    found = models.sample_streams(merged, HEIGHT, WIDTH, frames=FRAMES, steps=4, cfg=3.0)
    assert all(each.isfinite().all() for each in found)
    assert (sorted(stats_of(merged).merged_steps), stats_of(merged).selections) == ([1, 2], 2)


@BOTH
def test_the_cache_is_reckoned_by_the_video_beside_all_streams(
    kind: str, model_of: Any, stats_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ComfyUI estimates memory by the shape of the packed streams. ToMA estimates its cache by the shape of the
    video."""
    model, seen, asked = model_of(kind), [], list[int]()
    merged, left, reserved = run.apply_toma(model, preset("balanced")), kv_memory.memory_left, run.reserved
    monkeypatch.setattr(
        kv_memory, "memory_left", lambda guider, shape: seen.append(tuple(shape)) or left(guider, shape)
    )
    monkeypatch.setattr(run, "reserved", lambda m, n: asked.append(n) or reserved(m, n))
    models.sample_streams(merged, HEIGHT, WIDTH, frames=FRAMES, steps=4, cfg=3.0)
    numbers = sum(each.numel() for each in models.empty(model, HEIGHT, WIDTH, 1, FRAMES).unbind())
    assert seen == [(1, 1, numbers)]
    assert asked == [stats_of(merged).cache_bytes]


@pytest.mark.usefixtures("previews")
@BOTH
def test_the_map_shows_a_frame(kind: str, model_of: Any, attach: Any, stats_of: Any) -> None:
    model = model_of(kind)
    merged = attach(model)
    models.sample_streams(merged, HEIGHT, WIDTH, frames=FRAMES, steps=2, cfg=1.0)
    ((grid, drawn),) = stats_of(merged).maps.items()
    assert drawn.frames == grid[0] == FRAMES
    assert len(drawn.owner) == grid[1] * grid[2]
    latent = {"samples": models.empty(model, HEIGHT, WIDTH, 1, FRAMES)}
    text, sheet, passed = pack_module("nodes.report").ToMAReport.execute(merged, latent).args
    assert text.startswith("On: 50 % of the tokens merged, ")
    assert sheet.isfinite().all()
    assert passed is latent


@pytest.mark.usefixtures("previews")
@BOTH
def test_benchmark_of_a_video_with_sound(kind: str, model_of: Any) -> None:
    model = model_of(kind)
    frames = 9 if kind == "h3" else FRAMES  # nodes only merge grids of 256 tokens or more, and a frame of H3 has 48
    latent = {"samples": models.empty(model, HEIGHT, WIDTH, 1, frames)}
    positive = models.conditioning(model)
    node = pack_module("nodes.benchmark").ToMABenchmark
    answer = node.execute(model, 0.5, "balanced", sweep=False, steps=4, runs=2, positive=positive, latent=latent)
    assert f"latent {WIDTH} x {HEIGHT}, batch 1" in answer.args[1]
    error = float(re.findall(r"ratio 0.5 .*\| (\S+) +\|", answer.args[1])[0])
    assert 0 < error < 0.2
