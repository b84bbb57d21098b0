"""Keep cached tensors in main memory; copy them down from a device, and up to it, while the device computes.

    stream     waits for
    up         the last write of the buffer; the computation that used the memory of the previous copy
    compute    `up`, before the copy is read or dropped; `down`, before the memory of a written tensor is free
    down       the computation of the tensor, which comes after every earlier read of the buffer

The host waits for nothing until the buffers are released.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from threading import RLock
from typing import Any

import torch
from torch import Tensor

from .quant4 import Int4Tensor

# Maximum number of tensors that are read ahead at a time, and of tensors that are being written: the keys and values of
# one block.
MAX_STAGED = 2


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
    """Make the streams once for all runs. PyTorch has only 32 streams; with new ones for each run, copies would soon be
    on the stream on which ComfyUI copies weights."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


@dataclass(eq=False)
class Buffer:
    """Main memory of one cached tensor."""

    lane: Lane
    memory: Tensor  # (bytes,) uint8, in pages that nothing else uses
    tensor: Tensor | Int4Tensor  # its parts lie in `memory`, one after the other
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

    @property
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
        self.buffer.lane.store(self, source)

    def take(self) -> Tensor | Int4Tensor:
        """Return the tensor on the device, whether it was read ahead or is read now. Raises
        `torch.OutOfMemoryError`."""
        return self.buffer.lane.take(self)


@dataclass(eq=False)
class Lane:
    """The copies between one device and main memory."""

    copier: CudaCopier
    device: torch.device
    up: torch.cuda.Stream
    down: torch.cuda.Stream
    lock: RLock
    ahead: dict[Parked, tuple[list[Tensor], Any]] = field(default_factory=dict)  # (parts on the device, event)
    writing: deque[tuple[Tensor | Int4Tensor, Any]] = field(default_factory=deque)  # (source, event after the copy)

    def store(self, parked: Parked, source: Tensor | Int4Tensor) -> None:
        """Copy a tensor from the device to main memory."""
        with self.lock:
            buffer = parked.buffer
            self.forget(buffer)
            self._finish(MAX_STAGED - 1)
            self.down.wait_event(self.copier.current(self.device).record_event())
            buffer.written = self._copied(self.down, parts_of(parked.in_main), parts_of(source), buffer.pinned)
            self.writing.append((source, buffer.written))

    def _copied(self, stream: torch.cuda.Stream, targets: list[Tensor], sources: list[Tensor], pinned: bool) -> Any:
        """Copy on a stream; return an event after the copies. Device memory is freed only after all copies, even if a
        copy fails."""
        try:
            for target, source in zip(targets, sources, strict=True):
                self.copier.copy(stream, target, source, pinned)
        except BaseException:
            self.copier.current(self.device).wait_event(stream.record_event())
            raise
        return stream.record_event()

    def _finish(self, most: int) -> None:
        """Free the device's tensors that have been written to main memory, except the last `most`."""
        while len(self.writing) > most:
            self.copier.current(self.device).wait_event(self.writing[0][1])
            self.writing.popleft()

    def _read(self, parked: Parked) -> tuple[list[Tensor], Any]:
        buffer, sources = parked.buffer, parts_of(parked.in_main)
        targets = [torch.empty_like(source, device=self.device) for source in sources]
        self.up.wait_event(self.copier.current(self.device).record_event())
        if buffer.written is not None:
            self.up.wait_event(buffer.written)
        return targets, self._copied(self.up, targets, sources, buffer.pinned)

    def take(self, parked: Parked) -> Tensor | Int4Tensor:
        """Return a tensor on the device. If the tensor was not read ahead, all copies read ahead are dropped."""
        with self.lock:
            if parked not in self.ahead:
                self.forget()
                self.ahead[parked] = self._read(parked)
            parts, event = self.ahead.pop(parked)
            self.copier.current(self.device).wait_event(event)
            return parts[0] if len(parts) == 1 else Int4Tensor(*parts)

    def read_ahead(self, parked: Parked) -> bool:
        """Begin to read a tensor; return whether one more tensor may be read ahead after it."""
        with self.lock:
            if parked not in self.ahead and len(self.ahead) < MAX_STAGED:
                try:
                    self.ahead[parked] = self._read(parked)
                except torch.OutOfMemoryError:
                    return False  # `take` will read the tensor
            return len(self.ahead) < MAX_STAGED

    def forget(self, buffer: Buffer | None = None) -> None:
        """Drop the copies that were read ahead from a buffer, or from all buffers if it is None."""
        with self.lock:
            for parked in [read for read in self.ahead if buffer in (None, read.buffer)]:
                self.copier.current(self.device).wait_event(self.ahead[parked][1])
                del self.ahead[parked]

    def free_staging(self) -> None:
        """Free all copies on the device."""
        with self.lock:
            self.forget()
            self._finish(0)

    def close(self) -> None:
        """Wait for all copies and free them, even if a wait fails."""
        with self.lock, ExitStack() as last_first:
            for end in (self.ahead.clear, self.writing.clear, self.down.synchronize, self.up.synchronize):
                last_first.callback(end)


def parts_of(t: Tensor | Int4Tensor) -> list[Tensor]:
    """Return the tensors that hold t's data."""
    return list(t) if isinstance(t, Int4Tensor) else [t]
