"""Copy cached tensors from a device down to main memory, and back up to the device, while the device computes.

    stream     waits for
    up         the last write of the buffer; the computation that used the memory of the previous copy
    compute    `up`, before the copy is read or dropped; `down`, before the memory of a written tensor is free
    down       the computation of the tensor, which comes after every earlier read of the buffer

The host waits for nothing until the buffers are released.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, cached_property
from threading import RLock
from typing import Any

import torch
from torch import Tensor

from .quant4 import Int4Tensor

MAX_STAGED = 2  # the most tensors in `Lane.ahead`, and in `Lane.writing`: keys and values of one block


@dataclass(frozen=True)
class CudaCopier:
    """Copies with CUDA's streams. Tests replace it by simulated streams."""

    pin_memory: Callable[[Tensor], Any]
    unpin: Callable[[Tensor], Any]

    def current(self, device: torch.device) -> torch.cuda.Stream:
        """Return the stream on which the model computes."""
        return torch.cuda.current_stream(device)

    def streams(self, device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        """Return the streams for copies up and down, on which nothing else runs."""
        return _cuda_streams(device)

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


@cache
def _cuda_streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Make the streams once for all runs. PyTorch has only 32 streams: if every run took new ones, a run would soon get
    the stream on which ComfyUI copies weights."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


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
    """One of the equal chunks of a cached tensor in main memory."""

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
        """Split the batch of a complete buffer as `Tensor.chunk` does."""
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
        """Return the tensor on the device. If it was not read ahead, read it now, and drop all copies that were read
        ahead. Raises `torch.OutOfMemoryError`."""
        lane = self.buffer.lane
        with lane.lock:
            if self not in lane.ahead:
                lane.forget()
                lane.ahead[self] = self._read()
            parts, event = lane.ahead.pop(self)
            lane.now.wait_event(event)
            return joined(parts)

    def read_ahead(self) -> bool:
        """Begin to read the tensor; return whether one more tensor may be read ahead after it."""
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
    """The copies between one device and main memory. Callers hold the lock."""

    copier: CudaCopier
    device: torch.device
    up: torch.cuda.Stream
    down: torch.cuda.Stream
    lock: RLock
    ahead: dict[Parked, tuple[list[Tensor], Any]] = field(default_factory=dict)  # (parts on the device, event)
    writing: deque[tuple[Tensor | Int4Tensor, Any]] = field(default_factory=deque)  # (source, event after the copy)

    @property
    def now(self) -> torch.cuda.Stream:
        """The stream on which the model computes."""
        return self.copier.current(self.device)

    def copied(self, stream: torch.cuda.Stream, targets: list[Tensor], sources: list[Tensor], pinned: bool) -> Any:
        """Copy on a stream; return an event after the copies. Device memory is freed only after all copies, even if a
        copy fails."""
        try:
            for target, source in zip(targets, sources, strict=True):
                self.copier.copy(stream, target, source, pinned)
        except BaseException:
            self.now.wait_event(stream.record_event())
            raise
        return stream.record_event()

    def finish(self, most: int) -> None:
        """Free the device's tensors that have been written to main memory, except the last `most`."""
        while len(self.writing) > most:
            self.now.wait_event(self.writing[0][1])
            self.writing.popleft()

    def forget(self, buffer: Buffer | None = None) -> None:
        """Drop the copies that were read ahead from a buffer, or from all buffers if it is None."""
        for parked in [read for read in self.ahead if buffer in (None, read.buffer)]:
            self.now.wait_event(self.ahead[parked][1])
            del self.ahead[parked]


def parts_of(t: Tensor | Int4Tensor) -> list[Tensor]:
    """Return the tensors that hold t's data."""
    return list(t) if isinstance(t, Int4Tensor) else [t]


def joined(parts: list[Tensor]) -> Tensor | Int4Tensor:
    """Reverse `parts_of`."""
    return parts[0] if len(parts) == 1 else Int4Tensor(*parts)
