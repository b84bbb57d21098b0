"""Test videos with sound, whose latents have two streams. Only the video is merged."""

from __future__ import annotations

from typing import Any

import torch

from testbed import models
from tests.loop import loop
from tests.nodes.adapters.families.layouts import errors, noise
from tests.nodes.adapters.helpers import balanced

FRAMES = 5
SIZES = loop(("kind", "height", "width"), [("ltx_av", 6, 8), ("h3", 12, 16)])


@SIZES
@loop("frames", [1, FRAMES])
def test_errors_grow_with_the_ratio(
    kind: str, height: int, width: int, frames: int, model_of: Any, stats_of: Any
) -> None:
    model, asked = model_of(kind), {"frames": frames, "cfg": 1.0, "steps": 8}
    own, before = models.sample_streams(model, height, width, **asked), 0.0
    for ratio in (0.25, 0.5, 0.75):
        merged = balanced(model, ratio=ratio)
        video, audio = errors(models.sample_streams(merged, height, width, **asked), own)
        assert before < video < 0.1, (ratio, before, video)
        assert 0 < audio < video, (ratio, audio, video)
        assert stats_of(merged).unmerged == {}
        before = video


@SIZES
def test_given_audio_stays_as_it_was_to_the_bit(
    kind: str, height: int, width: int, model_of: Any, stats_of: Any
) -> None:
    import comfy.nested_tensor

    model = model_of(kind)
    video, sound = map(torch.zeros_like, models.empty(model, height, width, 1, FRAMES).unbind())
    sound += noise(*sound.shape)
    merged = balanced(model)
    latent = comfy.nested_tensor.NestedTensor([video, sound])
    mask = comfy.nested_tensor.NestedTensor([torch.ones_like(video[:, :1]), torch.zeros_like(sound)])
    asked = {"frames": FRAMES, "cfg": 1.0, "latent": latent, "noise_mask": mask, "steps": 8}
    own, found = (models.sample_streams(each, height, width, **asked) for each in (model, merged))
    assert torch.equal(found[1], own[1])
    assert not torch.equal(found[0], own[0])
    assert len(stats_of(merged).merged_steps) == 5
