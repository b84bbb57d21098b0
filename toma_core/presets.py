"""Presets by name, and what a user sets: one of them, and some fields on top."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from .config import Granularity, ToMAConfig
from .settings import ConfigError, Refusal, shown

# Preset -> fields.
Fields = Mapping[str, Mapping[str, Any]]


# What presets have in common whatever the model; which blocks and steps they leave whole is for its family to say.
# Nodes begin with the first. `paper` follows the paper and its released code to the letter; the others are what
# docs/fidelity.md found worth its time. `ratio` is the user's own choice and in no preset; it is also how to be faster.
PRESETS: Fields = {
    "balanced": {"selection_interval": 3, "weight_interval": 3},
    "quality": {"selection_interval": 2, "weight_interval": 2},
    "paper": {"granularity": Granularity.MODULE, "sharpness": 1000.0},
}


@dataclass(frozen=True)
class Settings:
    """A preset and the fields that were set to something else. Raises `ConfigError` for an unknown preset and for a
    value outside its range."""

    preset: str
    overrides: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.preset, str) or self.preset not in PRESETS:
            given, choices = shown(self.preset), tuple(PRESETS)
            raise ConfigError(Refusal.NOT_A_CHOICE(setting="preset", value=given, choices=choices))
        object.__setattr__(self, "overrides", MappingProxyType(dict(self.overrides)))
        self.resolved()

    @property
    def off(self) -> bool:
        """True when nothing could ever be merged, whatever the model and the step."""
        return self.resolved().off

    def resolved(self, own: Fields = MappingProxyType({})) -> ToMAConfig:
        """Every field for a model. own: what its family has in each preset."""
        return ToMAConfig(**{**PRESETS[self.preset], **own.get(self.preset, {}), **self.overrides})
