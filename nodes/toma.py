"""The nodes that make a model faster: ToMA, with a ratio and a preset, and ToMA Advanced, with every setting."""

from __future__ import annotations

import logging
from dataclasses import replace
from enum import Enum
from typing import Any

from comfy_api.latest import io

from ..toma_core import ToMAConfig, UserSettings
from ..toma_core.config import ConfigError
from ..toma_core.profile import fitted, parsed
from ..toma_core.reasons import Message
from ..toma_core.schedule import RatioSchedule
from . import validate_inputs, widgets
from .adapters.patch_model import apply_toma, config_for
from .adapters.registry import blocks_of, fingerprint
from .node_status import Status, said, status_of


def complaint(**values: Any) -> bool | str:
    """Return True, or a text on what is wrong with these fields of `ToMAConfig`, for ComfyUI's validation."""
    try:
        ToMAConfig(**values)
    except ConfigError as error:
        return str(error)
    return True


def _patched(model: Any, preset: Any, overrides: dict[str, Any], hidden: Any, profile: Any = "") -> io.NodeOutput:
    notes: tuple[Message, ...] = ()
    ratio_schedule: RatioSchedule = ()
    with status_of(hidden) as status:
        settings = UserSettings(preset, overrides)
        model = validate_inputs.model(model)
        if settings.off:
            notes = (Status.OFF_STEPS() if settings.resolved().ratio else Status.OFF_RATIO(),)
        elif profile is not None and (not isinstance(profile, str) or profile.strip()):
            try:
                settings, ratio_schedule = _by_profile(model, settings, profile)
                notes = (Status.BY_PROFILE(),)
            except ConfigError as error:  # the model is merged by the preset
                logging.warning("%s", error)
                notes = (error.message,)
        watcher = replace(status, notes=notes, preset=_left_to_preset(model, settings))
        patched = apply_toma(model, settings, watcher if status.node_id else None, ratio_schedule)
    return io.NodeOutput(patched, ui=said(notes) if notes else None)


def _by_profile(model: Any, settings: UserSettings, text: Any) -> tuple[UserSettings, RatioSchedule]:
    """Return the settings and ratios that a profile's text gives for a model. A setting has the user's value if there
    is one, else the profile's, else the preset's. But ratios always come from the profile. Raises `ConfigError` if the
    profile does not fit the model, and `UnsupportedModelError`."""
    profile = parsed(text)
    ratio_schedule = fitted(profile, fingerprint(model), [block.name for block in blocks_of(model)])
    by_hand = {name: value for name, value in settings.overrides.items() if name != "ratio"}
    return UserSettings(settings.preset, {**vars(profile.config), **by_hand}), ratio_schedule


def _left_to_preset(model: Any, settings: UserSettings) -> dict[str, Any]:
    """Return, by name, the values of the settings that the user left to the preset, and the preset's own name."""
    values = {name: v.value if isinstance(v, Enum) else v for name, v in vars(config_for(settings, model)).items()}
    return {"preset": settings.preset, **{name: values[name] for name in values.keys() - settings.overrides.keys()}}


def _schema(node_id: str, *settings: Any) -> io.Schema:
    profile = io.String.Input("profile", default="", optional=True, advanced=True)
    inputs = [io.Model.Input("model"), *settings, profile]
    # Not idempotent: ComfyUI must execute each of several nodes with equal inputs, because each shows its own runs.
    return widgets.schema(node_id, inputs, io.Model.Output(), not_idempotent=True)


class ToMA(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return _schema("ToMA", widgets.ratio(), widgets.preset())

    @classmethod
    def validate_inputs(cls, ratio: float | None = None) -> bool | str:
        """Return True, or this pack's message if the ratio is out of range."""
        return True if ratio is None else complaint(ratio=ratio)

    @classmethod
    def execute(cls, model: Any, ratio: float, preset: str, profile: str = "") -> io.NodeOutput:
        return _patched(model, preset, {"ratio": ratio}, cls.hidden, profile)


class ToMAAdvanced(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return _schema("ToMAAdvanced", widgets.preset(), widgets.ratio(), *widgets.overrides())

    @classmethod
    def validate_inputs(
        cls,
        start_percent: float | None = None,
        end_percent: float | None = None,
        full_step_interval: int | None = None,
        selection_interval: int | None = None,
        window_size: int | None = None,
        sharpness: float | None = None,
    ) -> bool | str:
        """Return True, or what is wrong with these inputs. ComfyUI does not compare `start_percent` with `end_percent`.
        ComfyUI also accepts every value from -1 to the maximum, because -1 stands for the preset's value. ComfyUI shows
        the message at every input; web/toma.js finds the input at fault."""
        given = {name: value for name, value in locals().items() if value is not None}
        return complaint(**widgets.overridden(given))

    @classmethod
    def execute(cls, model: Any, preset: str, ratio: float, profile: str = "", **values: Any) -> io.NodeOutput:
        return _patched(model, preset, {"ratio": ratio, **widgets.overridden(values)}, cls.hidden, profile)
