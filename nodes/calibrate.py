"""ToMA Calibrate: measure where a model can be merged, and return it merged that way, with the profile."""

from __future__ import annotations

import math
from typing import Any

import comfy.samplers
from comfy_api.latest import io, ui

from ..toma_core.reasons import Message, MessageId
from ..toma_core.settings import ConfigError, Refusal, SettingSpec, checked, shown
from .calibration_run import TARGETS, Calibrated, Problem, calibrate
from .merge_map_image import as_image
from .node_status import errors_shown, said, status_of
from .report_charts import MERGED, RECOMMENDED, Bar, Caption, bar_chart
from .task import Task
from .widgets import CATEGORY, SEARCH_ALIASES

_BY_ERROR = "error"
_DEFAULT = "balanced"
_ERROR = 0.1
_ERROR_SPEC = SettingSpec(
    "Only for 'error': the largest error of the result. 0.03 can hardly be seen, at 0.1 small shapes differ, at 0.3 it "
    "is visibly another picture of the same scene.",
    0.005,
    1.0,
    0.005,
)


class ToMACalibrate(io.ComfyNode):
    """Measure what can be merged in a model, and merge it."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ToMACalibrate",
            display_name="ToMA Calibrate",
            category=CATEGORY,
            description="Finds out where your checkpoint can be merged, and how much at which noise level, and merges "
            "that: above all for SDXL and other UNets. It takes as long as 4 to 6 pictures, once, and reports its "
            "error beside the preset's. Its profile lets a ToMA node do the same without measuring again.",
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
                    options=[*TARGETS, _BY_ERROR],
                    default=_DEFAULT,
                    tooltip="How close the result stays to the unmerged one. 'quality' and 'balanced': as much work as "
                    "the preset of that name at ratio 0.5, merged where it costs your model least. 'fast': as much as "
                    "'balanced' at ratio 0.6. 'error': the fastest within the number below.",
                ),
                io.Float.Input(
                    "error",
                    default=_ERROR,
                    min=_ERROR_SPEC.minimum,
                    max=_ERROR_SPEC.maximum,
                    step=_ERROR_SPEC.step,
                    tooltip=_ERROR_SPEC.tooltip,
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
                io.Int.Input(
                    "seed",
                    default=0,
                    min=0,
                    max=2**63 - 1,
                    # Else the page draws a new seed for every queue, and all is measured again.
                    control_after_generate=False,
                    tooltip="Of the noise that it is measured with.",
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
        error: float,
        steps: int,
        cfg: float,
        sampler_name: str,
        scheduler: str,
        seed: int,
        negative: Any = None,
    ) -> io.NodeOutput:
        line = status_of(cls.hidden)
        with errors_shown(line):
            task = Task.of_inputs(model, positive, negative, latent, steps, cfg, sampler_name, scheduler, seed)
            choices = *TARGETS, _BY_ERROR
            if target not in choices:
                raise ConfigError(Refusal.NOT_A_CHOICE(setting="target", value=shown(target), choices=choices))
            by_error = target == _BY_ERROR
            if by_error:
                error = checked("error", error, _ERROR, _ERROR_SPEC)
            on_run = (lambda *_: None) if line is None else line.measures
            found = calibrate(model, task, _DEFAULT if by_error else target, error if by_error else None, on_run=on_run)
        notes = _notes(found, error if by_error else None)
        others = [] if negative is None else [used for used in _cfgs_of_samplers(cls.hidden) if used != cfg]
        notes += [Found.OTHER_CFG(cfg=cfg, used=used) for used in others[:1]]
        cost = Found.COST(evaluations=found.probes, steps=steps)
        image = as_image(bar_chart(_bars(found)))
        page = {**ui.PreviewImage(image, cls=cls).as_dict(), **said([*notes, "", Caption.WORK()], [cost])}
        return io.NodeOutput(found.model, found.profile.text() if found.profile else "", image, ui=page)


class Found(MessageId):
    """What a calibration found."""

    CALIBRATED = "calibrated"  # error, percent
    LESS_ERROR = "less_error"  # error, before, percent
    LESS_WORK = "less_work"  # error, before, percent
    CLOSER_NOT = "preset_kept"  # preset, error
    DOUBTED = "preset_kept_doubt"  # preset, error
    CHOICE_NAN = "choice_nan"  # preset
    UNMEASURED = "preset_unmeasured"  # preset
    PRESET = "preset_found"  # preset, ratio, error, percent
    PREDICTED = "predicted"  # predicted, found
    PREDICTED_WRONGLY = "predicted_wrongly"  # predicted, found
    NOTHING = "nothing_to_calibrate"
    NONE_WITHIN = "none_within"  # limit
    BEYOND = "beyond_limit"  # limit
    SITES_UNMEASURED = "sites_unmeasured"  # blocks
    WITHOUT = "measured_without"  # names
    LITTLE_MEMORY = "little_memory"
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


def _notes(found: Calibrated, limit: float | None) -> list[Message]:
    """Return the messages on a calibration, the answer first. limit: the largest error, None for a target."""
    short = [Found.LITTLE_MEMORY()] if found.short else []
    if found.problem is not None:
        return [found.problem, *(short if found.problem.id is Problem.UNMEASURED else ())]
    usual, name, came = found.usual, found.usual.preset, _rounded(found.found)
    percent, error = 100 * usual.work, _rounded(usual.error)
    preset = Found.PRESET(preset=name, ratio=usual.ratio, error=error, percent=percent)
    if found.chosen.options:
        predicted = Found.PREDICTED
        if not found.keeps_preset:
            notes = [_gain(found)]
            predicted = Found.PREDICTED if found.held else Found.PREDICTED_WRONGLY
        elif not math.isfinite(found.found):
            return [Found.CHOICE_NAN(preset=name), preset]
        else:
            keeps = Found.DOUBTED if found.found < usual.error else Found.CLOSER_NOT
            notes = [keeps(preset=name, error=came)]
        notes += [preset, predicted(predicted=_rounded(found.chosen.error), found=came)]
    elif found.keeps_preset:
        notes = [Found.UNMEASURED(preset=name), *short, preset]
    elif limit is None or usual.error == 0.0:
        return [Found.NOTHING()]
    else:
        notes = [Found.NONE_WITHIN(limit=limit), preset]
    if limit is not None and found.found > limit:
        notes.append(Found.BEYOND(limit=limit))
    if found.unmeasured and not found.keeps_preset:
        notes.append(Found.SITES_UNMEASURED(blocks=tuple(found.unmeasured)))
    if found.without:
        notes.append(Found.WITHOUT(names=tuple(found.without)))
    return notes


def _gain(found: Calibrated) -> Message:
    """Return what the choice gains over the preset."""
    usual, came, percent = found.usual, _rounded(found.found), 100 * found.chosen.work
    if found.found < usual.error and abs(found.chosen.work - usual.work) < 0.02:
        return Found.LESS_ERROR(error=came, before=_rounded(usual.error), percent=percent)
    if found.found <= usual.error and found.chosen.work < usual.work:
        return Found.LESS_WORK(error=came, before=100 * usual.work, percent=percent)
    return Found.CALIBRATED(error=came, percent=percent)


def _rounded(error: float) -> str:
    """Return an error with three decimals, or with two significant digits below 0.01."""
    return f"{error:.3f}" if error >= 0.01 or not error else f"{error:.2g}"


def _bars(found: Calibrated) -> list[Bar]:
    usual, chosen = found.usual, found.chosen
    measured = [(usual.preset, usual.work, usual.error, MERGED)]
    if chosen.options:
        measured.append(("profile", chosen.work, found.found, RECOMMENDED))
    return [
        Bar(name, work, f"{100 * work:.0f} %, {_rounded(error)}", colour, error=error)
        for name, work, error, colour in measured
    ]
