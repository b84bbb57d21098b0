"""Choose ratios from a table of errors: the least error for a saving, or the most saving within an error.

Not in the paper. Squared errors of blocks add up (docs/fidelity.md), so one squared error for each site, band and ratio
predicts every combination. A *site* is a run of blocks with one ratio, a *band* a range of noise levels. The best
combination is a knapsack with one ratio for each cell; along the lower hull of each cell the greedy choice is exact up
to its last piece.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

# A prediction held if what was found differs from it by at most this share.
TOLERANCE = 0.25

# Limits of the growth of a squared error in one step, of its scale, and the least that counts: beyond them the
# measurement is off.
_MIN_GROWTH, _MAX_GROWTH, _MIN_SCALE, _MIN_ERROR = 0.05, 4.0, 1e-3, 1e-24
# Merged steps for each full one, at most, with which growth can be told from error.
_MERGED_PER_FULL = 3

# Site and band.
Cell = tuple[str, int]


@dataclass(frozen=True)
class Option:
    """A ratio for one cell.

    Attributes:
        ratio: Share of the tokens that is merged away.
        squared_error: What it adds to the squared error of the final latent.
        saved: Share of the work of all blocks in a run.
    """

    ratio: float
    squared_error: float
    saved: float


UNMERGED = Option(0.0, 0.0, 0.0)
# The options of each cell; a cell without an entry is not merged.
Table = Mapping[Cell, Sequence[Option]]


@dataclass(frozen=True)
class Choice:
    """One option for every cell that is merged."""

    options: Mapping[Cell, Option]

    @property
    def squared_error(self) -> float:
        """The predicted squared error."""
        return math.fsum(option.squared_error for option in self.options.values())

    @property
    def error(self) -> float:
        """The predicted error, relative L2 of the final latent."""
        return math.sqrt(self.squared_error)

    @property
    def saved(self) -> float:
        """Share of the work of all blocks in a run."""
        return math.fsum(option.saved for option in self.options.values())

    @property
    def work(self) -> float:
        """Share of the work that is left."""
        return 1.0 - self.saved

    def ratio(self, site: str, band: int) -> float:
        """Return the ratio of a cell, 0 if it is not merged."""
        return self.options.get((site, band), UNMERGED).ratio


def hull(options: Iterable[Option]) -> list[Option]:
    """Return the options of a greedy choice, from not merging on: each saves more, at a price that only rises."""
    chosen = [UNMERGED]
    for option in sorted(options, key=lambda o: (o.saved, o.squared_error)):
        while len(chosen) > 1 and _price(chosen[-2], chosen[-1]) >= _price(chosen[-2], option):
            chosen.pop()
        if option.saved > chosen[-1].saved:
            chosen.append(option)
    return chosen


def _price(a: Option, b: Option) -> float:
    """Return the squared error for each piece of work from one option to the next."""
    saved = b.saved - a.saved
    return (b.squared_error - a.squared_error) / saved if saved > 0 else math.inf


def front(table: Table) -> list[Choice]:
    """Return the best choices from merging nothing to the largest saving, each a piece more than the one before.

    Ties go to the cell that comes first.
    """
    hulls = [(cell, hull(options)) for cell, options in table.items()]
    ready = [(_price(h[0], h[1]), number, 1) for number, (_, h) in enumerate(hulls) if len(h) > 1]
    heapq.heapify(ready)
    choices = [Choice({})]
    while ready:
        _, number, at = heapq.heappop(ready)
        cell, options = hulls[number]
        choices.append(Choice({**choices[-1].options, cell: options[at]}))
        if at + 1 < len(options):
            heapq.heappush(ready, (_price(*options[at : at + 2]), number, at + 1))
    return choices


def nearest(table: Table, saved: float) -> Choice:
    """Return the choice with the smallest error that saves this share of the work, or the largest saving there is."""
    choices = front(table)
    choice = next((c for c in choices if c.saved >= saved - 1e-12), choices[-1])
    # The last piece may be larger than what was missing: give back what is not needed, the largest error first.
    while choices[-1].saved >= saved:
        smaller = [
            (now.squared_error - less.squared_error, cell, less)
            for cell, now in choice.options.items()
            for less in (UNMERGED, *table[cell])
            if less.saved < now.saved
            and less.squared_error < now.squared_error
            and choice.saved - now.saved + less.saved >= saved
        ]
        if not smaller:
            break
        _, cell, less = max(smaller, key=lambda each: each[0])
        left = {at: option for at, option in choice.options.items() if at != cell}
        choice = Choice(left if less is UNMERGED else {**left, cell: less})
    return choice


def fastest(table: Table, error: float) -> Choice:
    """Return the choice with the largest saving that is predicted to stay within an error."""
    return max((c for c in front(table) if c.squared_error <= error * error), key=lambda c: c.saved)


def held(predicted: float, found: float) -> bool:
    """Whether a predicted error came true."""
    return abs(found - predicted) <= TOLERANCE * max(predicted, 1e-12)


def filled(
    sites: Mapping[Cell, float],
    together: Mapping[tuple[int, float], float],
    names: Sequence[str],
    at: float,
    also: float,
) -> dict[tuple[str, int, float], float]:
    """Return the squared error of every site, band and ratio from those that were measured.

    Where a band is missing, the nearest one of the site counts, scaled by the errors of all sites together; a ratio is
    scaled in the same way.

    Args:
        sites: Squared errors of single sites at the ratio `at`.
        together: Squared errors of all sites merged, by band and ratio; every band at `at`.
        names: Sites in order; those that were not measured get no entry.
        at: Ratio that single sites were measured at.
        also: Another ratio to fill in, see `between`.
    """
    bands = sorted(band for band, ratio in together if ratio == at)
    ratios = sorted({ratio for _, ratio in together})
    table = {}
    for name in names:
        known = [band for band in bands if (name, band) in sites]
        for band in bands if known else ():
            near = min(known, key=lambda other: abs(other - band))
            error = sites[name, near] * _quotient(together.get((band, at)), together.get((near, at)))
            for ratio in ratios:
                source = next((other for other in (band, *bands) if (other, ratio) in together), band)
                factor = _quotient(together.get((source, ratio)), together.get((source, at)))
                table[name, band, ratio] = error * factor
            table[name, band, also] = between({ratio: table[name, band, ratio] for ratio in ratios}, also)
    return table


def between(errors: Mapping[float, float], ratio: float) -> float:
    """Return the squared error at a ratio from those at other ratios.

    Between two ratios it grows by the same factor for the same piece of ratio (few-step DiT, 8 steps, 0.5 to 0.75:
    0.077 at 0.6, measured 0.078). Outside of them it is that of the nearest.
    """
    below = max((known for known in errors if known <= ratio), default=min(errors))
    above = min((known for known in errors if known >= ratio), default=max(errors))
    low, high = errors[below], errors[above]
    part = (ratio - below) / (above - below) if above > below else 0.0
    return low * (high / low) ** part if low > 0 < high else low + part * (high - low)


def _quotient(a: float | None, b: float | None) -> float:
    return a / b if a is not None and b else 1.0


def amplified(found: Sequence[float], injected: Sequence[float]) -> list[float]:
    """Return for each step by which factor a squared error that enters there is larger in the end.

    Full steps show how errors grow by themselves; what comes on top after a merged step is its own. Without enough full
    steps the first merged step gives the scale of all. The factors reproduce `found[-1]` exactly.

    Args:
        found: Squared errors of a merged run before each step and at the end: one more than steps.
        injected: Squared errors measured for its steps, on another scale; 0 for full steps.
    """
    injected = [error if error > _MIN_ERROR else 0.0 for error in injected]
    merged = [n for n, error in enumerate(injected) if error]
    if not merged or found[-1] <= 0:
        return [1.0] * len(injected)
    scale = min(max(found[merged[0] + 1] / injected[merged[0]], _MIN_SCALE), 1 / _MIN_SCALE)
    scales = dict.fromkeys(merged, scale)
    known = {n: _growth(found[n + 1], found[n]) for n, error in enumerate(injected) if not error and found[n] > 0}
    if _MERGED_PER_FULL * len(known) >= len(merged):
        growths = [_interpolated(known, n) for n in range(len(injected))]
        for n in merged:
            scales[n] = max((found[n + 1] - growths[n] * found[n]) / injected[n], _MIN_GROWTH * scale)
    else:
        growths = [_growth(found[n + 1] - scale * error, found[n]) for n, error in enumerate(injected)]
    factors, after = [0.0] * len(injected), 1.0
    for n in reversed(range(len(injected))):
        factors[n] = after * scales.get(n, scale)
        after *= growths[n]
    predicted = math.fsum(factor * error for factor, error in zip(factors, injected, strict=True))
    return [factor * found[-1] / predicted for factor in factors]


def _growth(after: float, before: float) -> float:
    """Return the factor by which a squared error changes in one step."""
    return min(max(after / before, _MIN_GROWTH), _MAX_GROWTH) if before > 0 else 1.0


def _interpolated(known: Mapping[int, float], n: int) -> float:
    """Return the growth in a step: the geometric mean of the nearest known ones on both sides."""
    below = max((m for m in known if m <= n), default=None)
    above = min((m for m in known if m >= n), default=None)
    sides = [known[m] for m in (below, above) if m is not None]
    return math.prod(sides) ** (1 / len(sides))
