from __future__ import annotations

import dataclasses
import math

import pytest

from toma_core.setting_spec import ConfigError, SettingSpec, checked, option, shown


def test_an_option_is_a_dataclass_field_with_its_spec() -> None:
    @dataclasses.dataclass
    class Settings:
        size: int = option(3, "How big.", (1, 9, 2))
        flat: bool = option(False, "Whether flat.")

    size, flat = dataclasses.fields(Settings)
    assert (Settings().size, Settings().flat) == (3, False)
    assert size.metadata["spec"] == SettingSpec(3, "How big.", 1, 9, 2)
    assert flat.metadata["spec"] == SettingSpec(False, "Whether flat.")


def test_what_is_in_no_range_is_refused() -> None:
    for value in (math.inf, -math.inf, math.nan, 2.0):
        with pytest.raises(
            ConfigError, match=r"^ToMA: out_of_range: .*kind=a_number, low=0\.0, high=1\.0, usual=0\.5$"
        ):
            checked("x", value, SettingSpec(0.5, "", 0.0, 1.0))


def test_a_value_is_shown_on_one_line_of_a_screen() -> None:
    assert shown("a\nb") == r"'a\nb'"
    assert shown("x" * 78) == f"'{'x' * 78}'"
    assert shown("x" * 79) == f"'{'x' * 59}... (81 characters)"
    assert shown(10**5000) == "a very large int"
