"""Test the checker, the model that reads scenes from pictures: its metrics and its trained weights."""

import pytest
import torch

from demo.checker import FIRST_TEST_SEED, Checker, accuracy, correct, for_checker, frechet_distance, load_checker
from demo.scenes import render_batch, scene_from_seed, visible


def test_marks_leave_out_what_cannot_be_seen() -> None:
    scenes = [scene_from_seed(seed) for seed in range(12)]
    marks = correct(Checker(), render_batch(scenes), scenes)
    assert torch.equal(marks.isnan(), ~torch.tensor([visible(scene) for scene in scenes]))
    assert marks.isnan().any()


def test_frechet_distance_of_known_gaussians() -> None:
    a, b = torch.randn(2, 20_000, 4, generator=torch.Generator().manual_seed(3))
    b = 2 * b + 1
    assert frechet_distance(a, a) == pytest.approx(0, abs=1e-9)
    # In 4 channels, means differ by 1 and variances are 1 and 4. The distance is 4 * (1 + 1 + 4 - 2 * 2).
    assert frechet_distance(a, b) == pytest.approx(8, rel=0.05)


def test_trained_checker_reads_scenes_at_both_sizes() -> None:
    scenes = [scene_from_seed(FIRST_TEST_SEED + index) for index in range(64)]
    assert accuracy(load_checker(), render_batch(scenes), scenes)["all"] > 0.95
    assert accuracy(load_checker(), for_checker(render_batch(scenes, 64)), scenes)["all"] > 0.9
