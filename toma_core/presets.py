"""The presets in one table, and the settings of a user: a preset and fields that override it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any

from .config import Granularity, SimilarityFrom, ToMAConfig
from .settings import ConfigError, Refusal, shown

# Preset -> fields.
Fields = Mapping[str, Mapping[str, Any]]


class ModelKind(Enum):
    """What presets distinguish models by."""

    UNET = "UNet"
    TRANSFORMER = "transformer"  # with a KV cache
    WITHOUT_KV_CACHE = "transformer without a KV cache"


# Plans from the predicted picture, with more destinations where it is richer, have a smaller error for the same work.
_PREDICTED: Mapping[str, Any] = {"similarity_from": SimilarityFrom.PREDICTION}
# With a KV cache no block is skipped, every step selects again, and smaller windows have a smaller error.
_KV_CACHE: Mapping[str, Any] = {
    **_PREDICTED,
    "kv_cache": True,
    "window_size": 4,
    "sharpness": 1000.0,
    "selection_interval": 1,
    "weight_interval": 1,
}
_SKIPPING: Mapping[str, Any] = {**_PREDICTED, "skip_first_blocks": 0.15}
_PAPER: Mapping[str, Any] = {"granularity": Granularity.MODULE, "sharpness": 1000.0}
_EVERY_3, _EVERY_2 = ({"selection_interval": n, "weight_interval": n} for n in (3, 2))

# The fields of each preset, for each kind of model; a family may add its own. Nodes default to the first preset.
# `paper` follows the paper and its released code; the others are measured (docs/fidelity.md): the last stacks of a UNet
# change the image most, and without them no step has to be full. No preset sets `ratio`.
PRESETS: Mapping[str, Mapping[ModelKind, Mapping[str, Any]]] = {
    "balanced": {
        ModelKind.UNET: {**_EVERY_3, "skip_last_blocks": 3},
        ModelKind.TRANSFORMER: {**_KV_CACHE, "full_step_interval": 4},
        ModelKind.WITHOUT_KV_CACHE: {**_EVERY_3, **_SKIPPING, "full_step_interval": 3},
    },
    "quality": {
        ModelKind.UNET: {**_EVERY_2, "skip_last_blocks": 4},
        ModelKind.TRANSFORMER: {**_KV_CACHE, "full_step_interval": 2},
        ModelKind.WITHOUT_KV_CACHE: {**_EVERY_2, **_SKIPPING, "full_step_interval": 2},
    },
    "paper": {
        ModelKind.UNET: _PAPER,
        ModelKind.TRANSFORMER: {**_PAPER, "skip_first_blocks": 0.1},
        ModelKind.WITHOUT_KV_CACHE: {**_PAPER, "skip_first_blocks": 0.1},
    },
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

    def resolved(
        self, kind: ModelKind = ModelKind.UNET, own: Fields = MappingProxyType({}), kv_cache: bool = True
    ) -> ToMAConfig:
        """Return the config for a kind of model. own: fields of its family. kv_cache: False if it cannot have one."""
        overrides = self.overrides if kv_cache else {**self.overrides, "kv_cache": False}
        return ToMAConfig(**{**PRESETS[self.preset][kind], **own.get(self.preset, {}), **overrides})
