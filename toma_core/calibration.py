"""From a table of errors to a choice of ratios: what to merge where, for so much distance or so much work.

Not in the paper. Errors of blocks add as squares (measured: 0.189 predicted, 0.192 found, docs/fidelity.md), and so one
squared error for each site, noise level and ratio tells every combination. A *site* is blocks that get one ratio, a
*level* a band of noise levels. Which combination is best is a knapsack: of every cell one ratio, the most work saved
for an error. Along the lower hull of each cell the greedy choice is exact but for the last piece that is taken.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

# site, level
Site = tuple[str, int]

# Beyond this share of the prediction it did not hold.
TOLERANCE = 0.25


@dataclass(frozen=True)
class Option:
    """A ratio for one site at one level. error: the squared distance that it adds to the picture in the end. saved: of
    the work of all blocks in a run."""

    ratio: float
    error: float
    saved: float


WHOLE = Option(0.0, 0.0, 0.0)

# What there is to choose from, and what was chosen; places that are not named run whole.
Table = Mapping[Site, Sequence[Option]]


@dataclass(frozen=True)
class Choice:
    """One ratio for every place that is merged."""

    options: Mapping[Site, Option]

    @property
    def error(self) -> float:
        """The squared distance that is predicted."""
        return math.fsum(option.error for option in self.options.values())

    @property
    def distance(self) -> float:
        """The distance that is predicted."""
        return math.sqrt(self.error)

    @property
    def saved(self) -> float:
        """Of the work of all blocks in a run."""
        return math.fsum(option.saved for option in self.options.values())

    @property
    def work(self) -> float:
        """What is left of it."""
        return 1.0 - self.saved

    def ratio(self, site: str, level: int) -> float:
        """Of a place, 0 where it runs whole."""
        return self.options.get((site, level), WHOLE).ratio

    def without(self, place: Site, instead: Option) -> Choice:
        """Another option at one place."""
        left = {at: option for at, option in self.options.items() if at != place}
        return Choice(left if instead is WHOLE else {**left, place: instead})


def hull(options: Iterable[Option]) -> list[Option]:
    """Those that a greedy choice goes through, from running whole on: each saves more, at a price that only rises."""
    kept = [WHOLE]
    for option in sorted(options, key=lambda o: (o.saved, o.error)):
        while len(kept) > 1 and _price(kept[-2], kept[-1]) >= _price(kept[-2], option):
            kept.pop()
        if option.saved > kept[-1].saved:
            kept.append(option)
    return kept


def _price(a: Option, b: Option) -> float:
    """Error for each piece of work from one option to the next."""
    saved = b.saved - a.saved
    return (b.error - a.error) / saved if saved > 0 else math.inf


def front(table: Table) -> list[Choice]:
    """The best choices from all whole to the most that can be saved, each a piece more than the one before. Between
    them nothing is better; ties go to the place that comes first."""
    steps = {place: hull(options) for place, options in table.items()}
    order = {place: n for n, place in enumerate(table)}
    ready = [(_price(h[0], h[1]), order[place], 1, place) for place, h in steps.items() if len(h) > 1]
    heapq.heapify(ready)
    choices, chosen = [Choice({})], dict[Site, Option]()
    while ready:
        _, number, at, place = heapq.heappop(ready)
        chosen[place] = steps[place][at]
        choices.append(Choice(dict(chosen)))
        if at + 1 < len(steps[place]):
            heapq.heappush(ready, (_price(*steps[place][at : at + 2]), number, at + 1, place))
    return choices


def nearest(table: Table, saved: float) -> Choice:
    """The nearest choice that saves so much work, or all that can be saved."""
    choices = front(table)
    enough = next((choice for choice in choices if choice.saved >= saved - 1e-12), choices[-1])
    # The last piece may have been larger than what was missing: give back what is not needed, the dearest first.
    smaller = True
    while smaller:
        smaller = False
        back = [
            (now.error - less.error, place, less)
            for place, now in enough.options.items()
            for less in (WHOLE, *table[place])
            if less.saved < now.saved and less.error < now.error and enough.saved - now.saved + less.saved >= saved
        ]
        if back and choices[-1].saved >= saved:
            _, place, less = max(back, key=lambda b: b[0])
            enough, smaller = enough.without(place, less), True
    return enough


def fastest(table: Table, distance: float) -> Choice:
    """The choice that saves most work and is predicted to stay within a distance."""
    most, best = distance * distance, Choice({})
    for choice in front(table):
        if choice.error > most:
            break
        best = choice
    # What is left of the budget may still pay for pieces elsewhere.
    larger = True
    while larger:
        left = most - best.error
        more = [
            (option.saved - now.saved, place, option)
            for place, options in table.items()
            for now in (best.options.get(place, WHOLE),)
            for option in options
            if option.saved > now.saved and option.error - now.error <= left
        ]
        larger = bool(more)
        if more:
            _, place, option = max(more, key=lambda m: m[0])
            best = best.without(place, option)
    return best


def held(predicted: float, found: float) -> bool:
    """Whether a prediction came true."""
    return abs(found - predicted) <= TOLERANCE * max(predicted, 1e-12)


def filled(
    sites: Mapping[Site, float],
    together: Mapping[tuple[int, float], float],
    names: Sequence[str],
    at: float,
    also: float,
) -> dict[tuple[str, int, float], float]:
    """Squared errors of every site, level and ratio from those that were measured.

    sites: of single sites, at the ratio `at`, each at one level at least. together: of all sites merged, by level and
    ratio; every level at `at`. also: a ratio that may not be among them, see `between`. What is missing at a level is
    as at the nearest one, what is missing of a ratio as at any level, each as much more or less as all sites together
    have there.
    """
    levels = sorted({level for level, ratio in together if ratio == at})
    ratios = sorted({ratio for _, ratio in together})
    table = {}
    for name in names:
        known = [level for level in levels if (name, level) in sites]
        if not known:
            continue
        for level in levels:
            near = min(known, key=lambda other: abs(other - level))
            error = sites[name, near] * _share(together.get((level, at)), together.get((near, at)))
            for ratio in ratios:
                told = next((other for other in (level, *levels) if (other, ratio) in together), level)
                table[name, level, ratio] = error * _share(together.get((told, ratio)), together.get((told, at)))
            table[name, level, also] = between({ratio: table[name, level, ratio] for ratio in ratios}, also)
    return table


def between(errors: Mapping[float, float], ratio: float) -> float:
    """The squared error at a ratio, from those that were measured: between two of them it grows by the same factor for
    the same piece of ratio (few-step DiT in 8 steps, 0.5 to 0.75: 0.077 at 0.6, measured 0.078). Outside them it is
    that of the nearest."""
    below = max((known for known in errors if known <= ratio), default=min(errors))
    above = min((known for known in errors if known >= ratio), default=max(errors))
    low, high = errors[below], errors[above]
    part = (ratio - below) / (above - below) if above > below else 0.0
    return low * (high / low) ** part if low > 0 < high else low + part * (high - low)


def _share(a: float | None, b: float | None) -> float:
    return a / b if a is not None and b else 1.0


def amplified(found: Sequence[float], injected: Sequence[float]) -> list[float]:
    """By how much a squared error that enters in each step is found larger, or smaller, in the end.

    From one merged run beside the whole one. found: squared distances before each step and at the end, one more than
    steps. injected: the squared errors that were measured for its steps, on a scale of their own; 0 where it ran whole.
    Where some steps run whole they tell how distances grow by themselves, and what is more than that after a merged
    step is its own. Else the first merged step tells the scale: there is nothing else before; from then on, what a step
    makes of the distance before it is what is found after it less what it adds. What all of this predicts for the run
    itself is made to be what was found.
    """
    # So little is none: divided by, it would be infinite.
    injected = [error if error > _NOTHING else 0.0 for error in injected]
    first = next((n for n, error in enumerate(injected) if error), None)
    if first is None or found[-1] <= 0:
        return [1.0] * len(injected)
    merged = [n for n, error in enumerate(injected) if error > 0]
    sharpness = min(max(found[first + 1] / injected[first], _LEAST), 1 / _LEAST)
    known = {n: _growth(found[n + 1], found[n]) for n, error in enumerate(injected) if not error and found[n] > 0}
    own = dict.fromkeys(merged, sharpness)
    if _ENOUGH * len(known) >= len(merged):
        growths = [_between(known, n) for n in range(len(injected))]
        for n in merged:
            own[n] = max((found[n + 1] - growths[n] * found[n]) / injected[n], _MOST_SHRUNK * sharpness)
    else:
        growths = [_growth(found[n + 1] - sharpness * error, found[n]) for n, error in enumerate(injected)]
    factors, after = [0.0] * len(injected), 1.0
    for n in reversed(range(len(injected))):
        factors[n] = after * own.get(n, sharpness)
        after *= growths[n]
    predicted = math.fsum(factor * error for factor, error in zip(factors, injected, strict=True))
    return [factor * found[-1] / predicted for factor in factors]


def _growth(after: float, before: float) -> float:
    """Of a squared distance in one step."""
    return min(max(after / before, _MOST_SHRUNK), _MOST_GROWN) if before > 0 else 1.0


def _between(known: Mapping[int, float], n: int) -> float:
    """The growth of a step, from those of its neighbours where it is not known itself."""
    below = max((m for m in known if m <= n), default=None)
    above = min((m for m in known if m >= n), default=None)
    sides = [known[m] for m in (below, above) if m is not None]
    return math.prod(sides) ** (1 / len(sides))


# So many merged steps for a whole one still tell growth from error.
_ENOUGH = 3

# Squared distances grow and shrink by no more than this in a step; beyond, it is the measurement that is off.
_MOST_SHRUNK, _MOST_GROWN, _LEAST, _NOTHING = 0.05, 4.0, 1e-3, 1e-24
