"""From a table to a choice: against all choices there are, and against worked examples."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toma_core.calibration import (
    UNMERGED,
    Choice,
    Option,
    Table,
    amplified,
    between,
    fastest,
    filled,
    front,
    held,
    hull,
    nearest,
)

CHEAP = [Option(0.25, 0.01, 0.1), Option(0.5, 0.03, 0.2), Option(0.75, 0.09, 0.3)]
DEAR = [Option(0.25, 0.1, 0.1), Option(0.5, 0.4, 0.2)]


@st.composite
def tables(draw: st.DrawFn) -> Table:
    """Small ones: up to four places, up to three ratios each, in whole thousandths."""
    places = draw(st.integers(1, 4))
    table = {}
    for place in range(places):
        savings = draw(st.lists(st.integers(1, 60), min_size=1, max_size=3, unique=True))
        errors = draw(st.lists(st.integers(0, 500), min_size=len(savings), max_size=len(savings)))
        pairs = zip(sorted(savings), errors, strict=True)
        table[f"site {place}", 0] = [Option(0.2 * n, e / 1000, s / 1000) for n, (s, e) in enumerate(pairs, 1)]
    return table


def every_choice(table: Table) -> list[Choice]:
    """The oracle: all combinations."""
    each = [(UNMERGED, *options) for options in table.values()]
    return [
        Choice({place: option for place, option in zip(table, chosen, strict=True) if option is not UNMERGED})
        for chosen in itertools.product(*each)
    ]


def dearest_piece(table: Table) -> tuple[float, float]:
    """The most error, and the most work, between two neighbours on a hull."""
    pieces = [pair for options in table.values() for pair in itertools.pairwise(hull(options))]
    return max(b.squared_error - a.squared_error for a, b in pieces), max(b.saved - a.saved for a, b in pieces)


@given(tables())
def test_the_front_is_exact_where_it_has_a_point(table: Table) -> None:
    """No combination saves as much for less."""
    choices = every_choice(table)
    for choice in front(table):
        best = min(c.squared_error for c in choices if c.saved >= choice.saved - 1e-9)
        assert choice.squared_error <= best + 1e-9


@given(tables(), st.floats(0, 1))
def test_nearest_saves_enough_and_costs_at_most_a_piece_too_much(table: Table, share: float) -> None:
    choices = every_choice(table)
    wanted = share * max(c.saved for c in choices)
    chosen = nearest(table, wanted)
    assert chosen.saved >= wanted - 1e-9
    best = min(c.squared_error for c in choices if c.saved >= wanted)
    assert chosen.squared_error <= best + dearest_piece(table)[0] + 1e-9


@given(tables(), st.floats(0, 1))
def test_fastest_stays_within_and_misses_at_most_a_piece(table: Table, distance: float) -> None:
    chosen = fastest(table, distance)
    assert chosen.error <= distance + 1e-9
    best = max(c.saved for c in every_choice(table) if c.squared_error <= distance**2)
    assert chosen.saved >= best - dearest_piece(table)[1] - 1e-9


@settings(max_examples=30)
@given(tables())
def test_more_work_is_never_farther(table: Table) -> None:
    choices = front(table)
    assert choices[0] == Choice({})
    assert all(b.saved > a.saved for a, b in itertools.pairwise(choices))
    prices = [(b.squared_error - a.squared_error) / (b.saved - a.saved) for a, b in itertools.pairwise(choices)]
    assert all(b >= a - 1e-9 for a, b in itertools.pairwise(prices))


def test_the_cheap_place_is_merged_first_and_the_broken_one_not_at_all() -> None:
    """To save 0.3 either the cheap place at 0.75 (error 0.09) or both (0.03 + 0.1): the first. A broken place, whose
    error is beyond all others, stays whole as long as anything else is left."""
    table = {("cheap", 0): CHEAP, ("dear", 0): DEAR, ("broken", 0): [Option(0.5, 30.0, 0.5)]}
    chosen = nearest(table, 0.3)
    assert chosen.options == {("cheap", 0): CHEAP[2]}
    assert (chosen.ratio("cheap", 0), chosen.ratio("broken", 0), chosen.ratio("cheap", 1)) == (0.75, 0.0, 0.0)
    assert math.isclose(chosen.work, 0.7)
    assert math.isclose(chosen.error, 0.3)
    assert ("broken", 0) not in nearest(table, 0.5).options
    assert ("broken", 0) in nearest(table, 0.6).options


def test_what_is_not_needed_is_given_back() -> None:
    """In order of price come 0.1 (free), 0.5 (for 0.1) and 0.6 (for 0.2). To save 0.55 the last is needed, and then no
    other."""
    table = {
        ("a", 0): [Option(0.5, 0.001, 0.1)],
        ("b", 0): [Option(0.5, 0.1, 0.5)],
        ("c", 0): [Option(0.5, 0.2, 0.6)],
    }
    assert nearest(table, 0.6).options == {place: table[place][0] for place in (("a", 0), ("b", 0))}
    assert nearest(table, 0.65).options == {place: table[place][0] for place in (("a", 0), ("c", 0))}
    assert nearest(table, 5.0).saved == pytest.approx(1.2), "all that there is"


def test_nothing_to_choose_from() -> None:
    assert front({}) == [Choice({})]
    assert nearest({}, 0.5) == fastest({}, 0.5) == Choice({})


def test_a_prediction_holds_within_a_quarter() -> None:
    assert held(0.1, 0.12)
    assert held(0.1, 0.08)
    assert not held(0.1, 0.13)
    assert not held(0.1, 0.07)
    assert held(0.0, 0.0)


def test_a_table_is_filled_from_few_measurements() -> None:
    """Sites at the middle level alone; all of them together cost four times as much at level 0, and at ratio 0.75 nine
    times as much as at 0.5."""
    sites = {("a", 1): 0.02, ("b", 1): 0.04}
    together = {(0, 0.5): 0.4, (1, 0.5): 0.1, (1, 0.75): 0.9}
    table = filled(sites, together, ["a", "b", "never measured"], 0.5, 0.5)
    assert table == pytest.approx(
        {
            ("a", 0, 0.5): 0.08,
            ("a", 0, 0.75): 0.72,
            ("a", 1, 0.5): 0.02,
            ("a", 1, 0.75): 0.18,
            ("b", 0, 0.5): 0.16,
            ("b", 0, 0.75): 1.44,
            ("b", 1, 0.5): 0.04,
            ("b", 1, 0.75): 0.36,
        }
    )
    measured = filled({**sites, ("a", 0): 0.5}, together, ["a", "b"], 0.5, 0.6)
    assert measured["a", 0, 0.5] == 0.5, "what was measured is not guessed"
    assert measured["b", 1, 0.6] == pytest.approx(0.04 * 9**0.4), "and what lies between two ratios from both"


def test_between_two_ratios() -> None:
    errors = {0.25: 0.0, 0.5: 0.01, 0.75: 0.04}
    assert [between(errors, ratio) for ratio in errors] == list(errors.values())
    assert between(errors, 0.625) == pytest.approx(0.02), "twice as much, and twice again"
    assert between(errors, 0.375) == pytest.approx(0.005), "from nothing there is no factor"
    assert (between(errors, 0.9), between({0.5: 0.01}, 0.6)) == (0.04, 0.01)


def test_what_becomes_of_an_error() -> None:
    """Steps double every squared distance, and add 1, 0 and 1 on the scale of the run, which is three times that of the
    measurement: 3, then 6, then 12 + 3."""
    found, injected = [0.0, 3.0, 6.0, 15.0], [1.0, 0.0, 1.0]
    assert amplified(found, injected) == pytest.approx([12.0, 6.0, 3.0])
    assert sum(f * e for f, e in zip(amplified(found, injected), injected, strict=True)) == pytest.approx(15.0)


def test_whole_steps_tell_growth_from_error() -> None:
    """Every second step runs whole, and doubles what was there; merged ones add three times what was measured for them,
    then twice, then a half. One scale for all would have the third shrink what came before it to next to nothing."""
    injected, scales, found = [1.0, 0.0, 1.0, 0.0, 8.0, 0.0], [3.0, 0.0, 2.0, 0.0, 0.5, 0.0], [0.0]
    for error, sharpness in zip(injected, scales, strict=True):
        found.append(2.0 * found[-1] + sharpness * error)
    factors = amplified(found, injected)
    assert [factors[n] for n in (0, 2, 4)] == pytest.approx([3.0 * 2**5, 2.0 * 2**3, 0.5 * 2])


def test_where_only_the_end_is_known() -> None:
    """Every step counts the same, and the run itself is predicted as it was found."""
    assert amplified([0.0, 0.0, 0.0, 8.0], [1.0, 0.0, 3.0]) == pytest.approx([2.0, 2.0, 2.0])
    assert amplified([0.0, 0.0], [0.0]) == [1.0]
    assert amplified([0.0, 1.0], [2e-309]) == [1.0], "next to nothing has no sharpness"


@given(
    st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), min_size=1, max_size=12),
)
def test_factors_are_finite_and_predict_their_own_run(steps: list[tuple[float, float]]) -> None:
    found, injected = [0.0, *(f for f, _ in steps)], [e for _, e in steps]
    factors = amplified(found, injected)
    assert all(math.isfinite(f) and f >= 0 for f in factors)
    first = next((n for n, e in enumerate(injected) if e > 0), None)
    if first is not None and found[-1] > 1e-6 and injected[first] > 1e-6:
        assert sum(f * e for f, e in zip(factors, injected, strict=True)) == pytest.approx(found[-1], rel=1e-6)
