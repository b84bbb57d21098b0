"""ToMA Benchmark: measure speed and error on the user's machine, with and without ToMA in turn, and recommend ratios.
Each run goes through ComfyUI's sampler. The measured time includes making merge plans, but not loading the model. A run
waits for the device only twice: before its first step and after its last."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import comfy.model_management
import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP
from comfy_api.latest import io, ui
from comfy_execution.graph_utils import ExecutionBlocker
from comfyui_version import __version__ as comfyui
from torch import Tensor

from ..toma_core import ToMAConfig, UserSettings
from ..toma_core.config import ConfigError
from ..toma_core.reasons import Message, MessageId
from . import widgets
from .adapters.attachment import last_stats
from .adapters.kv_memory import dtype_of
from .adapters.patch_model import apply_toma
from .adapters.report_text import headline
from .node_status import said, status_of
from .report_charts import FULL, MERGED, RECOMMENDED, Bar, Caption, as_image, bar_chart
from .task import OnRun, Task, error, progress
from .toma import complaint

_WARM_UP_STEPS = 3  # enough for one merged step between the first and the last, which are full
_WORTH = 1.2  # the lowest speed-up at which merging is worth its error
TOO_NOISY = 0.15  # if the runs of one ratio differ by more than this share of their median, no ratio is recommended


class ToMABenchmark(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return widgets.schema(
            "ToMABenchmark",
            [
                io.Model.Input("model"),
                io.Conditioning.Input("positive"),
                io.Latent.Input("latent"),
                widgets.ratio(),
                widgets.preset(),
                io.Boolean.Input("sweep", default=True),
                io.Int.Input("steps", default=10, min=2, max=100),
                io.Int.Input("runs", default=3, min=2, max=50),
                io.Conditioning.Input("negative", optional=True),
            ],
            io.Image.Output("plot"),
            io.String.Output("table"),
            io.Float.Output("fastest_ratio"),
            io.Float.Output("closest_ratio"),
            words=["benchmark", "speed test"],
            is_output_node=True,
        )

    @classmethod
    def validate_inputs(cls, ratio: float | None = None) -> bool | str:
        """Return True, or this pack's message for a ratio that is 0 or out of range."""
        return str(ConfigError(Measured.RATIO_ZERO())) if ratio == 0 else ratio is None or complaint(ratio=ratio)

    @classmethod
    def execute(cls, model: Any, ratio: float, preset: str, sweep: bool, runs: int, **sampled: Any) -> io.NodeOutput:
        with status_of(cls.hidden) as status:
            settings = UserSettings(preset, {"ratio": ratio})
            if settings.off:
                raise ConfigError(Measured.RATIO_ZERO())
            task = Task.of_inputs(model, **sampled)
            ratios = sorted({round(ratio * part / 3, 2) or ratio for part in ((1, 2, 3) if sweep else (3,))})
            timings = measure(model, settings, ratios, task, runs, status.measures)
        spread = noise(timings)
        noisy = spread > TOO_NOISY
        best = (None, None) if noisy else recommended(timings)
        verdict = [Measured.TOO_NOISY(percent=100 * spread)] if noisy else _verdict(timings[0], *best)
        notes = _notes(task, preset, runs, model, timings[-1])
        table = "\n".join(map(str, [*verdict, "", *_table(timings), "", *notes]))
        image = as_image(bar_chart(_bars(timings, *best)))
        lines = said([*verdict, "", Caption.TIME()], notes)
        shown = {**ui.PreviewImage(image, cls=cls).as_dict(), "text": (table,), **lines}
        ratios = [0.0 if timed is None else timed.ratio for timed in best]
        # If times are too noisy, the two ratio outputs get blockers: nodes connected to them do not run.
        return io.NodeOutput(image, table, *([ExecutionBlocker(None)] * 2 if noisy else ratios), ui=shown)


class Measured(MessageId):
    """Messages on the result of a measurement. A comment beside an id names the parameters of the message."""

    WITHOUT_TOMA = "without_toma"
    RATIO = "at_ratio"  # ratio
    RATIO_ZERO = "nothing_to_measure"
    TASK = "measured_task"  # parameters: preset, latent, batch, conditions, runs, steps, sampler, scheduler
    MACHINE = "measured_machine"  # parameters: device, dtype, torch, comfyui
    MERGED = "measured_merged"  # name, merged
    TOO_NOISY = "too_noisy"  # percent
    OFF = "leave_off"
    FASTEST = "fastest"  # gain
    CLOSEST = "closest"  # times, gain
    NONE = "none_fast_enough"  # times
    GAIN = "gain"  # name, times, error


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

    @property
    def name(self) -> Message:
        return Measured.RATIO(ratio=self.ratio) if self.ratio else Measured.WITHOUT_TOMA()


def measure(
    model: ModelPatcher, settings: UserSettings, ratios: Sequence[float], task: Task, runs: int, on_run: OnRun
) -> list[Timing]:
    """Return the timing without ToMA, then the timing at each ratio. The model first samples a few steps at each ratio
    to warm up. Then each round times every ratio once, alternately forwards and backwards, so that a machine that slows
    down favours no ratio. The given model is not changed, and its own ToMA settings are ignored. Raises
    `UnsupportedModelError`, and ComfyUI's own exception if the user cancels."""
    base = apply_toma(model, ToMAConfig(ratio=0.0))
    merged = [apply_toma(base, replace(settings, overrides={**settings.overrides, "ratio": each})) for each in ratios]
    timings = [Timing(ratio) for ratio in (0.0, *ratios)]
    pairs = list(zip(timings, [base, *merged], strict=True))
    warm_up = min(_WARM_UP_STEPS, task.steps)
    tick = progress(len(pairs) * (warm_up + runs * task.steps))
    # Round 0 is the warm-up.
    order = [(n, *pair) for n in range(1 + runs) for pair in (reversed(pairs) if n and n % 2 == 0 else pairs)]
    unmerged: Tensor | None = None
    for number, (n, timing, patched) in enumerate(order, 1):
        on_run(number, len(order))
        seconds, latent = _sample(patched, task if n else replace(task, steps=warm_up), tick)
        if n:
            timing.seconds.append(seconds / task.steps)
        if n == 1:
            unmerged = latent if unmerged is None else unmerged  # the first run is without ToMA
            timing.error = error(latent, unmerged)
            stats = last_stats(patched)
            timing.merged = None if stats is None else headline(stats)
    return timings


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


def noise(timings: Sequence[Timing]) -> float:
    """For each timing divide the width of its `spread` by its median; return the largest of these numbers."""
    return max((timing.spread[1] - timing.spread[0]) / timing.median for timing in timings)


def recommended(timings: Sequence[Timing]) -> tuple[Timing | None, Timing | None]:
    """Return two timings. The first has the least error of those about as fast as the fastest: slower by at most a
    twentieth of the time without ToMA. The second has the least error of those at least `_WORTH` times as fast as
    without ToMA. Only ratios that are reliably faster than without ToMA count. A timing is None if no ratio
    qualifies."""
    base, *others = timings
    faster = [timing for timing in others if timing.spread[1] < base.spread[0]]
    enough = min((timing.median for timing in faster), default=0.0) + base.median / 20
    worthwhile = _least_error(timing for timing in faster if timing.median <= enough)
    return worthwhile, _least_error(timing for timing in faster if base.median >= _WORTH * timing.median)


def _least_error(timings: Iterable[Timing]) -> Timing | None:
    return min(timings, key=lambda timing: math.inf if math.isnan(timing.error) else timing.error, default=None)


def _verdict(base: Timing, fastest: Timing | None, closest: Timing | None) -> list[Message]:
    if fastest is None:
        return [Measured.OFF()]
    lines = [Measured.FASTEST(gain=_gain(base, fastest))]
    if closest is None:
        lines.append(Measured.NONE(times=_WORTH))
    elif closest is not fastest:
        lines.append(Measured.CLOSEST(times=_WORTH, gain=_gain(base, closest)))
    return lines


def _gain(base: Timing, timed: Timing) -> Message:
    return Measured.GAIN(name=timed.name, times=base.median / timed.median, error=timed.error)


def _notes(task: Task, preset: str, runs: int, model: ModelPatcher, last: Timing) -> list[Message]:
    batch, *_, height, width = task.latent.shape
    what: dict[str, Any] = {"latent": f"{width} x {height}", "batch": batch, "conditions": task.conditions}
    how: dict[str, Any] = {"runs": runs, "steps": task.steps, "sampler": task.sampler_name, "scheduler": task.scheduler}
    device = comfy.model_management.get_torch_device_name(model.load_device)
    dtype = str(dtype_of(model)).removeprefix("torch.")
    versions = {"torch": str(torch.__version__), "comfyui": comfyui}
    notes = [Measured.TASK(preset=preset, **what, **how), Measured.MACHINE(device=device, dtype=dtype, **versions)]
    return [*notes, Measured.MERGED(name=last.name, merged=last.merged)] if last.merged else notes


def _table(timings: Sequence[Timing]) -> list[str]:
    """Return a Markdown table whose columns are aligned for reading as plain text."""
    rows = [("setting", "ms per step", "20 to 80 %", "speed", "error")]
    for timed in timings:
        median, low, high = (f"{seconds * 1e3:.4g}" for seconds in (timed.median, *timed.spread))
        speed, error = f"{timings[0].median / timed.median:.2f}x", f"{timed.error:.3f}" if timed.ratio else ""
        rows.append((str(timed.name), median, f"{low} to {high}", speed, error))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |" for row in rows]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]


def _bars(timings: Sequence[Timing], *best: Timing | None) -> list[Bar]:
    base, *others = timings
    bars = [Bar("without ToMA", base.median, f"{base.median * 1e3:.4g} ms", FULL, base.spread)]
    for timed in others:
        label = f"{base.median / timed.median:.2f}x as fast, error {timed.error:.2f}"
        colour = RECOMMENDED if timed in best else MERGED
        bars.append(Bar(f"ratio {timed.ratio:g}", timed.median, label, colour, timed.spread, timed.error))
    return bars
