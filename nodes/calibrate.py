"""The node that finds out what can be merged in the model at hand, and gives it out merged that way."""

from __future__ import annotations

import math
from typing import Any

import comfy.samplers
from comfy_api.latest import io, ui

from ..toma_core.fields import ConfigError, FieldSpec, checked, shown
from .calibrating import NEAR, UNMEASURED, Calibrated, calibrate
from .charts import MERGED, RECOMMENDED, Dot, front_chart
from .drawing import as_image
from .live import errors_shown, line_of, said
from .task import Task
from .widgets import CATEGORY, SEARCH_ALIASES

_BY_NUMBER = "distance"
_USUAL = "balanced"
_DISTANCE = 0.1
_DISTANCES = FieldSpec(
    "Only for 'distance': how far the result may move. 0.03 can hardly be seen, at 0.1 small shapes differ, at 0.3 it "
    "is visibly another picture of the same scene.",
    0.005,
    1.0,
    0.005,
)


class ToMACalibrate(io.ComfyNode):
    """Measures what can be merged in a model, and merges it."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ToMACalibrate",
            display_name="ToMA Calibrate",
            category=CATEGORY,
            description="Finds out where your checkpoint can be merged, and how much at which noise level, and merges "
            "that: above all for SDXL and other UNets. It takes as long as 4 to 6 pictures, once, and says how near it "
            "comes beside the preset. Its profile lets a ToMA node do the same without measuring again.",
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
                    "near",
                    options=[*NEAR, _BY_NUMBER],
                    default=_USUAL,
                    tooltip="How near the result stays to the unmerged one. 'quality' and 'balanced': as much work as "
                    "the preset of that name at ratio 0.5, merged where it costs your model least. 'fast': as much as "
                    "'balanced' at ratio 0.6. 'distance': the fastest within the number below.",
                ),
                io.Float.Input(
                    "distance",
                    default=_DISTANCE,
                    min=_DISTANCES.minimum,
                    max=_DISTANCES.maximum,
                    step=_DISTANCES.step,
                    tooltip=_DISTANCES.tooltip,
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
                    # The page would draw a new one for every queue, and all would be measured anew.
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
                    "front",
                    display_name="front",
                    tooltip="Distance against work: what there is to choose from, the preset, and the choice.",
                ),
            ],
            is_output_node=True,
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(
        cls,
        model: Any,
        positive: Any,
        latent: Any,
        near: str,
        distance: float,
        steps: int,
        cfg: float,
        sampler_name: str,
        scheduler: str,
        seed: int,
        negative: Any = None,
    ) -> io.NodeOutput:
        line = line_of(cls.hidden)
        with errors_shown(line):
            task = Task.of_inputs(model, positive, negative, latent, steps, cfg, sampler_name, scheduler, seed)
            choices = [*NEAR, _BY_NUMBER]
            if near not in choices:
                allowed = ", ".join(choices)
                raise ConfigError(f"ToMA: near is {shown(near)}. Allowed: {allowed}. Choose one of them.")
            by_number = near == _BY_NUMBER
            if by_number:
                distance = checked("distance", distance, _DISTANCE, _DISTANCES)
            told = (lambda *_: None) if line is None else line.measures
            found = calibrate(model, task, _USUAL if by_number else near, distance if by_number else None, told=told)
        notes = _notes(found, distance if by_number else None)
        cost = f"Measured with {found.probes} evaluations beside the three runs of {steps} steps."
        image = as_image(front_chart(notes, *_front(found), [cost]))
        page = {**ui.PreviewImage(image, cls=cls).as_dict(), **said("\n".join(notes), cost)}
        return io.NodeOutput(found.model, found.profile.text() if found.profile else "", image, ui=page)


def _notes(found: Calibrated, distance: float | None) -> list[str]:
    """What came of it, the answer first, a sentence on each line."""
    short = ["There was too little memory for it: try a smaller latent or batch."] if found.short else []
    if found.problem:
        return [found.problem, *(short if found.problem == UNMEASURED else ())]
    usual, name, came = found.usual, found.usual.preset, _near(found.found)
    beside = f"distance {_near(usual.distance)} at {100 * usual.work:.0f} %"
    preset = f"The preset '{name}' at ratio {usual.ratio:g}: {beside}."
    if found.chosen.options:
        predicted = f"Predicted {_near(found.chosen.distance)}, found {came}"
        doubt = ""
        if not found.keeps_preset:
            notes = [_gain(found)]
            doubt = "" if found.held else ": the chart's line cannot be trusted here. What was found counts"
        elif not math.isfinite(found.found):
            given_out = f"so the preset '{name}' is given out."
            return [f"The choice ends in values that are no numbers (NaN), {given_out}", preset]
        elif found.found < usual.distance:
            notes = [
                f"The preset '{name}' is kept: the choice came to distance {came}, not as predicted, and so small a "
                "gain is not to be trusted."
            ]
        else:
            notes = [f"The preset '{name}' is kept: the choice came no nearer, to distance {came}."]
        notes += [preset, f"{predicted}{doubt}."]
    elif found.keeps_preset:
        notes = [f"Nothing could be measured, so the preset '{name}' is given out.", *short, preset]
    elif distance is None or usual.distance == 0.0:
        return [
            "Nothing can be merged here: the grids are too small, or another node answers for the model. The profile "
            "leaves everything unmerged."
        ]
    else:
        notes = [
            f"Nothing stays within {distance:g}, so the profile leaves everything unmerged. Set a larger distance.",
            preset,
        ]
    if distance is not None and found.found > distance:
        notes.append(
            f"That is farther than {distance:g}. Set a smaller distance, or measure with more steps or images."
        )
    if found.unmeasured and not found.keeps_preset:
        notes.append(
            f"Unmerged, as nothing was found out about them: {', '.join(found.unmeasured)}. If another node skips "
            "evaluations, as step caches do, put it after this one."
        )
    if found.without:
        notes.append(f"Measured without {' and '.join(found.without)}, which the model keeps.")
    return notes


def _gain(found: Calibrated) -> str:
    """What the choice is worth beside the preset."""
    usual, came, work = found.usual, _near(found.found), f"{100 * found.chosen.work:.0f}"
    if found.found < usual.distance and abs(found.chosen.work - usual.work) < 0.02:
        before = _near(usual.distance)
        return f"Less error for the same work: distance {came} instead of {before}, at {work} % of the blocks' work."
    if found.found <= usual.distance and found.chosen.work < usual.work:
        before = f"{100 * usual.work:.0f}"
        return f"The same error for less work: {work} % of the blocks' work instead of {before} %, at distance {came}."
    return f"Calibrated: distance {came} at {work} % of the blocks' work."


def _near(distance: float) -> str:
    """Three places, or as many as show two figures of it."""
    return f"{distance:.3f}" if distance >= 0.01 or not distance else f"{distance:.2g}"


def _front(found: Calibrated) -> tuple[list[tuple[float, float]], list[Dot]]:
    """What there was to choose from, and the preset and the choice beside it."""
    usual = found.usual
    dots = [Dot(usual.work, usual.distance, f"preset '{usual.preset}'", MERGED)]
    if found.chosen.options:
        dots.append(Dot(found.chosen.work, found.chosen.distance, "predicted", RECOMMENDED, hollow=True))
        dots.append(Dot(found.chosen.work, found.found, "calibrated", RECOMMENDED))
    dots = [dot for dot in dots if math.isfinite(dot.distance)]
    return [(choice.work, choice.distance) for choice in found.choices], dots
