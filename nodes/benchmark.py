"""ToMA Benchmark: measure speed and error on the user's machine, and recommend ratios."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import comfy.model_management
import torch
from comfy.model_patcher import ModelPatcher
from comfy_api.latest import io, ui
from comfy_execution.graph_utils import ExecutionBlocker
from comfyui_version import __version__ as comfyui

from ..toma_core import UserSettings
from ..toma_core.config import ConfigError
from ..toma_core.reasons import Message, MessageId
from . import timing, widgets
from .adapters.kv_memory import dtype_of
from .merge_map_image import as_image
from .node_status import said, status_of
from .report_charts import FULL, MERGED, RECOMMENDED, Bar, Caption, bar_chart
from .task import Task
from .timing import Timing
from .toma import complaint


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
            timings = timing.measure(model, settings, ratios, task, runs, status.measures)
        noise = timing.noise(timings)
        noisy = noise > timing.TOO_NOISY
        fastest, closest = (None, None) if noisy else (timing.worthwhile(timings), timing.closest(timings))
        verdict = [Measured.TOO_NOISY(percent=100 * noise)] if noisy else _verdict(timings[0], fastest, closest)
        notes = _notes(task, preset, runs, model, timings[-1])
        table = "\n".join(map(str, [*verdict, "", *_table(timings), "", *notes]))
        image = as_image(bar_chart(_bars(timings, fastest, closest)))
        lines = said([*verdict, "", Caption.TIME()], notes)
        shown = {**ui.PreviewImage(image, cls=cls).as_dict(), "text": (table,), **lines}
        if noisy:  # blockers stop the nodes that are connected to the two ratios
            return io.NodeOutput(image, table, ExecutionBlocker(None), ExecutionBlocker(None), ui=shown)
        recommended = (0.0 if timed is None else timed.ratio for timed in (fastest, closest))
        return io.NodeOutput(image, table, *recommended, ui=shown)


class Measured(MessageId):
    """Messages on the result of a measurement. The comment at each id names the parameters of its text."""

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


def _verdict(base: Timing, fastest: Timing | None, closest: Timing | None) -> list[Message]:
    if fastest is None:
        return [Measured.OFF()]
    lines = [Measured.FASTEST(gain=_gain(base, fastest))]
    if closest is None:
        lines.append(Measured.NONE(times=timing.WORTH))
    elif closest is not fastest:
        lines.append(Measured.CLOSEST(times=timing.WORTH, gain=_gain(base, closest)))
    return lines


def _name(timed: Timing) -> Message:
    return Measured.RATIO(ratio=timed.ratio) if timed.ratio else Measured.WITHOUT_TOMA()


def _gain(base: Timing, timed: Timing) -> Message:
    return Measured.GAIN(name=_name(timed), times=base.median / timed.median, error=timed.error)


def _notes(task: Task, preset: str, runs: int, model: ModelPatcher, last: Timing) -> list[Message]:
    batch, *_, height, width = task.latent.shape
    what: dict[str, Any] = {"latent": f"{width} x {height}", "batch": batch, "conditions": task.conditions}
    how: dict[str, Any] = {"runs": runs, "steps": task.steps, "sampler": task.sampler_name, "scheduler": task.scheduler}
    device = comfy.model_management.get_torch_device_name(model.load_device)
    dtype = str(dtype_of(model)).removeprefix("torch.")
    versions = {"torch": str(torch.__version__), "comfyui": comfyui}
    notes = [Measured.TASK(preset=preset, **what, **how), Measured.MACHINE(device=device, dtype=dtype, **versions)]
    return [*notes, Measured.MERGED(name=_name(last), merged=last.merged)] if last.merged else notes


def _table(timings: Sequence[Timing]) -> list[str]:
    """Return a Markdown table whose columns are aligned for reading as plain text."""
    rows = [("setting", "ms per step", "20 to 80 %", "speed", "error")]
    for timed in timings:
        median, low, high = (f"{seconds * 1e3:.4g}" for seconds in (timed.median, *timed.spread))
        speed, error = f"{timings[0].median / timed.median:.2f}x", f"{timed.error:.3f}" if timed.ratio else ""
        rows.append((str(_name(timed)), median, f"{low} to {high}", speed, error))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |" for row in rows]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]


def _bars(timings: Sequence[Timing], *recommended: Timing | None) -> list[Bar]:
    base, *others = timings
    bars = [Bar("without ToMA", base.median, f"{base.median * 1e3:.4g} ms", FULL, base.spread)]
    for timed in others:
        label = f"{base.median / timed.median:.2f}x as fast, error {timed.error:.2f}"
        colour = RECOMMENDED if timed in recommended else MERGED
        bars.append(Bar(f"ratio {timed.ratio:g}", timed.median, label, colour, timed.spread, timed.error))
    return bars
