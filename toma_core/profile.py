"""Read and write profiles, the results of calibrating a model. A profile has a ratio for each block and range of sigma,
and fits any sampler, scheduler and number of steps. A profile is JSON of less than 2 kB that is saved in a workflow."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from .config import ConfigError, Refusal, ToMAConfig, check, setting_spec, shown
from .reasons import Message
from .schedule import RatioSchedule

SCHEMA = 1
_MAX_TEXT = 10_000  # longest profile that is read, in characters; written profiles have less than 2000
_MAX_BANDS = 8  # the most noise levels, and the most ratios above 0: torch.compile makes a graph for every ratio
_MAX_SIGMA = 1e9  # ComfyUI's highest noise level is about 4500
_MAX_LINE = 120  # most characters of a text, such as a fingerprint, that a message quotes


@dataclass(frozen=True)
class Profile:
    """Ratios by block and noise level, and the settings with which these ratios were found. Raises `ValueError`."""

    model: str  # fingerprint of the model with which the profile was made
    config: ToMAConfig
    above: tuple[float, ...]  # the lowest sigma of each band of noise levels, from high to low; the last is 0
    # "first block - last block", or a block alone -> a ratio for each band. Blocks without an entry are not merged.
    ratios: Mapping[str, tuple[float, ...]]

    def __post_init__(self) -> None:
        if not isinstance(self.model, str):
            raise ValueError("model is no text")
        if self.config.off:
            raise ValueError("its settings switch merging off: blocks that are not merged have the ratio 0")
        levels = [*self.above] if all(0 <= sigma < _MAX_SIGMA for sigma in self.above) else []
        if not 0 < len(levels) <= _MAX_BANDS or levels != sorted({*levels}, reverse=True):
            raise ValueError(f"above_sigma is {shown(self.above)}, not up to {_MAX_BANDS} noise levels, high to low")
        for blocks, ratios in self.ratios.items():
            if len(ratios) != len(levels):
                raise ValueError(f"{shown(blocks)} has {len(ratios)} ratios for {len(levels)} noise levels")
            for ratio in ratios:
                check("ratio", ratio)
        if len({ratio for ratios in self.ratios.values() for ratio in ratios if ratio}) > _MAX_BANDS:
            raise ValueError(f"more than {_MAX_BANDS} different ratios")

    def ratio_schedule(self, names: Sequence[str]) -> RatioSchedule:
        """Return the ratios for a model whose blocks are `names`, in forward order. Raises `ValueError` if the model
        lacks a block of the profile."""
        by_band: list[dict[str, float]] = [{} for _ in self.above]
        for blocks, ratios in self.ratios.items():
            first, _, last = blocks.partition(" - ")
            if first not in names or (last or first) not in names:
                raise ValueError(f"the model has no block {shown(blocks)}")
            chosen = names[names.index(first) : names.index(last or first) + 1]
            if not chosen or by_band[0].keys() & {*chosen}:
                raise ValueError(f"{shown(blocks)} ends before it begins, or has blocks of another entry")
            for band, ratio in zip(by_band, ratios, strict=True):
                band.update(dict.fromkeys(chosen, ratio))
        return tuple(zip(self.above, by_band, strict=True))

    def text(self) -> str:
        """Return the profile as JSON, one line per part, with the settings that differ from `ToMAConfig`'s defaults."""
        changed = {name: value for name, value in vars(self.config).items() if value != setting_spec(name).default}
        lines = {
            "toma_profile": SCHEMA,
            "model": self.model,
            "settings": {name: v.value if isinstance(v, Enum) else v for name, v in changed.items()},
            "above_sigma": [float(f"{sigma:.5g}") for sigma in self.above],
            "ratios": self.ratios,
        }
        return "{\n" + ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in lines.items()) + "\n}\n"


def entry_of(names: Sequence[str]) -> str:
    """Return the key of consecutive blocks in `Profile.ratios`."""
    return names[0] if len(names) == 1 else f"{names[0]} - {names[-1]}"


def parsed(text: Any) -> Profile:
    """Read a profile. Raises `ConfigError`, which names the fault."""
    if not isinstance(text, str) or len(text) > _MAX_TEXT:
        raise _refused(Refusal.PROFILE_NOT_TEXT())
    try:
        content = json.loads(text)
        schema = content["toma_profile"]
        if type(schema) is not int or schema < 1:
            raise ValueError("toma_profile is no version")
        if schema <= SCHEMA:
            above = tuple(float(sigma) for sigma in content["above_sigma"])
            ratios = {blocks: tuple(ratios) for blocks, ratios in content["ratios"].items()}
            return Profile(content["model"], ToMAConfig(**content["settings"]), above, ratios)
    except KeyError as error:
        raise _refused(f"{error} is missing") from None
    except (AttributeError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise _refused(error) from None
    raise ConfigError(Refusal.PROFILE_NEWER(schema=shown(schema), known=SCHEMA))


def fitted(profile: Profile, model: str, names: Sequence[str]) -> RatioSchedule:
    """Return the ratios of a profile for a model with this fingerprint and these blocks. Raises `ConfigError`."""
    if profile.model != model:
        raise _refused(Refusal.PROFILE_OTHER_MODEL(made=_one_line(profile.model), model=_one_line(model)))
    try:
        return profile.ratio_schedule(names)
    except ValueError as error:
        raise _refused(error) from None


def _refused(why: Message | Exception | str) -> ConfigError:
    """Return the error for a profile that is not used. why: a message, or how the profile is damaged."""
    if not isinstance(why, Message):
        why = Refusal.PROFILE_DAMAGED(what=_one_line(str(why).removeprefix(ConfigError.prefix).rstrip(".")))
    return ConfigError(Refusal.PROFILE_UNUSED(problem=why))


def _one_line(text: str) -> str:
    return textwrap.shorten(text, _MAX_LINE, placeholder="...")
