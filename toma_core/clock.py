"""How long the steps of a run took, from the moments at which they began.

Nothing waits for it. A CPU is done with one step when the next begins; a CUDA device is asked to note when it gets
there, and is read when the run is over. Other devices run behind their host unnoticed: there no step is timed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Container
from dataclasses import dataclass, field

import torch

# Steps of one kind that differ by more than this factor had other work beside the model: a cache that skips, a model
# that is moved in and out of memory, a busy machine. They say nothing about merging.
_MOST_SPREAD = 1.25


@dataclass
class StepClock:
    """When each step began, in seconds on a clock of its own."""

    began: dict[int, float] = field(default_factory=dict)
    _noted: dict[int, torch.cuda.Event] = field(default_factory=dict)

    def tick(self, step: int, device: torch.device | None = None) -> None:
        """A model evaluation of this step begins on a device; only the first one of a step counts."""
        if device is None or device.type == "cpu":
            self.began.setdefault(step, time.perf_counter())
        elif device.type == "cuda" and step not in self._noted:
            self._noted[step] = torch.cuda.Event(enable_timing=True)
            self._noted[step].record(torch.cuda.current_stream(device))

    def read(self) -> None:
        """At the end of a run: take over what the device noted. It waits for the last step to have begun."""
        noted, self._noted = self._noted, {}
        if noted:
            start = next(iter(noted.values()))
            list(noted.values())[-1].synchronize()
            self.began = {step: start.elapsed_time(event) / 1e3 for step, event in noted.items()}

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
