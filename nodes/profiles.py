"""Apply the text of a profile, an input of a node, if it was made with the model at hand."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from comfy.model_patcher import ModelPatcher

from ..toma_core import Settings
from ..toma_core.profile import fitted, parsed
from ..toma_core.reasons import Message, MessageId
from ..toma_core.schedule import RatioSchedule
from ..toma_core.settings import ConfigError
from .adapters.fingerprint import blocks_of, fingerprint


class Note(MessageId):
    """What a node shows of its profile."""

    BY_PROFILE = "by_profile"
    NOTHING_BY_PROFILE = "nothing_by_profile"
    OTHER_LORAS = "other_loras"


@dataclass(frozen=True)
class Applied:
    """Settings and ratios to patch a model with.

    Attributes:
        settings: Settings, those of the profile included.
        ratio_schedule: Ratios of the profile, empty without.
        notes: What the node shows.
    """

    settings: Settings
    ratio_schedule: RatioSchedule = ()
    notes: tuple[Message, ...] = ()


def apply(model: ModelPatcher, settings: Settings, text: Any) -> Applied:
    """Return the settings and ratios of a profile's text; the given ones without a profile that fits the model.

    Settings of the profile override the preset's, settings made by hand override those; its ratios replace the one
    that is set. Raises `UnsupportedModelError`.
    """
    text = text.strip() if isinstance(text, str) else text
    if text is None or (isinstance(text, str) and not text):
        return Applied(settings)
    try:
        profile = parsed(text)
        ratio_schedule, same_loras = fitted(profile, fingerprint(model), [block.name for block in blocks_of(model)])
        by_hand = {name: value for name, value in settings.overrides.items() if name != "ratio"}
        settings = Settings(settings.preset, {**profile.overrides(), **by_hand})
    except ConfigError as error:
        _log_once(str(error))
        return Applied(settings, notes=(error.message,))
    notes = [Note.NOTHING_BY_PROFILE() if profile.empty else Note.BY_PROFILE()]
    if not same_loras:
        notes.append(Note.OTHER_LORAS())
        _log_once(f"ToMA: {notes[-1]}")
    return Applied(settings, ratio_schedule, tuple(notes))


@lru_cache(maxsize=64)
def _log_once(note: str) -> None:
    logging.warning("%s", note)
