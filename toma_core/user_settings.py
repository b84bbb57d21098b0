"""The settings of a user: a preset and values that override it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from .config import ToMAConfig
from .presets import PRESETS, WIDE, WIDE_ABOVE, Fields, ModelKind
from .setting_spec import ConfigError, Refusal, shown


@dataclass(frozen=True)
class UserSettings:
    """A preset and the values of fields that override it. Raises `ConfigError` for an unknown preset or value."""

    preset: str
    overrides: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.preset, str) or self.preset not in PRESETS:
            given = shown(self.preset)
            choices = tuple(PRESETS)
            raise ConfigError(Refusal.NOT_A_CHOICE(setting="preset", value=given, choices=choices))
        object.__setattr__(self, "overrides", MappingProxyType(dict(self.overrides)))
        self.resolved()

    def __reduce__(self) -> tuple[Any, ...]:
        # Copy and pickle `overrides` as a dict, because a `MappingProxyType` can be neither copied nor pickled. Other
        # nodes copy the options that carry the settings.
        return UserSettings, (self.preset, dict(self.overrides))

    @property
    def off(self) -> bool:
        """Whether nothing is merged whatever the model and the step."""
        return self.resolved().off

    def resolved(
        self, kind: ModelKind = ModelKind.UNET, own: Fields = MappingProxyType({}), kv_cache: bool = True
    ) -> ToMAConfig:
        """Return the config for a kind of model. With a KV cache, the side of windows depends on the ratio, see
        `WIDE_ABOVE`. own: fields that the model's family sets. kv_cache: False if the model can have no KV cache."""
        overrides = self.overrides if kv_cache else {**self.overrides, "kv_cache": False}
        config = ToMAConfig(**{**PRESETS[self.preset][kind], **own.get(self.preset, {}), **overrides})
        wide = config.kv_cache and config.ratio > WIDE_ABOVE + 1e-9 and "window_size" not in overrides
        return replace(config, window_size=WIDE) if wide else config
