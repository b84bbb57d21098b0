"""Test latents of several streams, such as a video with its sound: only the first stream is merged, measured and
drawn."""

from typing import Any

import pytest
import torch

from scripts.comfy_pack import pack_module
from testbed import models
from tests.loop import loop
from tests.nodes.adapters.families.layouts import errors, noise
from tests.nodes.adapters.helpers import balanced

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
def test_the_cache_is_reckoned_by_the_video_beside_all_streams(
    kind: str, model_of: Any, stats_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ComfyUI estimates memory by the shape of the packed streams. ToMA estimates its cache by the shape of the
    video."""
    model, seen, asked = model_of(kind), [], list[int]()
    merged, left, reserved = balanced(model), kv_memory.memory_left, run.reserved
    monkeypatch.setattr(kv_memory, "memory_left", lambda own, shape: seen.append(tuple(shape)) or left(own, shape))
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


@BOTH
@loop("frames", [1, 5])
def test_errors_grow_with_the_ratio(kind: str, frames: int, model_of: Any, stats_of: Any) -> None:
    model, asked = model_of(kind), {"frames": frames, "cfg": 1.0, "steps": 8}
    own, before = models.sample_streams(model, HEIGHT, WIDTH, **asked), 0.0
    for ratio in (0.25, 0.5, 0.75):
        merged = balanced(model, ratio=ratio)
        video, audio = errors(models.sample_streams(merged, HEIGHT, WIDTH, **asked), own)
        assert before < video < 0.1, (ratio, before, video)
        assert 0 < audio < video, (ratio, audio, video)
        assert stats_of(merged).unmerged == {}
        before = video


@BOTH
def test_given_audio_stays_as_it_was_to_the_bit(kind: str, model_of: Any, run_preset: Any) -> None:
    from comfy.nested_tensor import NestedTensor

    model = model_of(kind)
    video, sound = map(torch.zeros_like, models.empty(model, HEIGHT, WIDTH, 1, FRAMES).unbind())
    latent = NestedTensor([video, sound + noise(*sound.shape)])
    mask = NestedTensor([torch.ones_like(video[:, :1]), torch.zeros_like(sound)])
    size = {"height": HEIGHT, "width": WIDTH, "frames": FRAMES}
    own, found = run_preset(model, **size, cfg=1.0, latent=latent, noise_mask=mask)
    assert torch.equal(found[1], own[1])
