"""Test samplers that draw new noise, and prompts that alternate from step to step, on a trained model."""

from __future__ import annotations

from typing import Any

import comfy.sample
import pytest
import torch
from comfy.samplers import calculate_sigmas, sampler_object
from torch import Tensor

from demo.conditioning import conditioning, empty_latent, seeded_noise
from demo.scenes import scene_from_seed
from tests.loop import loop
from tests.nodes.adapters import test_evaluations as quick
from tests.nodes.adapters.test_evaluations import Trained
from tests.nodes.adapters.test_made_of import by_turns, why_full

plain_run, usual = quick.plain_run, quick.usual
NOISY = ("er_sde", "euler_ancestral", "lcm", "dpmpp_2m_sde", "lms")


@pytest.fixture(scope="module")
def trained(pack: Any) -> Trained:
    """Return the trained model `few`. The other model, `dit`, has an error of 0.14 in small pictures even with Euler's
    method."""
    return Trained("few")


def errors(trained: Trained, sampler: str) -> Tensor:
    """Return the error of merging for each of three pictures of 64 x 64 pixels."""
    seeds = [93_000, 93_001, 93_002]
    scenes = list(map(scene_from_seed, seeds)), [None]
    conds = [conditioning(each, trained.guidance) for each in scenes]
    sigmas = calculate_sigmas(trained.model.get_model_object("model_sampling"), "simple", trained.steps)
    settings = trained.cfg, sampler_object(sampler), sigmas, *conds, empty_latent(64, 64, len(seeds))
    own, found = (
        comfy.sample.sample_custom(model, seeded_noise(seeds, 64, 64), *settings, seed=1, disable_pbar=True)
        for model in (trained.model, trained.merged)
    )
    return (found - own).flatten(1).norm(dim=1) / own.flatten(1).norm(dim=1)


@torch.no_grad()
@loop("name", NOISY)
def test_samplers_that_draw_new_noise(trained: Trained, usual: dict[int, float], stats_of: Any, name: str) -> None:
    """Steps with much new noise are full, and the report gives `new_noise` as the reason. In steps with little new
    noise, regression on the latent predicts how the noise changes tokens."""
    error, stats = errors(trained, name), stats_of(trained.merged)
    assert "new_noise" in why_full(stats)
    if name == "er_sde":  # it draws less and less new noise, so that late steps are merged
        assert set(stats.merged_steps) < set(usual)
        assert stats.merged_steps
        assert error.mean() < 0.1
        assert error.max() < 0.3
    else:
        assert not stats.merged_steps
        assert error.mean() < 0.02


def test_prompts_that_take_turns_in_a_larger_picture(pack: Any) -> None:
    """With plans from the other prompt's picture, the error was 0.10."""
    larger = Trained("few")
    larger.size = 64
    assert larger.error(positive=by_turns(larger)) < 0.09
