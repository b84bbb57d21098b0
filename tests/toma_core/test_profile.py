"""Test that a profile, written as text and parsed again, is the same, and why other texts are refused."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.loop import loop
from toma_core.config import ConfigError, ToMAConfig
from toma_core.presets import UserSettings
from toma_core.profile import Profile, entry_of, fitted, parsed

FLUX = "flux with blocks double 4, single 8 of width 3072, noise CONST up to 1"
NAMES = [*(f"double.{n}" for n in range(4)), *(f"single.{n}" for n in range(8))]
CONFIG = ToMAConfig(full_step_interval=3)


def profile(**fields: Any) -> Profile:
    ratios = {"double.0 - double.3": (0.0, 0.5), "single.0 - single.6": (0.75, 0.25), "single.7": (0.5, 0.5)}
    given = {"model": FLUX, "config": CONFIG, "above": (0.6, 0.0), "ratios": ratios, **fields}
    return Profile(**given)


def refusal(text: Any) -> str:
    """Return the one short line that refuses a profile or its text, or "" if the profile is taken."""
    try:
        fitted(text if isinstance(text, Profile) else parsed(text), FLUX, NAMES)
    except ConfigError as error:
        said = str(error)
        assert said.startswith(("ToMA: profile_unused: ", "ToMA: profile_newer: "))
        assert len(said) < 400
        assert "\n" not in said
        return said
    return ""


def changed(**fields: Any) -> str:
    content = {**json.loads(profile().text()), **fields}
    return json.dumps({key: value for key, value in content.items() if value is not None})


def test_comes_back_as_it_was_with_every_field_so_that_no_preset_adds_to_it() -> None:
    made = profile()
    assert parsed(made.text()) == made
    assert json.loads(made.text())["toma_profile"] == 1
    assert json.loads(made.text())["settings"] == {"full_step_interval": 3}
    over = vars(parsed(made.text()).config)
    assert UserSettings("quality", over).resolved(own={"quality": {"skip_last_blocks": 2}}) == CONFIG


def test_the_largest_there_is_stays_small() -> None:
    """The text of the largest possible profile, with twelve sites and three sigma ranges, has at most 2000 bytes."""
    homes = [f"output.{n}" for n in range(12)]
    kinds = ", ".join(f"{home} 10" for home in homes)
    model = f"unet with blocks {kinds} of width 320, 640, 1280, noise V_PREDICTION up to 15"
    ratios = {f"{home}.0 - {home}.9": (0.75, 0.25, 0.5) for home in homes}
    config = UserSettings("balanced", {"skip_last_blocks": 3}).resolved()
    made = profile(model=model, ratios=ratios, config=config, above=(9.1234567, 1.234567, 0.0))
    assert len(made.text().encode()) <= 2000
    assert parsed(made.text()).above == (9.1235, 1.2346, 0.0)


def test_fits_its_own_model_and_no_other() -> None:
    high = {**dict.fromkeys(NAMES[:4], 0.0), **dict.fromkeys(NAMES[4:11], 0.75), "single.7": 0.5}
    low = {**dict.fromkeys(NAMES[:4], 0.5), **dict.fromkeys(NAMES[4:11], 0.25), "single.7": 0.5}
    assert fitted(profile(), FLUX, NAMES) == ((0.6, high), (0.0, low))
    with pytest.raises(ConfigError, match=r"profile_unused: .*other_model: made=flux with blocks double 4, single 8"):
        fitted(profile(), "flux with blocks double 19, single 38 of width 3072, noise CONST up to 1", NAMES)
    with pytest.raises(ConfigError, match=r"noise CONST up to 1, model=.* noise EPS up to 15"):
        fitted(profile(), FLUX.replace("CONST up to 1", "EPS up to 15"), NAMES)


# Fault -> the profiles that have this fault.
FAULTS: dict[str, list[Any]] = {
    "damaged": [
        *("hello", "", "[]", "null", "1" * 5000, "[" * 9_000),
        *(changed(ratios=ratios) for ratios in ({"single.0": [0.5, None]}, {"single.0": [0.5, 10**400]}, [])),
        *(changed(above_sigma=above) for above in ([10**400, 0.0], ["much", 0.0], 0.5, [])),
        *(changed(settings=settings) for settings in ({"ratio": 10**400}, {"full_step_interval": 10**400}, [1])),
    ],
    "profile_not_text": ["[" * 100_000, None, 5],
    "'toma_profile' is missing": ["{}"],
    "no version": [changed(toma_profile=version) for version in ("1", True, -1)],
    "profile_newer: ": [changed(toma_profile=version) for version in (2, 10**4000)],
    "'model' is missing": [changed(model=None)],
    "model is no text": [changed(model={"family": "flux"}), changed(model=5)],
    "1 ratios for 2 noise levels": [changed(ratios={blocks: [0.5]}) for blocks in ("single.0", "x" * 900)],
    "4 ratios for 2 noise levels": [changed(ratios={"single.0": "half"})],
    r"out_of_range: setting=ratio, value=3\.0, .*high=0\.95": [changed(ratios={"single.0": [0.5, 3.0]})],
    "setting=ratio, value=True": [changed(ratios={"single.0": [True, 0.5]})],
    "setting=ratio, value='0.5'": [changed(ratios={"single.0": [0.5, "0.5"]})],
    "more than 8 different ratios": [changed(ratios={f"single.{n}": [0.05 * n, 0.05 * n] for n in range(1, 10)})],
    "high to low": [changed(above_sigma=[0.0, 0.6])],
    "not up to 8 noise levels": [
        *(changed(above_sigma=[above, 0.0]) for above in (float("nan"), float("inf"))),
        changed(above_sigma=[9.0 - n for n in range(10)], ratios={}),
    ],
    "argument 'colour'": [changed(settings={"colour": "red"})],
    "switch merging off": [changed(settings={"ratio": 0.0})],
    "setting=full_step_interval": [changed(settings={"full_step_interval": -5})],
    "start_after_end": [changed(settings={"start_percent": 0.9, "end_percent": 0.1})],
}


@loop(("why", "text"), [(why, text) for why, texts in FAULTS.items() for text in texts])
def test_what_is_wrong_is_said(why: str, text: Any) -> None:
    assert re.search(why, refusal(text))


@loop(
    ("places", "why"),
    [
        (["single.9"], "the model has no block 'single.9'"),
        (["single.5 - single.2"], "'single.5 - single.2' ends before it begins, or has"),
        (["single.0 - single.3", "single.2"], "'single.2' ends before it begins, or has blocks of another entry"),
        (["x" * 5000], "the model has no block 'xxx"),
        (["a\nb"], "the model has no block"),
    ],
)
def test_an_unknown_block_is_damage(places: list[str], why: str) -> None:
    said = refusal(profile(ratios=dict.fromkeys(places, (0.5, 0.5))))
    assert why in said
    assert "damaged" in said


def test_a_profile_that_merges_nothing() -> None:
    for none in ({}, {"single.0": (0.0, 0.0)}):
        made = parsed(profile(ratios=none).text())
        assert not any(ratio for _, ratios in made.ratio_schedule(NAMES) for ratio in ratios.values())


@given(st.text(max_size=40), st.integers(0, 400), st.integers(0, 40))
def test_damaged_texts_are_read_or_refused(piece: str, start: int, gone: int) -> None:
    text = profile().text()
    refusal(text[:start] + piece + text[start + gone :])


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
KEYS = ("toma_profile", "model", "settings", "above_sigma", "ratios")


@given(st.sampled_from(KEYS), ANY, st.booleans())
def test_any_other_json_is_read_or_refused(key: str, value: Any, inside: bool) -> None:
    content = json.loads(profile().text())
    if inside and isinstance(content[key], dict):
        value = {**content[key], next(iter(content[key])): value}
    refusal(json.dumps({**content, key: value}))


def test_sites_are_named_by_their_ends() -> None:
    assert entry_of(["single.3"]) == "single.3"
    assert entry_of(["single.3", "single.4", "single.5"]) == "single.3 - single.5"
