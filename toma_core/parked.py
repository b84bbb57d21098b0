"""Keep cached tensors in main memory; copy them down from a device, and up to it, while the device computes.

    stream     waits for
    up         the last write of the buffer; the computation that used the memory of the previous copy
    compute    `up`, before the copy is read or dropped; `down`, before the memory of a written tensor is free
    down       the computation of the tensor, which comes after every earlier read of the buffer

The host waits for nothing until the buffers are released.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from threading import RLock
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .quant4 import Int4Tensor

# Maximum number of tensors that are read ahead at a time, and of tensors that are being written: the keys and values of
# one block.
MAX_STAGED = 2
_ALIGNMENT = 64  # bytes


class Stream(Protocol):
    """A queue of work on a device. The method `query` of an event returns whether the stream has reached the event."""

    def record_event(self) -> Any: ...
    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...


class Copier(Protocol):
    """The copying operations of a device."""

    def current(self, device: torch.device) -> Stream:
        """Return the stream on which the model computes."""
        ...

    def streams(self, device: torch.device) -> tuple[Stream, Stream]:
        """Return the streams for copies up and down, on which nothing else runs."""
        ...

    def copy(self, stream: Stream, target: Tensor, source: Tensor, pinned: bool) -> None:
        """Copy on a stream. pinned: main memory is pinned, so the host does not wait."""
        ...

    def pin(self, memory: Tensor) -> bool:
        """Pin main memory; return False where it cannot be pinned. Must not raise."""
        ...

    def unpin(self, memory: Tensor) -> None:
        """Reverse `pin`."""
        ...


@dataclass(frozen=True)
class CudaCopier:
    """Copies with CUDA's streams."""

    pin_memory: Callable[[Tensor], Any]
    unpin_memory: Callable[[Tensor], Any]

    def current(self, device: torch.device) -> Stream:
        return torch.cuda.current_stream(device)

    def streams(self, device: torch.device) -> tuple[Stream, Stream]:
        return _cuda_streams(device)

    def copy(self, stream: Any, target: Tensor, source: Tensor, pinned: bool) -> None:
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=pinned)

    def pin(self, memory: Tensor) -> bool:
        try:
            return bool(self.pin_memory(memory))
        except Exception:  # systems report their limits by different exceptions
            return False

    def unpin(self, memory: Tensor) -> None:
        self.unpin_memory(memory)


@cache
def _cuda_streams(device: torch.device) -> tuple[Stream, Stream]:
    """Make the streams once for all runs. PyTorch has only 32 streams; with new ones for each run, copies would soon be
    on the stream on which ComfyUI copies weights."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


class Layout(NamedTuple):
    """How a tensor lies in main memory: its parts one after the other."""

    quantized: bool
    shapes: tuple[torch.Size, ...]
    dtypes: tuple[torch.dtype, ...]

    @classmethod
    def of(cls, t: Tensor | Int4Tensor) -> Layout:
        """Return the layout of a tensor."""
        parts = _parts(t)
        return cls(isinstance(t, Int4Tensor), tuple(p.shape for p in parts), tuple(p.dtype for p in parts))

    @property
    def sizes(self) -> list[int]:
        """The bytes from the beginning of each part to the beginning of the next."""
        numbers = (shape.numel() * dtype.itemsize for shape, dtype in zip(self.shapes, self.dtypes, strict=True))
        return [-(-n // _ALIGNMENT) * _ALIGNMENT for n in numbers]


@dataclass(eq=False)
class Buffer:
    """Main memory of one cached tensor."""

    lane: Lane
    layout: Layout
    memory: Tensor  # (bytes,) uint8, in pages that nothing else uses
    pinned: bool
    written: Any = None  # event of the last write

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return sum(self.layout.sizes)

    def parts(self) -> list[Tensor]:
        """Return the parts of the tensor, as views of `memory`."""
        _, shapes, dtypes = self.layout
        chunks = zip(self.memory[: self.nbytes].split(self.layout.sizes), shapes, dtypes, strict=True)
        return [chunk[: shape.numel() * dtype.itemsize].view(dtype).view(shape) for chunk, shape, dtype in chunks]


@dataclass(frozen=True)
class Parked:
    """One of the equal chunks of a cached tensor in main memory."""

    buffer: Buffer
    number: int = 0
    chunks: int = 1

    def parts(self) -> list[Tensor]:
        """Return this chunk of the tensor's parts, as views of main memory."""
        return [part.chunk(self.chunks)[self.number] for part in self.buffer.parts()]

    @property
    def shape(self) -> torch.Size:
        """Shape of the chunk, (B, N, C)."""
        images, *others, width = self.buffer.layout.shapes[0]
        most = -(-images // self.chunks)
        count = min(most, images - self.number * most)
        return torch.Size((count, *others, 2 * width if self.buffer.layout.quantized else width))

    @property
    def dtype(self) -> torch.dtype:
        """The tensor's dtype before quantisation."""
        return self.buffer.layout.dtypes[-1]

    @property
    def device(self) -> torch.device:
        """The device that the tensor is read to."""
        return self.buffer.lane.device

    @property
    def nbytes(self) -> int:
        """Bytes of the complete buffer."""
        return self.buffer.nbytes

    def fits(self, source: Tensor | Int4Tensor) -> bool:
        """Return whether a tensor can be written into the complete buffer."""
        return self.buffer.layout == Layout.of(source) and self.device == source.device

    def chunk(self, count: int) -> list[Parked]:
        """Split the batch of a complete buffer as `Tensor.chunk` does."""
        images = self.buffer.layout.shapes[0][0]
        return [Parked(self.buffer, n, count) for n in range(-(-images // -(-images // count)))]

    def copy_(self, source: Tensor | Int4Tensor) -> None:
        """Copy a tensor from the device to main memory; the tensor must not change afterwards."""
        self.buffer.lane.store(self, source)

    def take(self) -> Tensor | Int4Tensor:
        """Return the tensor on the device, whether it was read ahead or is read now. Raises
        `torch.OutOfMemoryError`."""
        return self.buffer.lane.take(self)


class _Read(NamedTuple):
    """The copy on the device of a tensor that is being read."""

    parts: list[Tensor]
    event: Any


@dataclass(eq=False)
class Lane:
    """The copies between one device and main memory."""

    copier: Copier
    device: torch.device
    up: Stream
    down: Stream
    lock: RLock
    ahead: dict[Parked, _Read] = field(default_factory=dict)
    writing: deque[tuple[Tensor | Int4Tensor, Any]] = field(default_factory=deque)  # (source, event after the copy)

    def store(self, parked: Parked, source: Tensor | Int4Tensor) -> None:
        """Copy a tensor from the device to main memory."""
        with self.lock:
            buffer = parked.buffer
            # Copies that were read ahead from this buffer are out of date.
            self.forget(read for read in self.ahead if read.buffer is buffer)
            self._finish(MAX_STAGED - 1)
            self.down.wait_event(self.copier.current(self.device).record_event())
            buffer.written = self._copied(self.down, parked.parts(), _parts(source), buffer.pinned)
            self.writing.append((source, buffer.written))

    def _copied(self, stream: Stream, targets: list[Tensor], sources: list[Tensor], pinned: bool) -> Any:
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
        now = self.copier.current(self.device)
        while len(self.writing) > most:
            now.wait_event(self.writing[0][1])
            self.writing.popleft()

    def _read(self, parked: Parked) -> _Read:
        buffer, sources = parked.buffer, parked.parts()
        targets = [torch.empty_like(source, device=self.device) for source in sources]
        self.up.wait_event(self.copier.current(self.device).record_event())
        if buffer.written is not None:
            self.up.wait_event(buffer.written)
        return _Read(targets, self._copied(self.up, targets, sources, buffer.pinned))

    def take(self, parked: Parked) -> Tensor | Int4Tensor:
        """Return a tensor on the device. If the tensor was not read ahead, all copies read ahead are dropped."""
        with self.lock:
            found = self.ahead.pop(parked, None)
            if found is None:
                self.forget(self.ahead)
                found = self._read(parked)
            self.copier.current(self.device).wait_event(found.event)
            return Int4Tensor(*found.parts) if parked.buffer.layout.quantized else found.parts[0]

    def read_ahead(self, parked: Parked) -> bool:
        """Begin to read a tensor; return whether one more tensor may be read ahead after it."""
        with self.lock:
            if parked not in self.ahead and len(self.ahead) < MAX_STAGED:
                try:
                    self.ahead[parked] = self._read(parked)
                except torch.OutOfMemoryError:
                    return False  # `take` will read the tensor
            return len(self.ahead) < MAX_STAGED

    def forget(self, reads: Iterable[Parked]) -> None:
        """Drop these copies that were read ahead."""
        with self.lock:
            now = self.copier.current(self.device)
            for parked in list(reads):
                now.wait_event(self.ahead[parked].event)
                del self.ahead[parked]

    def free_staging(self) -> None:
        """Free all copies on the device."""
        with self.lock:
            self.forget(self.ahead)
            self._finish(0)

    def close(self) -> None:
        """Wait for all copies and free them, even if a wait fails."""
        with self.lock, ExitStack() as last_first:
            for end in (self.ahead.clear, self.writing.clear, self.down.synchronize, self.up.synchronize):
                last_first.callback(end)


def _parts(t: Tensor | Int4Tensor) -> list[Tensor]:
    return [t.codes, t.low, t.step] if isinstance(t, Int4Tensor) else [t]
