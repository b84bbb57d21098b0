"""Decide which keys and values of a run lie in main memory, and hold the buffers for them.

A refresh writes keys and values to main memory while the next blocks compute. A merged step reads the keys and values
of the next block while the current block computes, and writes the propagated ones back. A tensor has the same bits on
the card and in main memory.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from threading import RLock

import torch
from torch import Tensor

from .parked import Buffer, CudaCopier, Lane, Parked, joined, parts_of
from .quant4 import Int4Tensor

_PAGE = 4096  # bytes


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
    _order: dict[str, int] = field(default_factory=dict)  # names in the order of the refresh

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
        # Do not try to pin again after one failure: later attempts would fail too, and each one would make ComfyUI wait
        # for the card.
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
        """Return the names that were cached after `name` in the refresh; all names if `name` is empty."""
        with self.lock:
            return list(self._order)[self._order.get(name, -1) + 1 :]

    def free_staging(self, device: torch.device) -> None:
        """Free a card's copies of tensors that lie in main memory, at the end of a model call."""
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
