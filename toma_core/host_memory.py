"""Hold keys and values in main memory if the card has no room for them, and copy them while the device computes.

A refresh writes keys and values to main memory while the next blocks compute. A merged step reads the keys and values
of the next block while the current block computes, and writes the changed keys and values back. A tensor has the same
bits on the card and in main memory. The host waits for nothing until the buffers are released.

    stream     waits for
    up         the last write of the buffer; the computation that used the memory of the previous copy
    compute    `up`, before the copy is read or dropped; `down`, before the memory of a written tensor is free
    down       the computation of the tensor, which comes after every earlier read of the buffer
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache, cached_property
from threading import RLock
from typing import Any

import torch
from torch import Tensor

from .quant4 import Int4Tensor

_PAGE = 4096  # bytes
MAX_STAGED = 2  # the most tensors in `Lane.ahead`, and in `Lane.writing`: keys and values of one block


@dataclass(frozen=True)
class CudaCopier:
    """Copies on CUDA streams. Tests use a copier with simulated streams instead."""

    pin_memory: Callable[[Tensor], Any]
    unpin: Callable[[Tensor], Any]

    def current(self, device: torch.device) -> torch.cuda.Stream:
        return torch.cuda.current_stream(device)

    @staticmethod
    @cache
    def streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        """Return the streams for copies to the card and to main memory; nothing else runs on them. All runs share both:
        PyTorch has only 32 streams. If every run took two streams, a run would soon get the stream on which ComfyUI
        copies weights."""
        return torch.cuda.Stream(device), torch.cuda.Stream(device)

    def copy(self, stream: torch.cuda.Stream, target: Tensor, source: Tensor, pinned: bool) -> None:
        """Copy on a stream. pinned: main memory is pinned, so the host does not wait."""
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=pinned)

    def pin(self, memory: Tensor) -> bool:
        """Pin main memory; return False where it cannot be pinned."""
        try:
            return bool(self.pin_memory(memory))
        except Exception:  # systems report their limits by different exceptions
            return False


@dataclass(eq=False)
class Buffer:
    """Main memory of one cached tensor."""

    lane: Lane
    memory: Tensor  # (bytes,) uint8, in pages that nothing else uses
    tensor: Tensor | Int4Tensor  # its parts lie in `memory` without gaps
    pinned: bool
    written: Any = None  # event of the last write

    def fits(self, source: Tensor | Int4Tensor) -> bool:
        """Return whether a tensor can be written into the buffer."""
        ours, theirs = ([(part.shape, part.dtype) for part in parts_of(t)] for t in (self.tensor, source))
        return ours == theirs and self.lane.device == source.device


@dataclass(frozen=True)
class Parked:
    """One of the equal chunks of a cached tensor that lies in main memory."""

    buffer: Buffer
    number: int = 0
    chunks: int = 1

    @cached_property
    def in_main(self) -> Tensor | Int4Tensor:
        """This chunk, (B, N, C), as a view of main memory."""
        return self.buffer.tensor.chunk(self.chunks)[self.number]

    @property
    def shape(self) -> torch.Size:
        return self.in_main.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.in_main.dtype  # dtype before quantisation

    @property
    def device(self) -> torch.device:
        return self.buffer.lane.device  # the device that the tensor is read to

    @property
    def nbytes(self) -> int:
        return self.buffer.tensor.nbytes  # of all chunks

    def chunk(self, count: int) -> list[Parked]:
        """Split a complete buffer along the batch, as `Tensor.chunk` does."""
        return [Parked(self.buffer, n, count) for n in range(len(self.buffer.tensor.chunk(count)))]

    def copy_(self, source: Tensor | Int4Tensor) -> None:
        """Copy a tensor from the device to main memory; the tensor must not change afterwards."""
        lane, buffer = self.buffer.lane, self.buffer
        with lane.lock:
            lane.forget(buffer)
            lane.finish(MAX_STAGED - 1)
            lane.down.wait_event(lane.now.record_event())
            buffer.written = lane.copied(lane.down, parts_of(self.in_main), parts_of(source), buffer.pinned)
            lane.writing.append((source, buffer.written))

    def _read(self) -> tuple[list[Tensor], Any]:
        lane, sources = self.buffer.lane, parts_of(self.in_main)
        targets = [torch.empty_like(source, device=self.device) for source in sources]
        lane.up.wait_event(lane.now.record_event())
        if self.buffer.written is not None:
            lane.up.wait_event(self.buffer.written)
        return targets, lane.copied(lane.up, targets, sources, self.buffer.pinned)

    def take(self) -> Tensor | Int4Tensor:
        """Return the chunk on the device. If it was not read ahead, drop all chunks that were read ahead, and read it
        now. Raises `torch.OutOfMemoryError`."""
        lane = self.buffer.lane
        with lane.lock:
            if self not in lane.ahead:
                lane.forget()
                lane.ahead[self] = self._read()
            parts, event = lane.ahead.pop(self)
            lane.now.wait_event(event)
            return joined(parts)

    def read_ahead(self) -> bool:
        """Begin to read the chunk; return whether one more chunk may be read ahead."""
        lane = self.buffer.lane
        with lane.lock:
            if self not in lane.ahead and len(lane.ahead) < MAX_STAGED:
                try:
                    lane.ahead[self] = self._read()
                except torch.OutOfMemoryError:
                    return False  # `take` will read the tensor
            return len(lane.ahead) < MAX_STAGED


@dataclass(eq=False)
class Lane:
    """The copies between one device and main memory. Callers of its methods hold the lock."""

    copier: CudaCopier
    device: torch.device
    up: torch.cuda.Stream
    down: torch.cuda.Stream
    lock: RLock
    ahead: dict[Parked, tuple[list[Tensor], Any]] = field(default_factory=dict)  # (parts on the device, event)
    writing: deque[tuple[Tensor | Int4Tensor, Any]] = field(default_factory=deque)  # (source, event after the copy)

    @property
    def now(self) -> torch.cuda.Stream:  # the stream on which the model computes
        return self.copier.current(self.device)

    def copied(self, stream: torch.cuda.Stream, targets: list[Tensor], sources: list[Tensor], pinned: bool) -> Any:
        """Copy on a stream; return an event after all copies. If a copy fails, the model's stream waits for the earlier
        copies, which still use device memory."""
        try:
            for target, source in zip(targets, sources, strict=True):
                self.copier.copy(stream, target, source, pinned)
        except BaseException:
            self.now.wait_event(stream.record_event())
            raise
        return stream.record_event()

    def finish(self, most: int) -> None:
        """Once tensors are written to main memory, drop them from the device, except for the latest `most`."""
        while len(self.writing) > most:
            self.now.wait_event(self.writing[0][1])
            self.writing.popleft()

    def forget(self, buffer: Buffer | None = None) -> None:
        """Drop the copies that were read ahead from a buffer, or from all buffers if `buffer` is None."""
        for parked in [read for read in self.ahead if buffer in (None, read.buffer)]:
            self.now.wait_event(self.ahead[parked][1])
            del self.ahead[parked]


@dataclass(eq=False)
class HostMemory:
    """The main memory for keys and values of one run. Several devices may share the object."""

    copier: CudaCopier
    expected: int  # bytes of all keys and values
    card_room: float  # bytes of keys and values that a card has room for
    main_room: float  # bytes of keys and values that main memory has room for
    beside: int = 0  # bytes on the card for cached updates, and for copies of keys and values from main memory
    may_take: Callable[[int], bool] = lambda _: True  # whether this many bytes of main memory are free now
    peak: tuple[int, int] = (0, 0)  # bytes on the cards and in main memory when their sum was largest
    pinned: bool = True  # False once a buffer could not be pinned
    lock: RLock = field(default_factory=RLock)
    _lanes: dict[torch.device, Lane] = field(default_factory=dict)
    _on_card: dict[int, tuple[torch.device, int]] = field(default_factory=dict)  # device and bytes, by the tensor's id
    _buffers: list[Buffer] = field(default_factory=list)
    _unused: list[Buffer] = field(default_factory=list)  # buffers of dropped tensors
    _order: dict[str, int] = field(default_factory=dict)  # names in the order in which the refresh cached them

    def place(self, t: Tensor | Int4Tensor, instead: object = None) -> Tensor | Int4Tensor | Parked:
        """Place a new cached tensor on the card or in main memory. Alternate between the two, so that tensors of one
        block are copied while other blocks compute. Return t itself if it stays on the card, and a `Parked` otherwise.
        t must not change afterwards. instead: the cached tensor that t replaces."""
        with self.lock:
            card = sum(size for device, size in self._on_card.values() if device == t.device)
            share = min(1.0, self.card_room / max(self.expected, 1))
            turn = card + t.nbytes / 2 <= share * (card + self.in_main + t.nbytes)
            stays = id(instead) in self._on_card or (turn and card + t.nbytes <= self.card_room)
            buffer = None if stays else self._buffer(t)
            if buffer is None:
                self._on_card[id(t)] = t.device, t.nbytes
                return t
            parked = Parked(buffer)
            parked.copy_(t)
            return parked

    def _buffer(self, t: Tensor | Int4Tensor) -> Buffer | None:
        """Return a buffer for a tensor; None if main memory is short."""
        for buffer in self._unused:
            if buffer.fits(t):
                self._unused.remove(buffer)
                return buffer
        if self._is_short(t.nbytes):
            self._free_unused()
            if self._is_short(t.nbytes):
                return None
        try:
            memory = _pages(t.nbytes)
        except RuntimeError:
            return None
        if t.device not in self._lanes:
            self._lanes[t.device] = Lane(self.copier, t.device, *self.copier.streams(t.device), self.lock)
        sizes = [part.nbytes for part in parts_of(t)]
        chunks = zip(memory[: t.nbytes].split(sizes), parts_of(t), strict=True)
        tensor = joined([chunk.view(part.dtype).view(part.shape) for chunk, part in chunks])
        # Do not try to pin again after one failure: each attempt that fails makes ComfyUI wait for the card.
        self.pinned = self.pinned and self.copier.pin(memory)
        self._buffers.append(Buffer(self._lanes[t.device], memory, tensor, self.pinned))
        return self._buffers[-1]

    @property
    def in_main(self) -> int:
        return sum(buffer.tensor.nbytes for buffer in self._buffers)  # bytes

    def _is_short(self, size: int) -> bool:
        return self.in_main + size > self.main_room or not self.may_take(size)

    def note(self, name: str) -> None:
        """Note that a tensor of this name is cached, and update the peak memory."""
        with self.lock:
            self._order.setdefault(name, len(self._order))
            self.peak = max(self.peak, (sum(size for _, size in self._on_card.values()), self.in_main), key=sum)

    def dropped(self, t: object) -> None:
        """Note that a tensor is no longer cached."""
        with self.lock:
            self._on_card.pop(id(t), None)
            if isinstance(t, Parked):
                t.buffer.lane.forget(t.buffer)
                self._unused.append(t.buffer)

    def after(self, name: str = "") -> list[str]:
        """Return the names of tensors that the refresh cached after `name`; all names if `name` is empty."""
        with self.lock:
            return list(self._order)[self._order.get(name, -1) + 1 :]

    def free_staging(self, device: torch.device) -> None:
        """At the end of a model call, free a card's copies of tensors that lie in main memory."""
        with self.lock:
            if lane := self._lanes.get(device):
                lane.forget()
                lane.finish(0)

    def _free_unused(self) -> None:
        for lane in self._lanes.values() if self._unused else ():
            lane.up.synchronize()
            lane.down.synchronize()
        while self._unused:
            self._free(self._unused.pop())

    def _free(self, buffer: Buffer) -> None:
        self._buffers.remove(buffer)
        if buffer.pinned:
            self.copier.unpin(buffer.memory)

    def clear(self) -> None:
        """Wait for all copies and release every buffer, even if one wait or release fails."""
        with self.lock, ExitStack() as last_first:
            for held in (self._lanes, self._on_card, self._unused, self._order):
                last_first.callback(held.clear)
            for buffer in self._buffers:
                last_first.callback(self._free, buffer)
            for lane in self._lanes.values():
                for end in (lane.ahead.clear, lane.writing.clear, lane.down.synchronize, lane.up.synchronize):
                    last_first.callback(end)


def _pages(size: int) -> Tensor:
    """Return main memory of at least `size` bytes, (bytes,) uint8, in pages that nothing else uses. Memory is pinned by
    pages, and a page can be pinned only once. Raises `RuntimeError`."""
    memory = torch.empty(size + 2 * _PAGE, dtype=torch.uint8, device="cpu")
    start = -memory.data_ptr() % _PAGE
    return memory[start : start - -size // _PAGE * _PAGE]


def parts_of(t: Tensor | Int4Tensor) -> list[Tensor]:
    """Return the tensors that hold t's data."""
    return list(t) if isinstance(t, Int4Tensor) else [t]


def joined(parts: list[Tensor]) -> Tensor | Int4Tensor:
    """Reverse `parts_of`."""
    return parts[0] if len(parts) == 1 else Int4Tensor(*parts)
