"""Test which values each setting of `ToMAConfig` accepts and refuses, and the error messages for refused values."""

import dataclasses
import math
from enum import Enum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.loop import loop
from toma_core.config import ConfigError, ToMAConfig, check, resolve_count, setting_spec

FIELDS = [item.name for item in dataclasses.fields(ToMAConfig)]
ENUMS = [name for name in FIELDS if isinstance(setting_spec(name).default, Enum)]
SWITCHES = [name for name in FIELDS if isinstance(setting_spec(name).default, bool)]
NUMBERS = [name for name in FIELDS if name not in ENUMS and name not in SWITCHES]
INTEGERS = [name for name in NUMBERS if isinstance(setting_spec(name).default, int)]


def refused(name: str, value: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        ToMAConfig(**{name: value})
    message = str(caught.value)
    assert message.startswith("ToMA: ")
    assert name in message
    return message


@loop("name", FIELDS)
def test_metadata_is_complete(name: str) -> None:
    spec = setting_spec(name)
    default = spec.default
    if name in NUMBERS:
        assert spec.minimum <= default <= spec.maximum
        assert spec.step > 0
        if name in INTEGERS:
            assert all(float(number).is_integer() for number in (spec.minimum, spec.maximum, spec.step))
    else:
        assert spec.minimum == spec.maximum == spec.step == 0
    assert type(check(name, default)) is type(default)


def check_number(name: str, value: Any) -> None:
    """Check that a setting takes values in its range, converts them to the type of its default, and refuses all
    others."""
    spec = setting_spec(name)
    kind = type(spec.default)
    if spec.minimum <= value <= spec.maximum and (kind is float or value == int(value)):
        taken = check(name, value)
        assert (taken, type(taken)) == (value, kind)
    else:
        what = "a_whole_number" if kind is int else "a_number"
        limits = f"kind={what}, low={spec.minimum}, high={spec.maximum}, usual={spec.default}"
        message = refused(name, value)
        assert message.endswith(limits)
        assert abs(value) > 1e6 or f"value={value!r}, " in message, "not rounded: 0.95 is not above 0.95"


@loop("name", NUMBERS)
def test_numbers_keep_to_their_range(name: str) -> None:
    """An integer may be given as a float without a fraction. A float may be given as an integer."""
    spec = setting_spec(name)
    above = math.nextafter(spec.maximum, math.inf)
    ends = (spec.minimum, spec.maximum, spec.minimum - 1, spec.maximum + 1, above, int(spec.maximum))
    for value in (*ends, float(spec.default), spec.default + 0.5, *map(float, ("inf", "-inf", "nan")), 10**400):
        check_number(name, value)


@given(st.sampled_from(NUMBERS), st.floats() | st.integers())
def test_any_number_is_taken_as_it_is_or_refused(name: str, value: float) -> None:
    check_number(name, value)


@loop("name", [*NUMBERS, *SWITCHES])
def test_what_is_no_number_or_no_switch_is_refused(name: str) -> None:
    for value in (0, 1, 1.0, "true", None) if name in SWITCHES else (True, "0.5", "", None, [1], 1j):
        message = refused(name, value)
        assert repr(value) in message
        assert ("not_a_switch: " in message) is (name in SWITCHES)


@loop("name", ENUMS)
def test_enums_take_members_and_their_values_only(name: str) -> None:
    kind = type(setting_spec(name).default)
    for member in kind:
        another = Enum("another", {"WORD": member.value}, type=str).WORD  # a member of another enum with the same word
        assert all(check(name, value) is member for value in (member, member.value, another))
        assert getattr(ToMAConfig(**{name: member.value}), name) is member
    for value in ("", "Tile", "nonsense", None, 0, True, float("nan"), []):
        if name == "kv_cache" and value is True:
            continue
        message = refused(name, value)
        assert repr(value) in message
        assert all(member.value in message for member in kind)


def test_the_kv_cache_takes_true_and_false_too() -> None:
    on, card_only, off = type(setting_spec("kv_cache").default)
    assert [check("kv_cache", value) for value in (True, False)] == [on, off]
    assert [bool(each) for each in (on, card_only, off)] == [True, True, False]


def test_start_after_end_and_full_at_every_step_are_refused() -> None:
    for start, message in ((0.6, r"start_after_end: start=0\.6, end=0\.5$"), (0.50000001, "start=0.50000001, end=0.5")):
        with pytest.raises(ConfigError, match=message):
            ToMAConfig(start_percent=start, end_percent=0.5)
    assert refused("full_step_interval", 1) == "ToMA: full_step_interval_one"
    assert ToMAConfig(full_step_interval=2).full_step_interval == 2


@loop(
    ("amount", "count", "blocks"),
    [(0, 19, 0), (0.15, 19, 3), (0.15, 20, 3), (0.1, 30, 3), (0.07, 100, 7), (0.001, 4, 1), (0.99, 4, 4), (1, 4, 1),
     (2.5, 4, 3), (5, 4, 4), (1000, 0, 0), (0.5, 0, 0)],
)  # fmt: skip
def test_a_share_or_a_number_of_blocks(amount: float, count: int, blocks: int) -> None:
    assert resolve_count(amount, count) == blocks


def test_frozen_equal_and_hashable() -> None:
    config = ToMAConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.ratio = 0.1  # type: ignore[misc]
    assert config == ToMAConfig(ratio=0.5, granularity="stack")  # type: ignore[arg-type]
    assert hash(config) == hash(ToMAConfig())
    assert config != ToMAConfig(ratio=0.25)


def test_off_means_that_nothing_could_ever_merge() -> None:
    assert ToMAConfig(ratio=0).off
    assert ToMAConfig(start_percent=0.4, end_percent=0.4).off
    assert not ToMAConfig(ratio=0.01, start_percent=0.4, end_percent=0.41).off
