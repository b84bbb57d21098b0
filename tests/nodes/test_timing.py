"""Test timing: which runs are measured in which order, what their times include, and which ratio is recommended."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scripts.comfy_pack import pack_module
from testbed import models

timing = pack_module("nodes.benchmark")
run = pack_module("nodes.adapters.patch_model")
SETTINGS = pack_module("toma_core").UserSettings("balanced", {"min_tokens": 16, "skip_last_blocks": 0})
Timing = timing.Timing


def task(model: Any, *, steps: int = 3, guided: bool = False, size: int = 24) -> Any:
    channels = model.model.latent_format.latent_channels
    negative = models.conditioning(model, seed=2) if guided else None
    return timing.Task(models.conditioning(model), negative, torch.zeros(1, channels, size, size), steps)


def measure(model: Any, ratios: Any, asked: Any, runs: int, on_run: Any = lambda *_: None) -> Any:
    return timing.measure(model, SETTINGS, ratios, asked, runs, on_run)


def timed(ratio: float, *seconds: float) -> Any:
    return Timing(ratio, list(seconds), error=ratio)


@pytest.mark.compat
def test_each_setting_is_timed_and_compared(unet: Any) -> None:
    """The error is that of the same run in ComfyUI's sampler."""
    import comfy.sample

    asked = task(unet)
    unmerged, half, most = measure(unet, [0.5, 0.75], asked, runs=2)
    assert [t.ratio for t in (unmerged, half, most)] == [0.0, 0.5, 0.75]
    for each in (unmerged, half, most):
        assert len(each.seconds) == 2
        assert min(each.seconds) > 0
    assert unmerged.error == 0.0
    assert half.error < most.error
    assert unmerged.merged is None
    assert str(half.merged).startswith("On: 50 % of the tokens merged, 17 of 17 blocks, 3 of 3 steps")
    noise, conds = comfy.sample.prepare_noise(asked.latent, 0), (asked.positive, asked.positive)
    given = noise, 3, 1.0, "euler", "simple", *conds, torch.zeros_like(asked.latent)
    own, merged = (
        comfy.sample.sample(model, *given, disable_pbar=True, seed=0)
        for model in (unet, run.apply_toma(unet, SETTINGS))
    )
    assert half.error == pytest.approx(float((merged - own).norm() / own.norm()), rel=1e-5)


def test_runs_take_turns_in_both_orders(unet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    original, ratios = timing._sample, []

    def spy(model: Any, asked: Any, tick: Any) -> Any:
        attachment = run.attachment_of(model)
        ratios.append((asked.steps, attachment.settings.resolved().ratio if attachment else 0.0))
        return original(model, asked, tick)

    monkeypatch.setattr(timing, "_sample", spy)
    measure(unet, [0.5], task(unet, steps=4), runs=3)
    warm_up, runs = ratios[:2], ratios[2:]
    assert warm_up == [(3, 0.0), (3, 0.5)]
    assert runs == [(4, 0.0), (4, 0.5), (4, 0.5), (4, 0.0), (4, 0.0), (4, 0.5)]


def test_a_model_that_carries_toma_is_compared_with_itself_without(unet: Any, attach: Any) -> None:
    carrier = attach(unet, ratio=0.75)
    before = run.attachment_of(carrier)
    unmerged, half = measure(carrier, [0.5], task(unet), runs=2)
    plain = measure(unet, [0.5], task(unet), runs=2)
    assert unmerged.merged is None
    assert half.error == pytest.approx(plain[1].error)
    assert run.attachment_of(carrier) is before


def test_a_negative_is_evaluated_only_if_there_is_one(unet: Any, record: Any) -> None:
    calls = record(unet.model.diffusion_model)
    for guided in (False, True):
        calls.clear()
        measure(unet, [0.5], task(unet, guided=guided), runs=2)
        assert sum(call.args[0].shape[0] for call in calls) == (1 + guided) * 2 * (3 + 2 * 3)


def test_time_between_the_ends_counts_and_loading_does_not(unet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import comfy.sampler_helpers

    load, now = comfy.sampler_helpers.prepare_sampling, [0.0]

    def slow_load(*args: Any, **kwargs: Any) -> Any:
        now.append(now[-1] + 100.0)
        return load(*args, **kwargs)

    monkeypatch.setattr(comfy.sampler_helpers, "prepare_sampling", slow_load)
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now[-1]))
    with unet.model.diffusion_model.register_forward_pre_hook(lambda *_: now.append(now[-1] + 1.0)):
        seconds, _ = timing._sample(unet, task(unet, steps=3, size=8), lambda *_: None)
    assert (now[-1], seconds) == (103.0, 3.0)


def test_can_be_cancelled_between_steps(unet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import comfy.model_management as management

    steps = list[int]()

    def cancel(*_: Any) -> None:
        steps.append(1)
        management.interrupt_current_processing(len(steps) == 3)

    hook = unet.model.diffusion_model.register_forward_pre_hook(cancel)
    with hook, pytest.raises(management.InterruptProcessingException):
        measure(unet, [0.5], task(unet, steps=50), runs=3)
    assert len(steps) == 3


def test_progress_goes_from_nothing_to_all(unet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run is announced before it begins: both settings warm up and run twice."""
    import comfy.utils

    seen, runs = list[tuple[int, int]](), list[tuple[int, int]]()
    monkeypatch.setattr(comfy.utils, "PROGRESS_BAR_HOOK", lambda *now, **_: seen.append(now[:2]))
    measure(unet, [0.5], task(unet, steps=3, size=8), 2, lambda *run: runs.append(run))
    assert runs == [(n, 6) for n in range(1, 7)]
    assert seen[0] == (1, 18)
    assert seen[-1] == (18, 18)


def test_a_model_that_cannot_be_merged_is_refused(stranger: Any) -> None:
    with pytest.raises(ValueError, match="cannot speed up this model"):
        measure(stranger, [0.5], task(stranger), runs=2)


def test_median_and_spread() -> None:
    assert timed(0.5, 3.0, 1.0, 2.0).median == 2.0
    assert timed(0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0).spread == pytest.approx((2.0, 5.0))


def test_recommends_the_least_error_of_about_the_same_speed() -> None:
    base, third, half, most = timed(0.0, 10, 10.1), timed(0.25, 8, 8.1), timed(0.5, 7, 7.1), timed(0.75, 6.8, 6.9)
    assert timing.recommended([base, third, half, most])[0] is half
    assert timing.recommended([base, third])[0] is third
    assert timing.recommended([base, third, most])[0] is most
    half.error = float("nan")
    assert timing.recommended([base, third, half, most])[0] is most


def test_recommends_the_least_error_that_is_fast_enough() -> None:
    base, third, half, most = timed(0.0, 10, 10.1), timed(0.25, 9, 9.1), timed(0.5, 8, 8.1), timed(0.75, 5, 5.1)
    third.error, half.error, most.error = 0.1, 0.2, 0.3
    assert timing.recommended([base, third, half, most])[1] is half, "a third is only 1.1x as fast"
    assert timing.recommended([base, third])[1] is None
    half.error = 0.4
    assert timing.recommended([base, third, half, most])[1] is most


def test_recommends_nothing_that_is_not_clearly_faster() -> None:
    slower = [timed(0.0, 10, 10), timed(0.5, 11, 11)]
    assert timing.recommended(slower)[0] is None
    noisy = [timed(0.0, 9.5, 10, 10.5), timed(0.5, 7, 9.9, 12)]
    assert timing.recommended(noisy)[0] is None
    assert timing.recommended(noisy)[1] is None
    assert timing.noise(noisy) == pytest.approx((11.16 - 8.16) / 9.9)
