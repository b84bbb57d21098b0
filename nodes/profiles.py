"""A profile's text at the input of a node: laid over the settings where it is of the model at hand."""

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
    """What a node says of its profile."""

    BY_PROFILE = "by_profile"
    NOTHING_BY_PROFILE = "nothing_by_profile"
    OTHER_LORAS = "other_loras"


@dataclass(frozen=True)
class Applied:
    """Settings and ratios to patch with. used: whether there is a profile that can be. notes: what the node says of it.
    doubt: the part of that on other LoRAs."""

    settings: Settings
    ratio_schedule: RatioSchedule = ()
    notes: tuple[Message, ...] = ()
    used: bool = False
    doubt: Message | None = None


def apply(model: ModelPatcher, settings: Settings, told: Any) -> Applied:
    """Settings and ratios as the text of a profile has them; as they were where there is none, or none for this model.

    told: the text. Its settings come before those of the preset, and after what is set by hand. Its ratios take the
    place of the one that is set. Raises `UnsupportedModelError`.
    """
    told = told.strip() if isinstance(told, str) else told
    if told is None or (isinstance(told, str) and not told):
        return Applied(settings)
    try:
        profile = parsed(told)
        ratio_schedule, same_loras = fitted(profile, fingerprint(model), [block.name for block in blocks_of(model)])
        by_hand = {name: value for name, value in settings.overrides.items() if name != "ratio"}
        settings = Settings(settings.preset, {**profile.overrides(), **by_hand})
    except ConfigError as error:
        _log_once(str(error))
        return Applied(settings, notes=(error.message,))
    doubt = None if same_loras else Note.OTHER_LORAS()
    if doubt is not None:
        _log_once(f"ToMA: {doubt}")
    used = Note.NOTHING_BY_PROFILE() if profile.empty else Note.BY_PROFILE()
    return Applied(settings, ratio_schedule, (used,) if doubt is None else (used, doubt), used=True, doubt=doubt)


@lru_cache(maxsize=64)
def _log_once(note: str) -> None:
    logging.warning("%s", note)
