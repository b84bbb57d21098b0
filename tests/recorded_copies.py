"""Provide simulated CUDA streams, on which copies run late, early or at random, and races raise errors.

Computation runs at once. A copy is queued in its stream. With the order `late` it waits there until other work needs
it. With a random order it waits for a random time. With `early` it runs at once. For each point of a stream, the
simulation tracks how much work of the other streams is known to be finished. A copy raises an error

- if it may overlap with the computation of its source, or with the earlier use of its target's memory;
- if it may overlap with another copy of the same main memory, unless both only read;
- if a tensor of the device is freed before its copy is known to be finished.

A run without errors therefore has the same result in every order of completion.
"""

from __future__ import annotations

import random
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

Known = dict[str, int]  # by name of a stream: how much of its work is known to be finished


class RaceError(AssertionError):
    """Nothing orders two accesses to the same memory."""


@dataclass(eq=False)
class Point:
    """An event: a point in a stream's work, and the work of other streams that is finished at this point."""

    stream: Recorded
    work: int
    known: Known


@dataclass(eq=False)
class Recorded:
    """A stream that queues its work and runs it late, early or at random."""

    copies: Copies
    name: str
    work: int = 0
    known: Known = field(default_factory=dict)
    queue: deque[tuple[int, Callable[[], None]]] = field(default_factory=deque)

    def record_event(self) -> Point:
        self.work += 1
        return Point(self, self.work, {**self.known, self.name: self.work})

    def wait_event(self, event: Point) -> None:
        if self.copies.deaf != (self.name, event.stream.name):
            self._learn(event.known)
        self.work += 1
        if self.name == "compute":
            event.stream.run(event.work)
        else:
            self.queue.append((self.work, lambda: event.stream.run(event.work)))

    def synchronize(self) -> None:
        self.run()
        self.copies.compute._learn({**self.known, self.name: self.work})

    def _learn(self, known: Known) -> None:
        for name, work in known.items():
            self.known[name] = max(work, self.known.get(name, 0))

    def run(self, until: float = float("inf")) -> None:
        """Run the queued work up to the point `until` of the stream."""
        while self.queue and self.queue[0][0] <= until:
            self.queue.popleft()[1]()


class _Access(NamedTuple):
    stream: str
    work: int
    writes: bool
    start: int
    end: int


@dataclass(eq=False)
class Copies:
    """The streams of one device.

    order: when copies run: "late", "early", or at random with this seed.
    pins: whether main memory can be pinned.
    deaf: a pair of streams. The first ignores its waits for the second. If a race follows, the waits are needed.
    """

    order: str | int = "late"
    pins: bool = True
    deaf: tuple[str, str] | None = None
    pinned: set[int] = field(default_factory=set)  # addresses of pinned memory
    made_streams: list[Recorded] = field(default_factory=list)
    count: int = 0  # number of copies so far
    made: int = 0  # number of buffers so far
    staged: int = 0  # bytes on the device that copies occupy now
    peak: int = 0
    _accesses: list[_Access] = field(default_factory=list)  # accesses to main memory
    _errors: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.compute, self.chance = Recorded(self, "compute"), random.Random(self.order)  # noqa: S311

    def current(self, device: torch.device) -> Recorded:
        return self.compute

    def streams(self, device: torch.device) -> tuple[Recorded, Recorded]:
        up, down = Recorded(self, "up"), Recorded(self, "down")
        self.made_streams += up, down
        return up, down

    def copy(self, stream: Recorded, target: Tensor, source: Tensor, pinned: bool) -> None:
        self.check()
        up, self.count = stream.name == "up", self.count + 1
        stream.work += 1
        if stream.known.get("compute", 0) < self.compute.work:
            raise RaceError(f"{stream.name} runs beside the computation before it")
        mine, theirs = (target, source) if up else (source, target)  # `mine` is on the device, `theirs` in main memory
        self._access(stream, theirs, writes=not up)
        self._hold(stream, mine, stream.work)
        if up:
            mine.view(torch.uint8).fill_(0xFF)  # the target is NaN until the copy has run
        held = weakref.ref(mine)

        def run() -> None:
            device_side = held()
            if device_side is not None:  # if the tensor was freed, `freed` has noted the error
                (device_side.copy_(theirs) if up else theirs.copy_(device_side))

        stream.queue.append((stream.work, run))
        if not pinned or self.order == "early":
            stream.run()
        elif self.order != "late":
            for each in self.made_streams:
                each.run(self.chance.randint(0, each.work))

    def _access(self, stream: Recorded, t: Tensor, writes: bool) -> None:
        found = _Access(stream.name, stream.work, writes, t.data_ptr(), t.data_ptr() + t.nbytes)
        for other in self._accesses:
            overlaps = other.start < found.end and found.start < other.end and (writes or other.writes)
            if overlaps and other.stream != stream.name and stream.known.get(other.stream, 0) < other.work:
                raise RaceError(f"{stream.name} runs beside {other.stream}")
        # A stream's accesses to the same memory follow each other, so only the last of them is stored.
        self._accesses = [a for a in self._accesses if (a.stream, a.writes, a.start, a.end) != (found[0], *found[2:])]
        self._accesses.append(found)

    def _hold(self, stream: Recorded, t: Tensor, work: int) -> None:
        size = t.nbytes
        self.staged += size
        self.peak = max(self.peak, self.staged)

        def freed() -> None:
            self.staged -= size
            if self.compute.known.get(stream.name, 0) < work:
                self._errors.append(f"memory of a copy of {stream.name} is free while it runs")

        weakref.finalize(t, freed)

    def check(self) -> None:
        """Raise the first error that was noted when memory was freed."""
        if self._errors:
            raise RaceError(self._errors[0])

    def pin(self, memory: Tensor) -> bool:
        self.made += 1
        if self.pins:
            self.pinned.add(memory.data_ptr())
        return self.pins

    def unpin(self, memory: Tensor) -> None:
        self.pinned.remove(memory.data_ptr())
        self._accesses = [a for a in self._accesses if not a.start <= memory.data_ptr() < a.end]

    def unfinished(self) -> int:
        """Return the number of copies that have not run."""
        return sum(len(stream.queue) for stream in self.made_streams)


def orders(seeds: int) -> list[Any]:
    """Return the values of `Copies.order` to try: late, early, and random orders with this many seeds."""
    return ["late", "early", *range(seeds)]
