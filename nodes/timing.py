"""Measure how long a model samples on this machine, with and without ToMA in turn.

Each run goes through ComfyUI's sampler; its time includes the making of plans, but not the loading of the model. The
clock waits for the device twice per run, before the first step and after the last, never in between.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP
from torch import Tensor

from ..toma_core import ToMAConfig, UserSettings
from ..toma_core.reasons import Message
from .adapters.attachment import last_stats
from .adapters.patch_model import apply_toma
from .adapters.report_text import headline
from .task import Task, error, progress

_WARM_UP_STEPS = 3  # enough for one merged step between the first and the last, which are full
WORTH = 1.2  # the lowest speed-up at which merging is worth its error
TOO_NOISY = 0.15  # if the runs of one ratio differ by more than this share of their median, no ratio is recommended


@dataclass
class Timing:
    """The measurements at one ratio."""

    ratio: float  # 0 without ToMA
    seconds: list[float] = field(default_factory=list)  # per step, one value for each run
    error: float = 0.0  # relative L2 error of the final latent
    merged: Message | None = None  # what the first run merged, or why it merged nothing

    @property
    def median(self) -> float:
        """Seconds per step."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> tuple[float, float]:
        """The 20th and the 80th percentile of the seconds per step."""
        low, _, _, high = statistics.quantiles(self.seconds, n=5, method="inclusive")
        return low, high


def measure(
    model: ModelPatcher,
    settings: UserSettings,
    ratios: Sequence[float],
    task: Task,
    runs: int,
    on_run: Callable[[int, int], None] = lambda run, runs: None,
) -> list[Timing]:
    """Return the timing without ToMA, then the timing at each ratio.

    The model first samples a few steps at each ratio to warm up. Then the ratios are timed in turn, forwards and
    backwards, so that no ratio gains if the machine slows down. The given model is not changed, and its own ToMA
    settings are ignored. on_run: called when a run begins, with its number and the count of runs. Raises
    `UnsupportedModelError`, and ComfyUI's own exception if the user cancels.
    """
    base = apply_toma(model, ToMAConfig(ratio=0.0))
    merged = [apply_toma(base, replace(settings, overrides={**settings.overrides, "ratio": each})) for each in ratios]
    timings = [Timing(ratio) for ratio in (0.0, *ratios)]
    pairs = list(zip(timings, [base, *merged], strict=True))
    warm_up = min(_WARM_UP_STEPS, task.steps)
    tick = progress(len(pairs) * (warm_up + runs * task.steps))
    numbers = count(1)

    def sample(patched: ModelPatcher, task: Task) -> tuple[float, Tensor]:
        on_run(next(numbers), len(pairs) * (1 + runs))
        return _sample(patched, task, tick)

    for _, patched in pairs:
        sample(patched, replace(task, steps=warm_up))
    unmerged: Tensor | None = None
    for index in range(runs):
        for timing, patched in reversed(pairs) if index % 2 else pairs:
            seconds, latent = sample(patched, task)
            timing.seconds.append(seconds / task.steps)
            if index == 0:
                unmerged = latent if unmerged is None else unmerged  # the first run is without ToMA
                timing.error = error(latent, unmerged)
                stats = last_stats(patched)
                timing.merged = None if stats is None else headline(stats)
    return timings


def worthwhile(timings: Sequence[Timing]) -> Timing | None:
    """Return the timing with the smallest error among those that are about as fast as the fastest: slower by at most a
    twentieth of the time without ToMA. None if no ratio is reliably faster than the model without ToMA."""
    faster = _faster(timings)
    enough = min((timing.median for timing in faster), default=0.0) + timings[0].median / 20
    return _least_error(timing for timing in faster if timing.median <= enough)


def closest(timings: Sequence[Timing]) -> Timing | None:
    """Return the timing with the smallest error among those at least `WORTH` times as fast as without ToMA; None if
    there is none."""
    return _least_error(each for each in _faster(timings) if timings[0].median >= WORTH * each.median)


def noise(timings: Sequence[Timing]) -> float:
    """Return the largest spread among the runs of one ratio, as a share of their median."""
    return max((timing.spread[1] - timing.spread[0]) / timing.median for timing in timings)


def _faster(timings: Sequence[Timing]) -> list[Timing]:
    base, *others = timings
    return [timing for timing in others if timing.spread[1] < base.spread[0]]


def _least_error(timings: Iterable[Timing]) -> Timing | None:
    return min(timings, key=lambda timing: math.inf if math.isnan(timing.error) else timing.error, default=None)


def _sample(model: ModelPatcher, task: Task, tick: Callable[..., None]) -> tuple[float, Tensor]:
    """Return the seconds from the first step to the end of the last step, and the final latent, fp32 on the CPU."""
    seconds = 0.0

    def timed(executor: Any, guider: Any, sigmas: Any, extra: Any, callback: Any, noise: Tensor, *rest: Any) -> Any:
        nonlocal seconds
        noise.flatten()[:1].cpu()  # waits until the value is computed, on every kind of device
        begin = time.perf_counter()
        result = executor(guider, sigmas, extra, callback, noise, *rest)
        result.flatten()[:1].cpu()
        seconds = time.perf_counter() - begin
        return result

    model = model.clone()
    model.add_wrapper_with_key(WrappersMP.SAMPLER_SAMPLE, "toma_benchmark", timed)
    latent = task.sample(model, tick)
    return seconds, latent
