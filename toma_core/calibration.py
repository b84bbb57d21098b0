"""Choose ratios from measured errors, so that a given share of the work is saved at the least error.

The paper has no calibration. A *site* is a group of adjacent blocks with one ratio, a *band* a range of noise levels,
and a *cell* a site in a band. Squared errors of blocks add up (docs/fidelity.md), so the choice is a knapsack problem.
A greedy choice along the lower hull of each cell's options is optimal, except for the last option that it takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

Cell = tuple[str, int]  # site and band


class Option(NamedTuple):
    """A ratio for one cell."""

    ratio: float  # share of the tokens that is merged away
    squared_error: float  # what the option adds to the final latent's squared error, in the same unit for all options
    saved: float  # the work that the option saves, as a share of the work of all blocks in a run


UNMERGED = Option(0.0, 0.0, 0.0)
Choice = dict[Cell, Option]  # one option for each cell that is merged


def saved_by(choice: Choice) -> float:
    """Return the share of the work of all blocks that a choice saves."""
    return math.fsum(option.saved for option in choice.values())


def hull(options: Iterable[Option]) -> list[Option]:
    """Return the options on the lower hull of squared error over saved work, beginning with `UNMERGED`."""
    chosen = [UNMERGED]
    for option in sorted(options, key=lambda o: (o.saved, o.squared_error)):
        while len(chosen) > 1 and _price(chosen[-2], chosen[-1]) >= _price(chosen[-2], option):
            chosen.pop()
        if option.saved > chosen[-1].saved:
            chosen.append(option)
    return chosen


def _price(a: Option, b: Option) -> float:
    """Return how much more squared error option b has than option a, divided by how much more work b saves."""
    saved = b.saved - a.saved
    return (b.squared_error - a.squared_error) / saved if saved > 0 else math.inf


def choose(table: Mapping[Cell, Sequence[Option]], saved: float) -> Choice:
    """Return the choice with the smallest error that saves the share `saved` of the work. If no choice saves as much,
    return the choice that saves most. Of equally good options, the first in `table` is taken."""
    pieces = [(_price(*pair), cell, pair[1]) for cell, options in table.items() for pair in pairwise(hull(options))]
    choice: Choice = {}
    for _, cell, option in sorted(pieces, key=lambda piece: piece[0]):
        if saved_by(choice) >= saved - 1e-12:
            break
        choice[cell] = option
    return choice
