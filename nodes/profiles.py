"""A profile's text at the input of a node: laid over the settings where it is of the model at hand."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from comfy.model_patcher import ModelPatcher

from ..toma_core import Settings
from ..toma_core.fields import ConfigError
from ..toma_core.profile import fitted, parsed
from ..toma_core.schedule import Bands
from .adapters.identity import blocks_of, fingerprint

_BY_PROFILE = "By the profile: ratio and preset do nothing."
_ALL_WHOLE = "The profile leaves everything unmerged: ratio and preset do nothing."


@dataclass(frozen=True)
class Applied:
    """Settings and ratios to patch with. used: whether there is a profile that can be. note: what is to be said of it.
    doubt: the part of that which tells of other LoRAs."""

    settings: Settings
    bands: Bands = ()
    note: str = ""
    used: bool = False
    doubt: str = ""


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
        bands, other = fitted(profile, fingerprint(model), [block.name for block in blocks_of(model)])
        by_hand = {name: value for name, value in settings.overrides.items() if name != "ratio"}
        settings = Settings(settings.preset, {**profile.overrides(), **by_hand})
    except ConfigError as error:
        _log_once(str(error))
        return Applied(settings, note=str(error))
    if other:
        _log_once(other)
    note = "\n".join(filter(None, [_ALL_WHOLE if profile.empty else _BY_PROFILE, other]))
    return Applied(settings, bands, note, used=True, doubt=other)


@lru_cache(maxsize=64)
def _log_once(note: str) -> None:
    logging.warning(note if note.startswith("ToMA: ") else f"ToMA: {note}")
