"""Read and write what a calibration found out about one model: which ratio for which blocks at which noise level.

A profile is JSON of less than 2 kB that is saved in a workflow, as the seed is. It goes by sigma, which means the same
whatever the steps, the sampler and the scheduler, and names the model that it was made with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any

from .config import ToMAConfig, check
from .reasons import Message
from .schedule import RatioSchedule
from .settings import ConfigError, Refusal, shown

SCHEMA = 1
# Characters of a profile that is read; those that are written have a fifth of it.
_MAX_TEXT = 10_000
# Noise levels, and ratios above 0: under torch.compile every ratio is a graph.
_MAX_BANDS = 8
# ComfyUI's highest noise level is about 4500.
_MAX_SIGMA = 1e9
# Characters of an explanation on a node.
_MAX_LINE = 120
_SETTINGS = {f.name: f.default for f in fields(ToMAConfig)}


@dataclass(frozen=True)
class Fingerprint:
    """Facts that distinguish models without reading their weights: a finetune has those of its base.

    Attributes:
        family: Module of the family.
        blocks: How many blocks of which kind.
        width: Channels of a token, of each kind of block.
        noise: What the model predicts, and its highest noise level.
        patches: Digest of its LoRAs and their strengths, "" without.
    """

    family: str
    blocks: str
    width: str
    noise: str = ""
    patches: str = ""

    def __str__(self) -> str:
        noise = f", noise {self.noise}" if self.noise else ""
        return _one_line(f"{self.family} with blocks {self.blocks} of width {self.width}{noise}")


@dataclass(frozen=True)
class Profile:
    """Ratios by block and noise level, over the settings that they were found with. Raises `ConfigError`.

    Attributes:
        model: The model it was made with.
        settings: Fields of `ToMAConfig` that are not its defaults.
        above: Sigma at which each band ends, from high to low; the last is 0.
        ratios: "first block - last block", or a block alone -> a ratio for each band. Other blocks are not merged.
    """

    model: Fingerprint
    settings: Mapping[str, Any]
    above: tuple[float, ...]
    ratios: Mapping[str, tuple[float, ...]]
    schema: int = field(default=SCHEMA, init=False)

    def __post_init__(self) -> None:
        if self.config().off:
            raise _fault("its settings switch merging off: blocks that are not merged have the ratio 0")
        if not 0 < len(self.above) <= _MAX_BANDS or [*self.above] != sorted({*self.above}, reverse=True):
            raise _fault(f"above_sigma is {shown(self.above)}, not up to {_MAX_BANDS} noise levels from high to low")
        for blocks, ratios in self.ratios.items():
            if len(ratios) != len(self.above):
                raise _fault(f"{shown(blocks)} has {len(ratios)} ratios for {len(self.above)} noise levels")
            for ratio in ratios:
                check("ratio", ratio)
        if len({ratio for ratios in self.ratios.values() for ratio in ratios if ratio}) > _MAX_BANDS:
            raise _fault(f"more than {_MAX_BANDS} different ratios")

    def config(self) -> ToMAConfig:
        """Return the settings that it was found with. Raises `ConfigError`."""
        if unknown := self.settings.keys() - _SETTINGS.keys():
            raise _fault(f"{shown(min(unknown))} is no setting")
        return ToMAConfig(**self.settings)

    def overrides(self) -> dict[str, Any]:
        """Return every field of its settings, so that no preset adds to them."""
        return dict(vars(self.config()))

    def ratio_schedule(self, names: Sequence[str]) -> RatioSchedule:
        """Return the ratios for a model with these blocks, in forward order. Raises `ConfigError` if one is missing."""
        by_band: list[dict[str, float]] = [{} for _ in self.above]
        for blocks, ratios in self.ratios.items():
            first, _, last = blocks.partition(" - ")
            if first not in names or (last or first) not in names:
                raise _fault(f"the model has no block {shown(blocks)}")
            chosen = names[names.index(first) : names.index(last or first) + 1]
            if not chosen or by_band[0].keys() & {*chosen}:
                raise _fault(f"{shown(blocks)} ends before it begins, or has blocks of another entry")
            for band, ratio in zip(by_band, ratios, strict=True):
                band.update(dict.fromkeys(chosen, ratio))
        return tuple(zip(self.above, by_band, strict=True))

    def text(self) -> str:
        """Return it as JSON, with a line for each part."""
        lines = {
            "toma_profile": self.schema,
            "model": {key: value for key, value in vars(self.model).items() if value},
            "settings": {key: v.value if isinstance(v, Enum) else v for key, v in self.settings.items()},
            "above_sigma": [float(f"{sigma:.5g}") for sigma in self.above],
            "ratios": self.ratios,
        }
        return "{\n" + ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in lines.items()) + "\n}\n"

    @property
    def empty(self) -> bool:
        """Whether it merges nothing."""
        return not any(ratio for ratios in self.ratios.values() for ratio in ratios)


def entry_of(names: Sequence[str]) -> str:
    """Return the name of consecutive blocks in a profile."""
    return names[0] if len(names) == 1 else f"{names[0]} - {names[-1]}"


def changed(config: ToMAConfig) -> dict[str, Any]:
    """Return the fields that are not `ToMAConfig`'s defaults."""
    return {name: value for name, value in vars(config).items() if value != _SETTINGS[name]}


def parsed(text: Any) -> Profile:
    """Read a profile. Raises `ConfigError`, which names what is wrong and what runs instead."""
    if not isinstance(text, str) or len(text) > _MAX_TEXT:
        raise _unused(Refusal.PROFILE_NOT_TEXT())
    try:
        content = json.loads(text)
        schema = content["toma_profile"]
        if type(schema) is not int or schema < 1:
            raise _fault("toma_profile is no version")
        if schema <= SCHEMA:
            return _read(content)
    except json.JSONDecodeError:
        raise _unused(Refusal.PROFILE_DAMAGED(what="it cannot be read as JSON")) from None
    except KeyError as error:
        raise _damaged(f"{error} is missing") from None
    except (ConfigError, AttributeError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise _damaged(error) from None
    raise ConfigError(Refusal.PROFILE_NEWER(schema=shown(schema), known=SCHEMA))


def _read(content: Mapping[str, Any]) -> Profile:
    above = tuple(float(sigma) for sigma in content["above_sigma"])
    if not all(0 <= sigma < _MAX_SIGMA for sigma in above):
        raise _fault("above_sigma holds what is no noise level")
    return Profile(
        Fingerprint(**{name: str(value) for name, value in content["model"].items()}),
        {name: check(name, value) if name in _SETTINGS else value for name, value in content["settings"].items()},
        above,
        {blocks: tuple(ratios) for blocks, ratios in content["ratios"].items()},
    )


def fitted(profile: Profile, model: Fingerprint, names: Sequence[str]) -> tuple[RatioSchedule, bool]:
    """Return the ratios of a profile for a model with these blocks, and whether it was made with the same LoRAs.

    Raises `ConfigError` if it was made with another model.
    """
    made = profile.model
    if replace(made, patches="") != replace(model, patches=""):
        raise _unused(Refusal.PROFILE_OTHER_MODEL(made=str(made), model=str(model)))
    try:
        return profile.ratio_schedule(names), made.patches == model.patches
    except ConfigError as error:
        raise _damaged(error) from None


def _unused(problem: Message) -> ConfigError:
    return ConfigError(Refusal.PROFILE_UNUSED(problem=problem))


def _damaged(what: object) -> ConfigError:
    return _unused(Refusal.PROFILE_DAMAGED(what=_one_line(str(what).removeprefix("ToMA: "))))


def _fault(what: str) -> ConfigError:
    """Return an error for readers of the JSON, in English."""
    return ConfigError(Refusal.PROFILE_FAULT(what=what))


def _one_line(text: str) -> str:
    """Return text as it fits on one line of a node."""
    text = " ".join(text.split()).rstrip(".")
    return text if len(text) <= _MAX_LINE else f"{text[:_MAX_LINE]}..."
