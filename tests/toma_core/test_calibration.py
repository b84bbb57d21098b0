"""Test the choice of ratios from a table of errors, against a search of all combinations and against choices by
hand."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toma_core.calibration import UNMERGED, Cell, Choice, Option, choose, hull, saved_by

CHEAP = [Option(0.25, 0.01, 0.1), Option(0.5, 0.03, 0.2), Option(0.75, 0.09, 0.3)]
DEAR = [Option(0.25, 0.1, 0.1), Option(0.5, 0.4, 0.2)]
Table = dict[Cell, list[Option]]


@st.composite
def tables(draw: st.DrawFn) -> Table:
    """Draw a small table of up to four sites with up to three ratios each."""
    table = {}
    for site in range(draw(st.integers(1, 4))):
        savings = draw(st.lists(st.integers(1, 60), min_size=1, max_size=3, unique=True))
        errors = draw(st.lists(st.integers(0, 500), min_size=len(savings), max_size=len(savings)))
        pairs = zip(sorted(savings), errors, strict=True)
        table[f"site {site}", 0] = [Option(0.2 * n, e / 1000, s / 1000) for n, (s, e) in enumerate(pairs, 1)]
    return table


def every_choice(table: Table) -> list[Choice]:
    """Return all combinations of ratios."""
    each = [(UNMERGED, *options) for options in table.values()]
    return [
        {cell: option for cell, option in zip(table, chosen, strict=True) if option is not UNMERGED}
        for chosen in itertools.product(*each)
    ]


def squared_error(choice: Choice) -> float:
    return sum(option.squared_error for option in choice.values())


@given(tables(), st.floats(0, 1))
def test_saves_enough_at_the_smallest_error_but_for_one_piece(table: Table, share: float) -> None:
    choices = every_choice(table)
    wanted = share * max(map(saved_by, choices))
    chosen = choose(table, wanted)
    assert saved_by(chosen) >= wanted - 1e-9
    pieces = [pair for options in table.values() for pair in itertools.pairwise(hull(options))]
    piece = max(b.squared_error - a.squared_error for a, b in pieces)
    assert squared_error(chosen) <= min(squared_error(c) for c in choices if saved_by(c) >= wanted) + piece + 1e-9
    exact = min(squared_error(c) for c in choices if saved_by(c) >= saved_by(chosen) - 1e-9)
    assert squared_error(chosen) <= exact + 1e-9, "no combination saves as much with a smaller error"


def test_the_cheap_site_is_merged_first_and_the_broken_one_not_at_all() -> None:
    """Two choices save 0.3: the cheap site at 0.75 (squared error 0.09), and both sites (squared error 0.03 + 0.1)."""
    table = {("cheap", 0): CHEAP, ("dear", 0): DEAR, ("broken", 0): [Option(0.5, 30.0, 0.5)]}
    assert choose(table, 0.3) == {("cheap", 0): CHEAP[2]}
    assert ("broken", 0) not in choose(table, 0.5)
    assert ("broken", 0) in choose(table, 0.6)
    assert saved_by(choose(table, 5.0)) == pytest.approx(1.0), "all that there is"


def test_nothing_to_choose_from() -> None:
    assert choose({}, 0.5) == {}
