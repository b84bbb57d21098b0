"""What was found out about one model, as text: how much of which blocks to merge at which noise level.

A profile is JSON of less than 2 kB that lies in a workflow beside the seed. It goes by noise level (sigma), which means
the same whatever the steps, the sampler and the scheduler, and says of which model it is.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any

from .config import ToMAConfig, check, setting_spec
from .reasons import Message
from .schedule import RatioSchedule
from .settings import ConfigError, Refusal, shown

SCHEMA = 1
# Of a profile that is read; those that are written have a fifth of it.
_MOST = 10_000
# Noise levels, and ratios above 0: under torch.compile every ratio is a graph.
_MOST_LEVELS = 8
# Beyond every noise level: ComfyUI's highest is about 4500.
_LARGEST = 1e9
# Characters of a model's facts, and as many as fit on the node.
_MOST_NAMED, _MOST_SHOWN = 600, 120


@dataclass(frozen=True)
class Fingerprint:
    """What tells models apart without a look at their weights. family, blocks, width: of the architecture, so that a
    finetune has those of its base. noise: what the model predicts, and its highest noise level, the scale of all
    others. patches: of its LoRAs and their strengths, "" without."""

    family: str
    blocks: str
    width: str
    noise: str = ""
    patches: str = ""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if not isinstance(value, str) or len(value) > _MOST_NAMED:
                raise _fault(f"{item.name} of the model is {shown(value)}")

    def __str__(self) -> str:
        noise = f", noise {self.noise}" if self.noise else ""
        return _short(f"{self.family} with blocks {self.blocks} of width {self.width}{noise}")


@dataclass(frozen=True)
class Profile:
    """Ratios by place and noise level, over the settings that they were found with.

    settings: fields of `ToMAConfig` that are not its defaults. above: the noise levels where bands end, from high to
    low, the last is 0. ratios: "first block - last block", or a block alone -> a ratio for each band; blocks that are
    not named run whole. distance, work: what was predicted for it; they change nothing.
    """

    model: Fingerprint
    settings: Mapping[str, Any]
    above: tuple[float, ...]
    ratios: Mapping[str, tuple[float, ...]]
    distance: float = 0.0
    work: float = 1.0
    schema: int = field(default=SCHEMA, init=False)

    def __post_init__(self) -> None:
        if self.config().off:
            raise _fault("its settings switch merging off: blocks that stay whole are told by ratios")
        levels = [*self.above]
        if not levels or levels != sorted(set(levels), reverse=True) or not all(0 <= s < math.inf for s in levels):
            raise _fault(f"above_sigma is {shown(levels)}, not noise levels from high to low")
        if len(levels) > _MOST_LEVELS:
            raise _fault(f"{len(levels)} noise levels, allowed are {_MOST_LEVELS}")
        for place, ratios in self.ratios.items():
            if len(ratios) != len(levels):
                raise _fault(f"{shown(place)} has {len(ratios)} ratios for {len(levels)} noise levels")
            for ratio in ratios:
                check("ratio", ratio)
        if len({ratio for ratios in self.ratios.values() for ratio in ratios if ratio}) > _MOST_LEVELS:
            raise _fault(f"more than {_MOST_LEVELS} different ratios")

    def config(self) -> ToMAConfig:
        """The settings that it was found with. Raises `ConfigError`."""
        unknown = self.settings.keys() - {f.name for f in fields(ToMAConfig)}
        if unknown:
            raise _fault(f"{shown(min(unknown))} is no setting")
        return ToMAConfig(**self.settings)

    def overrides(self) -> dict[str, Any]:
        """Every field of its settings: a preset must not add to them."""
        config = self.config()
        return {f.name: getattr(config, f.name) for f in fields(config)}

    def ratio_schedule(self, names: Sequence[str]) -> RatioSchedule:
        """For a schedule of the model with these blocks, in forward order. Raises `ConfigError` for one that it has
        not."""
        by_band: list[dict[str, float]] = [{} for _ in self.above]
        for place, ratios in self.ratios.items():
            first, _, last = place.partition(" - ")
            if first not in names or (last or first) not in names:
                raise _fault(f"the model has no block {shown(place)}")
            chosen = names[names.index(first) : names.index(last or first) + 1]
            if not chosen:
                raise _fault(f"{shown(place)} ends before it begins")
            if by_band[0].keys() & {*chosen}:
                raise _fault(f"{shown(place)} has blocks that another place has too")
            for band, ratio in zip(by_band, ratios, strict=True):
                band.update(dict.fromkeys(chosen, ratio))
        return tuple(zip(self.above, by_band, strict=True))

    def text(self) -> str:
        """As JSON, a line for each place."""
        model = {key: value for key, value in vars(self.model).items() if value}
        lines = {
            "toma_profile": self.schema,
            "model": model,
            "settings": {name: _plain(value) for name, value in self.settings.items()},
            "predicted": {"distance": round(self.distance, 4), "work": round(self.work, 4)},
            "above_sigma": [float(f"{sigma:.5g}") for sigma in self.above],
        }
        head = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in lines.items()]
        places = [f"  {json.dumps(place)}: {json.dumps(list(ratios))}" for place, ratios in self.ratios.items()]
        ratios = "{\n" + ",\n".join(places) + "\n }" if places else "{}"
        return "{\n" + ",\n".join([*head, f' "ratios": {ratios}']) + "\n}\n"

    @property
    def empty(self) -> bool:
        """Whether every block stays whole."""
        return not any(ratio for ratios in self.ratios.values() for ratio in ratios)


def place_of(names: Sequence[str]) -> str:
    """How a profile names blocks that follow each other."""
    return names[0] if len(names) == 1 else f"{names[0]} - {names[-1]}"


def changed(config: ToMAConfig) -> dict[str, Any]:
    """The fields that are not `ToMAConfig`'s defaults."""
    return {f.name: getattr(config, f.name) for f in fields(config) if getattr(config, f.name) != f.default}


def parsed(text: Any) -> Profile:
    """A profile from its text. Raises `ConfigError`, which says what is wrong with it and what runs instead."""
    if not isinstance(text, str) or len(text) > _MOST:
        raise _unused(Refusal.PROFILE_NOT_TEXT())
    try:
        told = _table("the profile", json.loads(text))
        schema = told["toma_profile"]
        if isinstance(schema, bool) or not isinstance(schema, int) or schema < 1:
            raise _fault("toma_profile is no version")
        profile = _read(told) if schema <= SCHEMA else None
    except json.JSONDecodeError:
        raise _unused(Refusal.PROFILE_DAMAGED(what="it cannot be read as JSON")) from None
    except (ConfigError, KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else str(error).removeprefix("ToMA: ")
        raise _unused(Refusal.PROFILE_DAMAGED(what=_short(what))) from None
    if profile is None:
        raise ConfigError(Refusal.PROFILE_NEWER(schema=shown(schema), known=SCHEMA))
    return profile


def fitted(profile: Profile, model: Fingerprint, names: Sequence[str]) -> tuple[RatioSchedule, bool]:
    """Return the bands of a profile for a model with these blocks, and whether it was made with the same LoRAs. Raises
    `ConfigError` if it is another model's."""
    made = profile.model
    if replace(made, patches="") != replace(model, patches=""):
        raise _unused(Refusal.PROFILE_OTHER_MODEL(made=str(made), model=str(model)))
    try:
        ratio_schedule = profile.ratio_schedule(names)
    except ConfigError as error:
        raise _unused(Refusal.PROFILE_DAMAGED(what=_short(str(error).removeprefix("ToMA: ")))) from None
    return ratio_schedule, made.patches == model.patches


def _unused(problem: Message) -> ConfigError:
    return ConfigError(Refusal.PROFILE_UNUSED(problem=problem))


def _fault(what: str) -> ConfigError:
    """what: a detail in English for whoever reads or writes the JSON."""
    return ConfigError(Refusal.PROFILE_FAULT(what=what))


def _read(told: Mapping[str, Any]) -> Profile:
    model = _table("model", told["model"])
    unknown = model.keys() - {item.name for item in fields(Fingerprint)}
    missing = {"family", "blocks", "width"} - model.keys()
    if unknown or missing:
        raise _fault(f"{min(missing)} is missing" if missing else f"{shown(min(unknown))} is nothing of a model")
    ratios = {place: tuple(_list(place, values)) for place, values in _table("ratios", told["ratios"]).items()}
    settings = {
        name: check(name, value) for name, value in _table("settings", told["settings"]).items() if _known(name)
    }
    predicted = _table("predicted", told.get("predicted") or {})
    figures = _number("distance", predicted.get("distance", 0.0)), _number("work", predicted.get("work", 1.0))
    above = tuple(_number("above_sigma", sigma) for sigma in _list("above_sigma", told["above_sigma"]))
    return Profile(Fingerprint(**model), settings, above, ratios, *figures)


def _table(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise _fault(f"{name} is {shown(value)}, not names with values")
    return value


def _list(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise _fault(f"{shown(name)} is {shown(value)}, not a list")
    return value


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < _LARGEST:
        raise _fault(f"{name} is {shown(value)}, not a number")
    return float(value)


def _short(text: str) -> str:
    """On one line of the node."""
    text = " ".join(text.split()).rstrip(".")
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _known(name: str) -> bool:
    try:
        setting_spec(name)
    except KeyError:
        raise _fault(f"{shown(name)} is no setting") from None
    return True


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value
