"""ToMA and ToMA Advanced: speed a model up, with one number or with every setting."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from typing import Any

from comfy_api.latest import io

from ..toma_core import Settings, ToMAConfig
from ..toma_core.reasons import MessageId
from ..toma_core.settings import ConfigError
from . import profiles, validate_inputs, widgets
from .adapters.patch_model import apply_toma, config_for
from .node_status import errors_shown, said, status_of
from .profiles import Applied
from .widgets import CATEGORY, SEARCH_ALIASES

_MODEL_TOOLTIP = (
    "The model to speed up: SDXL, Flux, Z-Image, Qwen-Image, Wan and others. ToMA goes after the LoRAs, before step "
    "caches, torch.compile and the sampler."
)
_RESULT_TOOLTIP = "The same model, running on fewer tokens. Connect it to the sampler."


class Off(MessageId):
    """Why a node does nothing."""

    RATIO = "off_ratio"
    STEPS = "off_steps"


def complaint(**values: Any) -> bool | str:
    """Return True, or what is wrong with these fields of `ToMAConfig` as text, for ComfyUI's validation."""
    try:
        ToMAConfig(**values)
    except ConfigError as error:
        return str(error)
    return True


def _patched(model: Any, preset: Any, overrides: dict[str, Any], hidden: Any, profile: Any = "") -> io.NodeOutput:
    """Return the patched model. Its runs are shown on the node; a node that is off has none, and shows that at once."""
    line = status_of(hidden)
    with errors_shown(line):
        settings = Settings(preset, overrides)
        model = validate_inputs.model(model)
        applied = Applied(settings) if settings.off else profiles.apply(model, settings, profile)
        settings, notes = applied.settings, applied.notes
        if line is not None:
            line = replace(line, notes=notes, preset=_left_to_preset(model, settings))
        patched = apply_toma(model, settings, line, applied.ratio_schedule)
    if settings.off:
        notes = (Off.STEPS() if settings.resolved().ratio else Off.RATIO(),)
    return io.NodeOutput(patched, ui=said(notes)) if notes else io.NodeOutput(patched)


def _left_to_preset(model: Any, settings: Settings) -> dict[str, Any]:
    """Return the name of the preset, and the values of the settings that are not set, by name."""
    left = {name: value for name, value in vars(config_for(settings, model)).items() if name not in settings.overrides}
    values = {name: value.value if isinstance(value, Enum) else value for name, value in left.items()}
    return {"preset": settings.preset, **values}


class ToMA(io.ComfyNode):
    """Speed a model up with one number and a preset."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ToMA",
            display_name="ToMA (faster sampling)",
            category=CATEGORY,
            description="Merges similar image tokens while sampling, so that SDXL, Flux, Z-Image, Qwen-Image, Wan and "
            "other image and video models run faster. Put it between the model loader and the sampler.",
            search_aliases=SEARCH_ALIASES,
            inputs=[
                io.Model.Input("model", tooltip=_MODEL_TOOLTIP),
                widgets.ratio(),
                widgets.preset(),
                widgets.profile(),
            ],
            outputs=[io.Model.Output(tooltip=_RESULT_TOOLTIP)],
            hidden=[io.Hidden.unique_id],
            not_idempotent=True,  # two nodes with the same settings must not share one model: each shows its own runs
        )

    @classmethod
    def validate_inputs(cls, ratio: float | None = None) -> bool | str:
        """Return True, or the pack's own message for a ratio out of range: it says what to do."""
        return True if ratio is None else complaint(ratio=ratio)

    @classmethod
    def execute(cls, model: Any, ratio: float, preset: str, profile: str = "") -> io.NodeOutput:
        return _patched(model, preset, {"ratio": ratio}, cls.hidden, profile)


class ToMAAdvanced(io.ComfyNode):
    """Speed a model up with every setting."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ToMAAdvanced",
            display_name="ToMA Advanced",
            category=CATEGORY,
            description="Token merging with every setting: how many tokens, where in the model, when while sampling, "
            "and how they are picked and merged. What you do not set is the preset's value for the model.",
            search_aliases=SEARCH_ALIASES,
            inputs=[
                io.Model.Input("model", tooltip=_MODEL_TOOLTIP),
                widgets.preset(),
                widgets.ratio(),
                *widgets.overrides(),
                widgets.profile(),
            ],
            outputs=[io.Model.Output(tooltip=_RESULT_TOOLTIP)],
            hidden=[io.Hidden.unique_id],
            not_idempotent=True,  # two nodes with the same settings must not share one model: each shows its own runs
        )

    @classmethod
    def validate_inputs(cls, start_percent: float | None = None, end_percent: float | None = None) -> bool | str:
        """Return True, or what is wrong with the range of steps. ComfyUI marks every input named here for one error,
        so these two stand alone: it checks the limits of the other numbers itself."""
        given_values = {"start_percent": start_percent, "end_percent": end_percent}
        values = {name: value for name, value in given_values.items() if value is not None}
        return complaint(**widgets.overridden(values))

    @classmethod
    def execute(cls, model: Any, preset: str, ratio: float, profile: str = "", **values: Any) -> io.NodeOutput:
        return _patched(model, preset, {"ratio": ratio, **widgets.overridden(values)}, cls.hidden, profile)
