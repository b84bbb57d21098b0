"""The nodes ToMA and ToMA Advanced: make a model faster, by a ratio and a preset or by every setting."""

from __future__ import annotations

import logging
from dataclasses import replace
from enum import Enum
from typing import Any

from comfy_api.latest import io

from ..toma_core import ToMAConfig, UserSettings
from ..toma_core.profile import fitted, parsed
from ..toma_core.reasons import Message, MessageId
from ..toma_core.schedule import RatioSchedule
from ..toma_core.setting_spec import ConfigError
from . import validate_inputs, widgets
from .adapters.patch_model import apply_toma, config_for
from .adapters.registry import blocks_of, fingerprint
from .node_status import said, status_of
from .widgets import CATEGORY, SEARCH_ALIASES

# Where the node goes in a workflow, in the words of the README.
_PLACE = "ToMA goes after the LoRAs, before step caches, torch.compile and the sampler."


class Note(MessageId):
    """A node's remark on its inputs."""

    OFF_RATIO = "off_ratio"
    OFF_STEPS = "off_steps"
    BY_PROFILE = "by_profile"


def complaint(**values: Any) -> bool | str:
    """Return True, or a text on what is wrong with these fields of `ToMAConfig`, for ComfyUI's validation."""
    try:
        ToMAConfig(**values)
    except ConfigError as error:
        return str(error)
    return True


def _patched(model: Any, preset: Any, overrides: dict[str, Any], hidden: Any, profile: Any = "") -> io.NodeOutput:
    with status_of(hidden) as status:
        settings = UserSettings(preset, overrides)
        model = validate_inputs.model(model)
        settings, ratio_schedule, notes = _profiled(model, settings, profile)
        if settings.off:
            notes = (Note.OFF_STEPS() if settings.resolved().ratio else Note.OFF_RATIO(),)
        watcher = replace(status, notes=notes, preset=_left_to_preset(model, settings))
        patched = apply_toma(model, settings, watcher if status.node_id else None, ratio_schedule)
    return io.NodeOutput(patched, ui=said(notes) if notes else None)


def _profiled(model: Any, settings: UserSettings, text: Any) -> tuple[UserSettings, RatioSchedule, tuple[Message, ...]]:
    """Return the settings and ratios that a profile's text gives for a model, and the notes that the node shows.

    The profile's settings override the preset's, and the user's settings override the profile's; only the user's ratio
    gives way to the profile's ratios. Without a profile that fits the model, `settings` is returned as it is. Raises
    `UnsupportedModelError`.
    """
    if settings.off or text is None or (isinstance(text, str) and not text.strip()):
        return settings, (), ()
    try:
        profile = parsed(text)
        ratio_schedule = fitted(profile, fingerprint(model), [block.name for block in blocks_of(model)])
        by_hand = {name: value for name, value in settings.overrides.items() if name != "ratio"}
        return UserSettings(settings.preset, {**vars(profile.config), **by_hand}), ratio_schedule, (Note.BY_PROFILE(),)
    except ConfigError as error:
        logging.warning("%s", error)
        return settings, (), (error.message,)


def _left_to_preset(model: Any, settings: UserSettings) -> dict[str, Any]:
    """Return, by name, the values of the settings that the user left to the preset, and the preset's own name."""
    values = {name: v.value if isinstance(v, Enum) else v for name, v in vars(config_for(settings, model)).items()}
    return {"preset": settings.preset, **{name: values[name] for name in values.keys() - settings.overrides.keys()}}


def _schema(node_id: str, display_name: str, description: str, *settings: Any) -> io.Schema:
    return io.Schema(
        node_id=node_id,
        display_name=display_name,
        category=CATEGORY,
        description=description,
        search_aliases=SEARCH_ALIASES,
        inputs=[
            io.Model.Input(
                "model",
                tooltip="The model to speed up: SDXL, Flux, Z-Image, Qwen-Image, Qwen-Image 2.1, Wan and others. "
                f"{_PLACE}",
            ),
            *settings,
            widgets.profile(),
        ],
        outputs=[io.Model.Output(tooltip="The same model, running on fewer tokens. Connect it to the sampler.")],
        hidden=[io.Hidden.unique_id],
        not_idempotent=True,  # else nodes with equal inputs get one model, but each must show its own model's runs
    )


class ToMA(io.ComfyNode):
    """Make a model faster with a ratio and a preset."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return _schema(
            "ToMA",
            "ToMA (faster sampling)",
            "Merges similar image tokens while sampling, so that SDXL, Flux, Z-Image, Qwen-Image, Qwen-Image 2.1, Wan "
            f"and other image and video models run faster. {_PLACE}",
            widgets.ratio(),
            widgets.preset(),
        )

    @classmethod
    def validate_inputs(cls, ratio: float | None = None) -> bool | str:
        """Return True, or this pack's message if the ratio is out of range."""
        return True if ratio is None else complaint(ratio=ratio)

    @classmethod
    def execute(cls, model: Any, ratio: float, preset: str, profile: str = "") -> io.NodeOutput:
        return _patched(model, preset, {"ratio": ratio}, cls.hidden, profile)


class ToMAAdvanced(io.ComfyNode):
    """Make a model faster with every setting."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return _schema(
            "ToMAAdvanced",
            "ToMA Advanced",
            "Token merging with every setting: how many tokens, where in the model, when while sampling, and how they "
            "are picked and merged. What you do not set is the preset's value for the model.",
            widgets.preset(),
            widgets.ratio(),
            *widgets.overrides(),
        )

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
        """Return True, or a text on what is wrong with these inputs. ComfyUI cannot check them: it accepts every value
        from -1, which stands for the preset's value, to the maximum, and does not compare start and end. ComfyUI shows
        the text at every input; web/toma.js finds the faulty one."""
        given = {
            "start_percent": start_percent,
            "end_percent": end_percent,
            "full_step_interval": full_step_interval,
            "selection_interval": selection_interval,
            "window_size": window_size,
            "sharpness": sharpness,
        }
        return complaint(**widgets.overridden({name: value for name, value in given.items() if value is not None}))

    @classmethod
    def execute(cls, model: Any, preset: str, ratio: float, profile: str = "", **values: Any) -> io.NodeOutput:
        return _patched(model, preset, {"ratio": ratio, **widgets.overridden(values)}, cls.hidden, profile)
