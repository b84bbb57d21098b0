"""How long a model samples with each of several settings, measured in turn on the machine at hand.

Real sampling runs through ComfyUI's sampler, plan making included. The clock waits for the device twice a run, before
the first step and after the last, and never in between. Loading the model is not counted.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import comfy.model_management
import comfy.utils
import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP
from torch import Tensor

from ..toma_core import Settings, ToMAConfig
from ..toma_core.reasons import Message, MessageId
from ..toma_core.schedule import RatioSchedule
from .adapters import last_runs
from .adapters.patch_model import apply_toma, attachment_of
from .task import Task, error

# Presets run the first step and the last whole: with one more between them both kinds are warm.
_WARM_UP_STEPS = 3
# The speed-up for which merging is worth its change of the picture.
WORTH = 1.2
# Runs of one setting that differ by less tell settings apart.
CALM = 0.05


class Setting(MessageId):
    """What is measured."""

    WITHOUT_TOMA = "without_toma"
    RATIO = "at_ratio"  # ratio
    PROFILE = "the_profile"


@dataclass(frozen=True)
class Candidate:
    """What is measured. name: of the setting. ratio: what is handed on where it is recommended."""

    name: Message
    ratio: float
    settings: Settings | ToMAConfig
    ratio_schedule: RatioSchedule = ()

    @classmethod
    def of_ratio(cls, settings: Settings, ratio: float) -> Candidate:
        """Settings at another ratio."""
        return cls(
            Setting.RATIO(ratio=ratio), ratio, replace(settings, overrides={**settings.overrides, "ratio": ratio})
        )


@dataclass
class Timing:
    """What was measured of one candidate, or without ToMA: ratio 0.

    seconds: per step, one value for each run. change: the distance between the final latent and the one without ToMA
    from the same noise, relative to the latter's norm. merged: what the last run merged, or why it merged nothing.
    """

    name: Message
    ratio: float
    seconds: list[float] = field(default_factory=list)
    change: float = 0.0
    merged: Message | None = None

    @property
    def median(self) -> float:
        """Seconds per step."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> tuple[float, float]:
        """Seconds per step below which a fifth and four fifths of the runs lie."""
        values = torch.tensor(self.seconds, dtype=torch.float64)
        low, high = torch.quantile(values, torch.tensor([0.2, 0.8], dtype=torch.float64)).tolist()
        return low, high


def measure(
    model: ModelPatcher,
    candidates: Sequence[Candidate],
    task: Task,
    runs: int,
    told: Callable[[int, int], None] = lambda *_: None,
) -> list[Timing]:
    """The timing without ToMA and of each candidate, in this order. The model is not changed; what ToMA it carries is
    left out. Raises `UnsupportedModelError`, and ComfyUI's own exception when the user cancels.

    Every setting samples a few steps first. Then all of them take turns, in one order and in the other, so that a
    machine that slows down favours none. told: called before each run with its number from 1, and how many there are.
    """
    base = apply_toma(model, ToMAConfig(ratio=0.0))
    timings = [Timing(Setting.WITHOUT_TOMA(), 0.0), *(Timing(each.name, each.ratio) for each in candidates)]
    models = [base, *(apply_toma(base, each.settings, ratio_schedule=each.ratio_schedule) for each in candidates)]
    pairs = list(zip(timings, models, strict=True))
    warm_up = min(_WARM_UP_STEPS, task.steps)
    progress = comfy.utils.ProgressBar(len(pairs) * (warm_up + runs * task.steps))

    def tick(*_: Any) -> None:
        comfy.model_management.throw_exception_if_processing_interrupted()
        progress.update(1)

    numbers = count(1)

    def sample(patched: ModelPatcher, task: Task) -> tuple[float, Tensor]:
        told(next(numbers), len(pairs) * (1 + runs))
        return _sample(patched, task, tick)

    for _, patched in pairs:
        sample(patched, replace(task, steps=warm_up))
    whole: Tensor | None = None
    for index in range(runs):
        for timing, patched in pairs if index % 2 == 0 else pairs[::-1]:
            seconds, latent = sample(patched, task)
            timing.seconds.append(seconds / task.steps)
            if index:
                continue
            whole = latent if whole is None else whole  # the first of the first round is the one without ToMA
            timing.change = error(latent, whole)
            stats = None if patched is base else last_runs.last(attachment_of(patched).report_id)  # type: ignore[union-attr]
            timing.merged = None if stats is None else stats.headline()
    return timings


def worthwhile(timings: Sequence[Timing]) -> Timing | None:
    """The nearest of those about as fast as the fastest (within a twentieth of the time without ToMA), or None where
    none is faster than without ToMA by more than the runs differ among themselves."""
    base, faster = timings[0], _faster(timings)
    if not faster:
        return None
    enough = min(timing.median for timing in faster) + base.median / 20
    return min((timing for timing in faster if timing.median <= enough), key=_change)


def nearest(timings: Sequence[Timing], gain: float = WORTH) -> Timing | None:
    """The one whose result is nearest to the one without ToMA, of those that are so many times faster."""
    enough = [timing for timing in _faster(timings) if timings[0].median >= gain * timing.median]
    return min(enough, key=_change, default=None)


def _change(timing: Timing) -> float:
    """No number (NaN) is as far away as can be."""
    return math.inf if math.isnan(timing.change) else timing.change


def noise(timings: Sequence[Timing]) -> float:
    """By how much of their median most runs of one setting differ, at worst."""
    return max((timing.spread[1] - timing.spread[0]) / timing.median for timing in timings)


def too_noisy(timings: Sequence[Timing]) -> bool:
    """Whether one seems to be faster, and the runs differ too much to tell."""
    base, *others = timings
    return not _faster(timings) and any(timing.median < base.median for timing in others) and noise(timings) > CALM


def _faster(timings: Sequence[Timing]) -> list[Timing]:
    base, *others = timings
    return [timing for timing in others if timing.spread[1] < base.spread[0]]


def _sample(model: ModelPatcher, task: Task, tick: Callable[..., None]) -> tuple[float, Tensor]:
    """Seconds from the first step to the end of the last, and the final latent (fp32, on the CPU)."""
    seconds: list[float] = []

    def timed(executor: Any, guider: Any, sigmas: Any, extra: Any, callback: Any, noise: Tensor, *rest: Any) -> Any:
        _wait_for(noise)
        begin = time.perf_counter()
        result = executor(guider, sigmas, extra, callback, noise, *rest)
        _wait_for(result)
        seconds.append(time.perf_counter() - begin)
        return result

    model = model.clone()
    model.add_wrapper_with_key(WrappersMP.SAMPLER_SAMPLE, "toma_benchmark", timed)
    latent = task.sample(model, tick)
    return sum(seconds), latent


def _wait_for(tensor: Tensor) -> None:
    """Until all work that leads to `tensor` is done: a value can be read only then, on every kind of device."""
    tensor.flatten()[:1].cpu()
