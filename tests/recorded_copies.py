"""Provide simulated CUDA streams, which run copies as late as possible and report races.

Computation runs at once. A copy is queued in its stream until other work needs it. For each point of a stream, the
simulation tracks how much work of the other streams is known to be finished. A copy raises an error

- if it may overlap with the computation of its source, or with the earlier use of its target's memory;
- if it may overlap with another copy of the same main memory, unless both only read;
- if a tensor of the device is freed before its copy is known to be finished.

A run without errors therefore has the same result in every order of completion.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

Known = dict[str, int]  # by name of a stream: how much of its work is known to be finished


class RaceError(AssertionError):
    """Two accesses to the same memory may happen in either order."""


@dataclass(eq=False)
class Point:
    """An event: a point in a stream's work, and the work of other streams that is finished at this point."""

    stream: Recorded
    work: int
    known: Known


@dataclass(eq=False)
class Recorded:
    """A stream that queues its work and runs it when other work needs it."""

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
    writes: bool
    start: int
    end: int


@dataclass(eq=False)
class Copies:
    """The streams of one device.

    pins: whether main memory can be pinned.
    deaf: a pair of streams. The first ignores its waits for the second. If a race follows, the waits are needed.
    """

    pins: bool = True
    deaf: tuple[str, str] | None = None
    pinned: set[int] = field(default_factory=set)  # numbers of pinned pages
    made_streams: list[Recorded] = field(default_factory=list)
    count: int = 0  # number of copies so far
    made: int = 0  # number of buffers so far
    staged: int = 0  # bytes on the device that copies occupy now
    peak: int = 0
    _accesses: dict[_Access, int] = field(default_factory=dict)  # accesses to main memory, each with the stream's work
    _errors: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.compute = Recorded(self, "compute")

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
        if not pinned:
            stream.run()

    def _access(self, stream: Recorded, t: Tensor, writes: bool) -> None:
        found = _Access(stream.name, writes, t.data_ptr(), t.data_ptr() + t.nbytes)
        for other, work in self._accesses.items():
            overlaps = other.start < found.end and found.start < other.end and (writes or other.writes)
            if overlaps and other.stream != stream.name and stream.known.get(other.stream, 0) < work:
                raise RaceError(f"{stream.name} runs beside {other.stream}")
        self._accesses[found] = stream.work

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
        """Raise the first error that was noted when memory was freed or pinned."""
        if self._errors:
            raise RaceError(self._errors[0])

    def pin(self, memory: Tensor) -> bool:
        """Pin entire pages, as CUDA does. CUDA refuses a page that is already pinned."""
        self.made += 1
        if self.pins:
            if not self.pinned.isdisjoint(pages_of(memory)):
                self._errors.append("two buffers share a page")
            self.pinned.update(pages_of(memory))
        return self.pins

    def unpin(self, memory: Tensor) -> None:
        assert self.pinned.issuperset(pages_of(memory))
        self.pinned.difference_update(pages_of(memory))
        inside = range(memory.data_ptr(), memory.data_ptr() + memory.nbytes)
        self._accesses = {access: work for access, work in self._accesses.items() if access.start not in inside}

    def unfinished(self) -> int:
        """Return the number of copies that have not run."""
        return sum(len(stream.queue) for stream in self.made_streams)


def pages_of(memory: Tensor) -> range:
    return range(memory.data_ptr() // 4096, -(-(memory.data_ptr() + memory.nbytes) // 4096))
