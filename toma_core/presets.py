"""The presets in one table, by kind of model, and the settings of a user: a preset and values that override it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType
from typing import Any

from .config import ConfigError, Granularity, Refusal, ToMAConfig, shown

# Name of the preset -> name of the setting -> value.
Fields = Mapping[str, Mapping[str, Any]]


class ModelKind(Enum):
    """The kinds of model that presets distinguish."""

    UNET = "UNet"
    TRANSFORMER = "transformer"


_EVERY_3, _EVERY_2, _EVERY_1 = ({"selection_interval": n, "weight_interval": n} for n in (3, 2, 1))
# With a KV cache no block is skipped and every step selects destinations. Small windows then give less error than large
# windows, if each window has enough destinations. So windows have the side `WIDE` only above the ratio `WIDE_ABOVE`.
WIDE_ABOVE, WIDE = 0.6, 8
_KV_CACHE: Mapping[str, Any] = {**_EVERY_1, "kv_cache": True, "window_size": 4}
_PAPER: Mapping[str, Any] = {"granularity": Granularity.MODULE, "sharpness": 1000.0}

# The settings of each preset, for each kind of model; a model family may override some, see `ModelHooks.own_presets`.
# Nodes default to the first preset. `paper` follows the paper and its released code; the others were chosen by
# measurement (docs/fidelity.md). UNets need no full step if the last stacks, which change most, stay unmerged.
PRESETS: Mapping[str, Mapping[ModelKind, Mapping[str, Any]]] = {
    "balanced": {
        ModelKind.UNET: {**_EVERY_3, "skip_last_blocks": 3},
        ModelKind.TRANSFORMER: {**_KV_CACHE, "full_step_interval": 4},
    },
    "quality": {
        ModelKind.UNET: {**_EVERY_2, "skip_last_blocks": 4},
        ModelKind.TRANSFORMER: {**_KV_CACHE, "full_step_interval": 2},
    },
    "paper": {
        ModelKind.UNET: _PAPER,
        ModelKind.TRANSFORMER: {**_PAPER, "skip_first_blocks": 0.1},
    },
}


@dataclass(frozen=True)
class UserSettings:
    """A preset, and values that override its fields. Raises `ConfigError` for an unknown preset or value."""

    preset: str
    overrides: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.preset, str) or self.preset not in PRESETS:
            raise ConfigError(Refusal.NOT_A_CHOICE(setting="preset", value=shown(self.preset), choices=tuple(PRESETS)))
        object.__setattr__(self, "overrides", MappingProxyType(dict(self.overrides)))
        self.resolved()

    def __reduce__(self) -> tuple[Any, ...]:
        # Other nodes copy the settings, and a `MappingProxyType` can be neither copied nor pickled.
        return UserSettings, (self.preset, dict(self.overrides))

    @property
    def off(self) -> bool:
        return self.resolved().off

    def resolved(self, kind: ModelKind = ModelKind.UNET, own: Fields = MappingProxyType({})) -> ToMAConfig:
        """Return the config for a kind of model. With a KV cache, the side of windows depends on the ratio, see
        `WIDE_ABOVE`. own: fields that the model's family sets."""
        config = ToMAConfig(**{**PRESETS[self.preset][kind], **own.get(self.preset, {}), **self.overrides})
        wide = config.kv_cache and config.ratio > WIDE_ABOVE + 1e-9 and "window_size" not in self.overrides
        return replace(config, window_size=WIDE) if wide else config
