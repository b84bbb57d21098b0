"""Test moving scenes, and the tiny Wan that is trained on them."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import comfy.model_base
import numpy as np
import pytest
import torch
from comfy.samplers import calculate_sigmas
from PIL import Image
from safetensors.torch import save_file

from demo import models, video
from demo.clips import FRAMES, MOTIONS, Clip, clip_from_seed, clip_tokens, render_clips, step_token
from demo.data import CLIP_SIZE, Batches, Plan
from demo.latents import clips_to_model, image_to_model, model_to_clips
from demo.objectives import FewStepsObjective, WanCall
from demo.scenes import ATTRIBUTES, TEXT_DIM, render, scene_from_seed, scene_tokens


def test_what_moves_moves_and_all_else_stands_still() -> None:
    scene = replace(scene_from_seed(1), texture=0, objects=0, gradient=0, shape=0, shape_size=0, shape_cell=4)
    (clip,) = render_clips([Clip(scene, shape_way=2, speed=1)], 128)
    assert clip.shape == (3, FRAMES, 128, 128)
    torch.testing.assert_close(clip[:, FRAMES // 2], torch.from_numpy(render(scene)).permute(2, 0, 1))
    # The shape moves to the right by six pixels per frame.
    torch.testing.assert_close(clip[:, 3, 40:90, 46:96], clip[:, 2, 40:90, 40:90])
    still = render_clips([Clip(scene)], 64)[0]
    assert all(torch.equal(still[:, frame], still[:, 0]) for frame in range(FRAMES))


def test_tokens_encode_the_scene_and_its_motions() -> None:
    clip = clip_from_seed(11)
    assert clip == clip_from_seed(11)
    tokens = clip_tokens(clip)
    assert torch.equal(tokens[: len(ATTRIBUTES)], scene_tokens(clip.scene))
    codes = torch.cat([clip_tokens(clip_from_seed(seed))[len(ATTRIBUTES) :] for seed in range(40)]).unique(dim=0)
    assert len(codes) == sum(map(len, MOTIONS.values())), "each value has a code of its own"
    others = torch.cat([codes, scene_tokens(scene_from_seed(5)), scene_tokens(None)[:1], step_token(4), step_token(8)])
    assert (others @ others.T / TEXT_DIM).fill_diagonal_(0).abs().max() < 1e-4
    assert torch.equal(clip_tokens(None), scene_tokens(None)[:1].expand(len(tokens), -1))


def test_clips_are_pictures_frame_by_frame() -> None:
    clips = render_clips([clip_from_seed(1), clip_from_seed(2)], CLIP_SIZE)
    latent = clips_to_model(clips)
    assert latent.shape == (2, 16, FRAMES, CLIP_SIZE // 2, CLIP_SIZE // 2)
    assert torch.equal(latent[:, :, 3], image_to_model(clips[:, :, 3]))
    assert torch.equal(model_to_clips(latent), clips)


def test_the_wan_is_taught_few_steps() -> None:
    """The student gets the number of steps as an 18th token of the prompt. Training uses the same sigmas as ComfyUI's
    sampler."""
    batch = Batches(Plan("wan", 3, crop_batch=4))[0]
    seen = []

    def spy(x: Any, timestep: Any, context: Any, transformer_options: object) -> Any:
        seen.append((timestep, context.shape[1]))
        return torch.zeros_like(x)

    FewStepsObjective(spy, 2.0, WanCall()).loss(spy, batch)
    assert [tokens for _, tokens in seen] == [18, 17, 18, 17, 18]
    sigmas = set(calculate_sigmas(WanCall.model_sampling(), "simple", 16).tolist())
    assert {round(float(sigma), 5) for sigma in seen[1][0] / 1000} <= {round(sigma, 5) for sigma in sigmas}


def test_a_file_of_a_wan_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, sheet = str(tmp_path / "wan.safetensors"), str(tmp_path / "sheet.png")
    network = models.new_wan(0, config={**models.WAN_CONFIG, "num_layers": 2}, to_train=False)
    save_file(network.state_dict(), weights)
    model = models.load_wan(weights)
    assert type(model.model) is comfy.model_base.WAN21
    assert model.get_model_object("model_sampling").shift == models.CLIP_SHIFT
    drawn = video.draw_clips(model, [clip_from_seed(1), clip_from_seed(2)], [1, 2], 2, 2.0, model_steps=4)
    assert drawn.shape == (2, 16, FRAMES, 16, 16)
    assert drawn.isfinite().all()
    alone = video.draw_clips(model, [clip_from_seed(2)], [2], 2, 2.0, model_steps=4)
    torch.testing.assert_close(drawn[1:], alone, atol=2e-3, rtol=1e-2)
    given = ["--weights", weights, "--sheet", sheet, "--count", "1", "--steps", "1"]
    monkeypatch.setattr(sys, "argv", ["video", *given])
    video.main()
    assert np.asarray(Image.open(sheet)).shape == (2 * 3 * CLIP_SIZE, FRAMES * 3 * CLIP_SIZE, 3)
