"""How long the steps of a run took, from the moments at which they began.

Nothing is measured for its own sake: whoever calls `tick` has just read the noise level, and reading it has waited for
all the work before it. So the time between two ticks is the time of a step on any device, and costs nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Container
from dataclasses import dataclass, field

# Steps of one kind that differ by more than this factor had other work beside the model: a cache that skips, a model
# that is moved in and out of memory, a busy machine. They say nothing about merging.
_MOST_SPREAD = 1.25


@dataclass
class StepClock:
    """When each step began, in seconds on a clock of its own."""

    began: dict[int, float] = field(default_factory=dict)

    def tick(self, step: int) -> None:
        """A model evaluation of this step begins; only the first one of a step counts."""
        self.began.setdefault(step, time.perf_counter())

    def seconds(self) -> dict[int, float]:
        """Step -> how long it took. Without the first, in which everything warms up, and the last, whose end is not
        seen."""
        return {
            step: self.began[step + 1] - begin
            for step, begin in list(self.began.items())[1:]
            if step + 1 in self.began and self.began[step + 1] > begin
        }

    def speedup(self, merged: Container[int]) -> float | None:
        """How many times faster the run was than if every step had taken as long as its whole steps.

        None unless at least two steps of each kind were timed, and those of a kind took about as long as each other.
        """
        seconds = self.seconds()
        whole = [value for step, value in seconds.items() if step not in merged]
        short = [value for step, value in seconds.items() if step in merged]
        if min(len(whole), len(short)) < 2 or max(_spread(whole), _spread(short)) > _MOST_SPREAD:
            return None
        typical = statistics.median(whole)
        return typical * len(seconds) / (sum(short) + typical * len(whole))


def _spread(values: list[float]) -> float:
    """The slowest against the fastest, one outlier at each end forgiven where there are many."""
    ordered = sorted(values)
    if len(ordered) >= 6:
        ordered = ordered[1:-1]
    return ordered[-1] / ordered[0]
