"""The node that measures what ToMA gains on the user's own machine and what it costs, and recommends ratios."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import comfy.model_management
import torch
from comfy.model_patcher import ModelPatcher
from comfy_api.latest import io, ui

from ..toma_core import Settings
from ..toma_core.reasons import Message, MessageId, Value
from ..toma_core.settings import ConfigError
from . import profiles, timing, widgets
from .adapters.kv_memory import dtype_of
from .merge_map_image import as_image
from .node_status import errors_shown, said, status_of
from .report_charts import FULL, MERGED, RECOMMENDED, Bar, Caption, bar_chart
from .task import Task
from .timing import Candidate, Setting, Timing
from .toma import complaint
from .widgets import CATEGORY, SEARCH_ALIASES


class ToMABenchmark(io.ComfyNode):
    """Times a model with and without ToMA and recommends ratios."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ToMABenchmark",
            display_name="ToMA Benchmark",
            category=CATEGORY,
            description="Samples with and without ToMA in turn, on your machine and at your size. Says how much faster "
            "it is, how close the result stays, and which ratio to use. The model stays as it is.",
            search_aliases=[*SEARCH_ALIASES, "benchmark", "speed test"],
            inputs=[
                io.Model.Input("model", tooltip="The model to measure. A ToMA node before it does not count."),
                io.Conditioning.Input("positive", tooltip="The prompt: its length counts, its words do not."),
                io.Latent.Input("latent", tooltip="An empty latent of the size and batch that you sample at."),
                widgets.ratio(),
                widgets.preset(),
                io.Boolean.Input(
                    "sweep",
                    default=True,
                    tooltip="Also measure a third and two thirds of the ratio, to compare them. Off: only the ratio "
                    "itself.",
                ),
                io.Int.Input(
                    "steps",
                    default=10,
                    min=2,
                    max=100,
                    tooltip="Sampling steps of a run. Set the number that you really use: speed and nearness depend on "
                    "it.",
                ),
                io.Int.Input(
                    "runs",
                    default=3,
                    min=2,
                    max=50,
                    tooltip="Runs of each setting, in turn. More runs are more certain, and take longer.",
                ),
                io.Conditioning.Input(
                    "negative",
                    optional=True,
                    tooltip="Connect it if you sample with guidance (cfg above 1). Each step then has twice the work.",
                ),
                widgets.profile(
                    "What ToMA Calibrate found out about this model: it is measured beside the ratios. Where it is "
                    "best, the ratio above is given out: connect the profile to the ToMA node too."
                ),
            ],
            outputs=[
                io.Image.Output("plot", display_name="plot", tooltip="Speed and error of each setting, as bars."),
                io.String.Output(
                    "table", display_name="table", tooltip="The same in numbers, with the machine and versions."
                ),
                io.Float.Output(
                    "fastest_ratio",
                    display_name="fastest ratio",
                    tooltip="The ratio with the smallest error of those about as fast as the fastest; 0 if none is "
                    "faster. Connect it to the ratio of a ToMA node.",
                ),
                io.Float.Output(
                    "closest_ratio",
                    display_name="closest ratio",
                    tooltip="The ratio with the smallest error of those at least 1.2x as fast; 0 if none is. Connect "
                    "it to the ratio of a ToMA node.",
                ),
            ],
            hidden=[io.Hidden.unique_id],
            is_output_node=True,
        )

    @classmethod
    def validate_inputs(cls, ratio: float | None = None) -> bool | str:
        """Our own message for a ratio out of range, or one with which there is nothing to measure."""
        return str(ConfigError(Measured.RATIO_ZERO())) if ratio == 0 else ratio is None or complaint(ratio=ratio)

    @classmethod
    def execute(
        cls,
        model: Any,
        positive: Any,
        latent: Any,
        ratio: float,
        preset: str,
        sweep: bool,
        steps: int,
        runs: int,
        negative: Any = None,
        profile: str = "",
    ) -> io.NodeOutput:
        line = status_of(cls.hidden)
        with errors_shown(line):
            settings = Settings(preset, {"ratio": ratio})
            if settings.off:
                raise ConfigError(Measured.RATIO_ZERO())
            task = Task.of_inputs(model, positive, negative, latent, steps)
            size = task.latent
            ratios = sorted({round(ratio * part / 3, 2) or ratio for part in ((1, 2, 3) if sweep else (3,))})
            candidates = [Candidate.of_ratio(settings, each) for each in ratios]
            applied = profiles.apply(model, settings, profile)
            if applied.used:
                candidates.append(Candidate(timing.Setting.PROFILE(), ratio, applied.settings, applied.ratio_schedule))
            told = (lambda *_: None) if line is None else line.measures
            timings = timing.measure(model, candidates, task, runs, told)
        fastest, nearest = timing.worthwhile(timings), timing.nearest(timings)
        verdict = _verdict(timings, fastest, nearest)
        if applied.doubt is not None or not applied.used:
            verdict += applied.notes[-1:]
        what: dict[str, Value] = {
            "preset": preset,
            "latent": f"{size.shape[-1]} x {size.shape[-2]}",
            "batch": size.shape[0],
        }
        what |= {"conditions": 1 if negative is None else 2, "runs": runs, "steps": steps}
        notes = [
            Measured.TASK(**what, sampler=task.sampler, scheduler=task.scheduler),
            _machine(model),
            *(Measured.MERGED(name=t.name, merged=t.merged) for t in timings[-1:] if t.merged),
        ]
        head, foot = [str(line) for line in verdict], [str(note) for note in notes]
        table = "\n".join([*head, "", *_table(timings), "", *foot])
        image = as_image(bar_chart(_bars(timings, fastest, nearest)))
        short = [*verdict, *(_short(timings[0], timed) for timed in timings), "", Caption.TIME()]
        shown = {**ui.PreviewImage(image, cls=cls).as_dict(), "text": (table,), **said(short, notes)}
        return io.NodeOutput(
            image, table, fastest.ratio if fastest else 0.0, nearest.ratio if nearest else 0.0, ui=shown
        )


class Measured(MessageId):
    """What a measurement found."""

    RATIO_ZERO = "nothing_to_measure"
    TASK = "measured_task"  # preset, latent, batch, conditions, runs, steps, sampler, scheduler
    MACHINE = "measured_machine"  # device, dtype, torch, comfyui
    MERGED = "measured_merged"  # name, merged
    TOO_NOISY = "too_noisy"  # percent
    OFF = "leave_off"
    FASTEST = "fastest"  # gain
    CLOSEST = "closest"  # times, gain
    NONE = "none_fast_enough"  # times
    UNSURE = "unsure"  # percent
    GAIN = "gain"  # name, times, error
    GAIN_AND_TIME = "gain_and_time"  # gain, milliseconds
    TIME = "time"  # name, milliseconds
    UNKNOWN_VERSION = "unknown_version"


def _verdict(timings: Sequence[Timing], fastest: Timing | None, nearest: Timing | None) -> list[Message]:
    """What to do, a sentence on each line."""
    differ = timing.noise(timings) * 100
    if fastest is None:
        if timing.too_noisy(timings):
            return [Measured.TOO_NOISY(percent=differ)]
        return [Measured.OFF()]
    lines = [Measured.FASTEST(gain=_gain(timings[0], fastest))]
    if nearest is None:
        lines.append(Measured.NONE(times=timing.WORTH))
    elif nearest is not fastest:
        lines.append(Measured.CLOSEST(times=timing.WORTH, gain=_gain(timings[0], nearest)))
    if timing.noise(timings) > timing.CALM:
        lines.append(Measured.UNSURE(percent=differ))
    return lines


def _gain(base: Timing, timed: Timing) -> Message:
    return Measured.GAIN(name=timed.name, times=base.median / timed.median, error=timed.change)


def _machine(model: ModelPatcher) -> Message:
    """Device, number format and versions."""
    dtype = str(dtype_of(model))
    device = comfy.model_management.get_torch_device_name(model.load_device)
    try:
        from comfyui_version import __version__ as comfyui
    except ImportError:
        comfyui = Measured.UNKNOWN_VERSION()
    versions = {"torch": str(torch.__version__), "comfyui": comfyui}
    return Measured.MACHINE(device=device, dtype=dtype.removeprefix("torch."), **versions)


def _table(timings: Sequence[Timing]) -> list[str]:
    """Markdown, aligned to be read as plain text too."""
    rows = [("setting", "ms per step", "20 to 80 %", "speed", "error")]
    for timed in timings:
        low, high = timed.spread
        rows.append(
            (
                str(timed.name),
                f"{timed.median * 1e3:.4g}",
                f"{low * 1e3:.4g} to {high * 1e3:.4g}",
                f"{timings[0].median / timed.median:.2f}x",
                f"{timed.change:.3f}" if timed.ratio else "",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |" for row in rows]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]


def _short(base: Timing, timed: Timing) -> Message:
    """A row of the table for the node itself, which has no room for one."""
    milliseconds = float(f"{timed.median * 1e3:.4g}")
    if timed.ratio:
        return Measured.GAIN_AND_TIME(gain=_gain(base, timed), milliseconds=milliseconds)
    return Measured.TIME(name=timed.name, milliseconds=milliseconds)


def _short_name(timed: Timing) -> str:
    return "profile" if timed.name == Setting.PROFILE() else f"{timed.ratio:g}"


def _bars(timings: Sequence[Timing], *recommended: Timing | None) -> list[Bar]:
    bars = []
    for timed in timings:
        label = f"{timed.median * 1e3:.4g} ms"
        if timed.ratio:
            label = f"{timings[0].median / timed.median:.2f}x, {timed.change:.3f}"
        colour = FULL if not timed.ratio else RECOMMENDED if timed in recommended else MERGED
        bars.append(Bar(_short_name(timed), timed.median, label, colour, timed.spread, timed.change))
    return bars
