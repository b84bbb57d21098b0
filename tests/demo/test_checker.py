"""Test the checker, the model that reads scenes from pictures: its shapes and metrics, and its trained weights."""

from __future__ import annotations

import pytest
import torch

from demo.checker import (
    FEATURES,
    FIRST_TEST_SEED,
    WEIGHTS,
    Checker,
    accuracy,
    correct,
    for_checker,
    frechet_distance,
    load_checker,
    train,
)
from demo.scenes import ATTRIBUTES, render_batch, scene_from_seed, visible
from tests.loop import loop


def test_shapes() -> None:
    checker = Checker()
    image = torch.rand(2, 3, 128, 128) * 2 - 1
    assert [tuple(logits.shape) for logits in checker(image)] == [(2, len(values)) for values in ATTRIBUTES.values()]
    assert checker.features(image).shape == (2, FEATURES)
    with pytest.raises(ValueError, match="128"):
        checker(torch.zeros(1, 3, 64, 64))


def test_marks_leave_out_what_cannot_be_seen() -> None:
    torch.manual_seed(0)
    scenes = [scene_from_seed(seed) for seed in range(12)]
    marks = correct(Checker(), render_batch(scenes), scenes)
    seen = torch.tensor([visible(scene) for scene in scenes])
    assert torch.equal(marks.isnan(), ~seen)
    assert not seen.all()
    shares = accuracy(Checker(), render_batch(scenes), scenes)
    assert list(shares) == ["all", *ATTRIBUTES]
    assert 0 <= shares["all"] <= 1


def test_frechet_distance_of_known_gaussians() -> None:
    generator = torch.Generator().manual_seed(3)
    a = torch.randn(20_000, 4, generator=generator)
    b = 2 * torch.randn(20_000, 4, generator=generator) + 1
    assert frechet_distance(a, a) == pytest.approx(0, abs=1e-9)
    # The closed form for diagonal covariances gives |mean difference|^2 + 4 * (1 + 4 - 2 * 2).
    assert frechet_distance(a, b) == pytest.approx(8, rel=0.05)
    with pytest.raises(ValueError, match="at least two"):
        frechet_distance(a[:1], b)


def test_training_steps_change_the_weights() -> None:
    torch.manual_seed(0)
    checker = Checker()
    before = checker.hidden.weight.detach().clone()
    assert train(checker, steps=2, batch=4) == 2
    after = checker.hidden.weight.detach()
    assert not torch.equal(before, after)
    assert after.isfinite().all()


@loop("side", [64, 128, 256])
def test_pictures_of_any_size_can_be_read(side: int) -> None:
    image = for_checker(1.5 * torch.ones(2, 3, side, side))
    assert image.shape == (2, 3, 128, 128)
    assert image.eq(1).all()


@pytest.mark.skipif(not WEIGHTS.exists(), reason="the checker is not trained yet")
def test_trained_checker_reads_real_scenes() -> None:
    scenes = [scene_from_seed(FIRST_TEST_SEED + index) for index in range(64)]
    assert accuracy(load_checker(), render_batch(scenes), scenes)["all"] > 0.95
    assert accuracy(load_checker(), for_checker(render_batch(scenes, 64)), scenes)["all"] > 0.9
