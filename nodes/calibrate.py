"""ToMA Calibrate: measure where a model can be merged, and return it merged that way, with the profile."""

from __future__ import annotations

from typing import Any

import comfy.samplers
from comfy_api.latest import io, ui

from ..toma_core.reasons import Message, MessageId
from ..toma_core.settings import ConfigError, Refusal, shown
from .calibration_run import TARGETS, Calibrated, calibrate
from .merge_map_image import as_image
from .node_status import errors_shown, said, status_of
from .report_charts import MERGED, RECOMMENDED, Bar, Caption, bar_chart
from .task import Task
from .widgets import CATEGORY, SEARCH_ALIASES


class ToMACalibrate(io.ComfyNode):
    """Measure what can be merged in a model, and merge it."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ToMACalibrate",
            display_name="ToMA Calibrate",
            category=CATEGORY,
            description="For SDXL and other UNets: less error for the same work as a preset. Finds out where your "
            "checkpoint can be merged, and how much at which noise level, and merges that. It takes as long as 4 to 6 "
            "pictures, once. Its profile lets a ToMA node do the same without measuring again.",
            search_aliases=[*SEARCH_ALIASES, "calibrate", "profile"],
            inputs=[
                io.Model.Input(
                    "model", tooltip="The model as you use it, with its LoRAs. A ToMA node before it is left out."
                ),
                io.Conditioning.Input("positive", tooltip="A prompt that is typical of what you make."),
                io.Latent.Input(
                    "latent",
                    tooltip="An empty latent of the size that you sample at. A batch of several makes it more certain.",
                ),
                io.Combo.Input(
                    "target",
                    options=[*TARGETS],
                    default="balanced",
                    tooltip="How much is merged. 'quality' and 'balanced': as much work as the preset of that name at "
                    "ratio 0.5, merged where it costs your model least. 'fast': as much as 'balanced' at ratio 0.6.",
                ),
                io.Int.Input("steps", default=20, min=2, max=100, tooltip="Sampling steps, as you use them."),
                io.Float.Input(
                    "cfg",
                    default=4.0,
                    min=0.0,
                    max=100.0,
                    step=0.1,
                    tooltip="Guidance, as you use it. It counts only where a negative is connected.",
                ),
                io.Combo.Input(
                    "sampler_name",
                    options=comfy.samplers.KSampler.SAMPLERS,
                    display_name="sampler",
                    tooltip="The sampler that you use.",
                ),
                io.Combo.Input(
                    "scheduler", options=comfy.samplers.KSampler.SCHEDULERS, tooltip="The scheduler that you use."
                ),
                io.Conditioning.Input(
                    "negative", optional=True, tooltip="Connect it if you sample with guidance (cfg above 1)."
                ),
            ],
            outputs=[
                io.Model.Output(tooltip="The model, merged as it was found best. Connect it to the sampler."),
                io.String.Output(
                    "profile",
                    display_name="profile",
                    tooltip="For the profile input of a ToMA node: what was found, or the preset's ratios where those "
                    "are best.",
                ),
                io.Image.Output(
                    "plot", display_name="plot", tooltip="Work and error of the preset and of the choice, as bars."
                ),
            ],
            is_output_node=True,
            hidden=[io.Hidden.unique_id, io.Hidden.prompt],
        )

    @classmethod
    def execute(
        cls,
        model: Any,
        positive: Any,
        latent: Any,
        target: str,
        steps: int,
        cfg: float,
        sampler_name: str,
        scheduler: str,
        negative: Any = None,
    ) -> io.NodeOutput:
        line = status_of(cls.hidden)
        with errors_shown(line):
            task = Task.of_inputs(model, positive, negative, latent, steps, cfg, sampler_name, scheduler)
            if target not in TARGETS:
                raise ConfigError(Refusal.NOT_A_CHOICE(setting="target", value=shown(target), choices=tuple(TARGETS)))
            found = calibrate(model, task, target, on_run=(lambda *_: None) if line is None else line.measures)
        notes: list[Message | str] = [*_notes(found)]
        cost = []
        if found.probes:
            cost.append(Found.COST(evaluations=found.probes, steps=steps))
            others = [] if negative is None else [used for used in _cfgs_of_samplers(cls.hidden) if used != cfg]
            notes += [*(Found.OTHER_CFG(cfg=cfg, used=used) for used in others[:1]), "", Caption.WORK()]
        image = as_image(bar_chart(_bars(found)))
        page = {**ui.PreviewImage(image, cls=cls).as_dict(), **said(notes, cost)}
        return io.NodeOutput(found.model, found.profile.text() if found.profile else "", image, ui=page)


class Found(MessageId):
    """What a calibration found."""

    LESS_ERROR = "less_error"  # error, before, percent
    PRESET_KEPT = "preset_kept"  # preset, error
    PRESET = "preset_found"  # preset, ratio, error, percent
    WITHOUT = "measured_without"  # names
    COST = "calibration_cost"  # evaluations, steps
    OTHER_CFG = "other_cfg"  # cfg, used


def _cfgs_of_samplers(hidden: Any) -> list[float]:
    """Return the cfg of every sampler in the prompt that the model of this node goes into."""
    prompt, found = getattr(hidden, "prompt", None) or {}, list[float]()
    reached = [str(getattr(hidden, "unique_id", None))]
    for source in reached:
        for node_id, node in prompt.items():
            link = node.get("inputs", {}).get("model")
            if isinstance(link, list) and str(link[0]) == source and node_id not in reached:
                reached.append(node_id)
                cfg = node["inputs"].get("cfg")
                found += [float(cfg)] if isinstance(cfg, (int, float)) else []
    return found


def _notes(found: Calibrated) -> list[Message]:
    """Return the messages on a calibration, the answer first."""
    if found.problem is not None:
        return [found.problem]
    (before, error), (usual, work) = map(_rounded, found.errors), found.work
    if found.keeps_preset:
        notes = [Found.PRESET_KEPT(preset=found.preset, error=error)]
    else:
        notes = [Found.LESS_ERROR(error=error, before=before, percent=100 * work)]
    notes.append(Found.PRESET(preset=found.preset, ratio=found.ratio, error=before, percent=100 * usual))
    return [*notes, Found.WITHOUT(names=tuple(found.without))] if found.without else notes


def _rounded(error: float) -> str:
    """Return an error with three decimals, or with two significant digits below 0.01."""
    return f"{error:.3f}" if error >= 0.01 or not error else f"{error:.2g}"


def _bars(found: Calibrated) -> list[Bar]:
    if found.problem is not None:
        return []
    settings = (found.preset, MERGED), ("profile", RECOMMENDED)
    return [
        Bar(name, work, f"{100 * work:.0f} %, {_rounded(error)}", colour, error=error)
        for (name, colour), error, work in zip(settings, found.errors, found.work, strict=True)
    ]
