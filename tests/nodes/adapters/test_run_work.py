"""The reported savings of a run equal those of its counted operations."""

from __future__ import annotations

from typing import Any

from benchmarks import models
from scripts.comfy_pack import pack_module

last_runs = pack_module("nodes.adapters.last_runs")
patch_model = pack_module("nodes.adapters.patch_model")


def run_of(model: Any, steps: int = 4, **settings: Any) -> Any:
    config = {"ratio": 0.5, "min_tokens": 16, "skip_last_blocks": 0, **settings}
    patched = patch_model.apply_toma(model, pack_module("toma_core").Settings("balanced", config))
    models.sample(patched, 32, 32, steps=steps)
    return last_runs.last(patch_model.attachment_of(patched).report_id)


def test_more_is_saved_at_a_higher_ratio_and_never_more_than_the_blocks_are(unet: Any) -> None:
    """Convolutions are not merged: at 0.75 a UNet cannot save three quarters."""
    quarter, half, most = (run_of(unet, ratio=ratio).times_less_work for ratio in (0.25, 0.5, 0.75))
    assert 1 < quarter < half < most < 4


def test_full_steps_save_nothing(unet: Any) -> None:
    every, second = run_of(unet).times_less_work, run_of(unet, full_step_interval=2).times_less_work
    assert 1 < second < every


def test_it_stands_below_the_verdict(unet: Any) -> None:
    run = run_of(unet)
    (work,) = run.work()
    assert str(work) == f"About {run.times_less_work:.1f}x less work, counted"
    assert f"{work}." in run.text().splitlines()[1]
    assert str(work) in run.summary()


def test_a_run_that_merges_nothing_says_nothing(unet: Any) -> None:
    run = run_of(unet, min_tokens=1 << 20)
    assert run.times_less_work is None
    assert run.work() == []
