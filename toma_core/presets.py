"""Presets by name, and what a user sets: one of them, and some fields on top."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from .config import Granularity, Share, ToMAConfig
from .fields import ConfigError, shown

# Preset -> fields.
Fields = Mapping[str, Mapping[str, Any]]


def _close(every: int) -> Mapping[str, Any]:
    """What stays close to the unmerged picture beside what is left whole: plans are made once for each resolution and
    live `every` steps, each in windows that lie elsewhere than those before."""
    plans = {"share": Share.LEVEL, "select_every": every, "weigh_every": every, "shift_windows": True}
    return {"detail_reuse": True, **plans}


# What presets have in common whatever the model; which blocks and steps they leave whole is for its family to say.
# Nodes begin with the first. `faithful` follows the paper and its released code to the letter; the others are what
# docs/fidelity.md found worth its time. `ratio` is the user's own choice and in no preset; it is also how to be faster.
PRESETS: Fields = {
    "balanced": _close(3),
    "quality": _close(2),
    "faithful": {"granularity": Granularity.MODULE, "scale": 1000.0, "share": Share.LEVEL},
}


@dataclass(frozen=True)
class Settings:
    """A preset and the fields that were set to something else. Raises `ConfigError` for an unknown preset and for a
    value outside its range."""

    preset: str
    overrides: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.preset, str) or self.preset not in PRESETS:
            allowed = ", ".join(PRESETS)
            raise ConfigError(f"ToMA: preset is {shown(self.preset)}. Allowed: {allowed}. Choose one of them.")
        object.__setattr__(self, "overrides", MappingProxyType(dict(self.overrides)))
        self.resolved()

    @property
    def off(self) -> bool:
        """True when nothing could ever be merged, whatever the model and the step."""
        return self.resolved().off

    def resolved(self, own: Fields = MappingProxyType({})) -> ToMAConfig:
        """Every field for a model. own: what its family has in each preset."""
        return ToMAConfig(**{**PRESETS[self.preset], **own.get(self.preset, {}), **self.overrides})
