"""Presets, and the settings of a user: a preset and fields that override it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from .config import Granularity, ToMAConfig
from .settings import ConfigError, Refusal, shown

# Preset -> fields.
Fields = Mapping[str, Mapping[str, Any]]

# Fields for every model; its family adds skipped blocks and full steps. Nodes default to the first preset. `paper`
# follows the paper and its released code, docs/fidelity.md recommends the others. No preset sets `ratio`.
PRESETS: Fields = {
    "balanced": {"selection_interval": 3, "weight_interval": 3},
    "quality": {"selection_interval": 2, "weight_interval": 2},
    "paper": {"granularity": Granularity.MODULE, "sharpness": 1000.0},
}


@dataclass(frozen=True)
class Settings:
    """A preset and the fields that override it. Raises `ConfigError` for an unknown preset or value."""

    preset: str
    overrides: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.preset, str) or self.preset not in PRESETS:
            given, choices = shown(self.preset), tuple(PRESETS)
            raise ConfigError(Refusal.NOT_A_CHOICE(setting="preset", value=given, choices=choices))
        object.__setattr__(self, "overrides", MappingProxyType(dict(self.overrides)))
        self.resolved()

    def __reduce__(self) -> tuple[Any, ...]:
        # A read-only mapping can be neither copied nor pickled, and other nodes copy the options that settings ride in.
        return Settings, (self.preset, dict(self.overrides))

    @property
    def off(self) -> bool:
        """Whether nothing is merged whatever the model and the step."""
        return self.resolved().off

    def resolved(self, own: Fields = MappingProxyType({}), kv_cache: bool = True) -> ToMAConfig:
        """Return the config for a model. own: fields of its family's presets. kv_cache: False if it cannot have one."""
        overrides = self.overrides if kv_cache else {**self.overrides, "kv_cache": False}
        return ToMAConfig(**{**PRESETS[self.preset], **own.get(self.preset, {}), **overrides})
