"""Store the tensors of the residual and KV caches by name and condition. `coverage` decides whether they may be
used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from threading import RLock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .host_memory import HostMemory, Parked
from .quant4 import Int4Tensor, quantize

Key = tuple[Hashable, Hashable]  # (name, key of the condition)
Keys = tuple[Key, ...]
Stored = Tensor | Int4Tensor | Parked


class _Entry(NamedTuple):
    """One of the equal chunks of a cached tensor. The tensor's memory is freed only when all chunks are dropped."""

    tensor: Stored
    number: int
    chunks: int

    def chunk(self) -> Any:
        return self.tensor.chunk(self.chunks)[self.number]


@dataclass(eq=False)
class Cache:
    """Cached updates, keys and values of one run. Several devices may share the object."""

    bounded: bool = False  # whether `Coverage.enforce_limit` may disable the cache
    reserved: int = 0  # bytes set aside for keys, values and updates of a run with a KV cache
    on_card: int = 0  # part of the reserved bytes that lies on the card
    held: int = 0  # bytes of all cached tensors
    peak_bytes: int = 0  # the most bytes held at a time
    # Whether memory ran out or a bounded cache exceeded its limit. If so, nothing more is cached. The cache is never
    # disabled within a merged step: a block that has read its cached keys must also find its cached values.
    disabled: bool = False
    quantized: bool = False  # keys and values are stored in four bits per element
    host: HostMemory | None = None  # holds the keys and values that do not fit on the card; None if all fit
    quantize: Callable[[Tensor], Tensor | Int4Tensor] = quantize
    dequantize: Callable[[Int4Tensor], Tensor] = Int4Tensor.dequantize
    lock: RLock = field(default_factory=RLock)
    _entries: dict[Key, _Entry] = field(default_factory=dict)
    _chunks: Counter[int] = field(default_factory=Counter)  # number of cached chunks, by the tensor's id

    def __deepcopy__(self, memo: dict[int, object]) -> Cache:
        return self  # as `RunState` does

    @property
    def keys(self) -> Keys:
        return tuple(self._entries)

    def holds(self, keys: Keys) -> bool:
        with self.lock:
            return all(key in self._entries for key in keys)

    def drop(self, keys: Iterable[Key]) -> None:
        with self.lock:
            for entry in (self._entries.pop(key) for key in keys if key in self._entries):
                self._chunks[id(entry.tensor)] -= 1
                if not self._chunks[id(entry.tensor)]:
                    del self._chunks[id(entry.tensor)]
                    self.held -= entry.tensor.nbytes
                    if self.host is not None:
                        self.host.dropped(entry.tensor)

    def put(self, keys: Keys, update: Tensor, kv: bool = False) -> None:
        """Split (B, N, C) along the batch into equal chunks, and store one under each key.

        kv: whether the tensor holds keys or values, which may lie in main memory. Raises `torch.OutOfMemoryError`.
        """
        with self.lock:
            if not self.disabled:
                self._put(keys, self.quantize(update) if kv and self.quantized else update, self.host if kv else None)

    def _put(self, keys: Keys, update: Tensor | Int4Tensor, host: HostMemory | None) -> None:
        chunks: Sequence[Any] = update.chunk(len(keys))
        before = [self._entries.get(key) for key in keys]
        replaced = Counter(id(entry.tensor) for entry in before if entry)
        # If one call evaluated several conditions, their entries are chunks of one tensor. If later calls evaluate
        # these conditions apart, write into the chunks: a new tensor beside the old one would double the memory.
        apart = any(self._chunks[id(entry.tensor)] > replaced[id(entry.tensor)] for entry in before if entry)
        old = None if host is None else _complete([entry for entry in before if entry], len(keys))
        if apart and len(chunks) == len(keys):
            for key, entry, part in zip(keys, before, chunks, strict=True):
                if entry and _alike(mine := entry.chunk(), part):
                    mine.copy_(part)
                else:
                    own = part.clone()
                    self._set(key, _Entry(own if host is None else host.place(own), 0, 1))
        elif isinstance(old, Parked) and old.buffer.fits(update):
            old.copy_(update)
        else:
            stored = update if host is None else host.place(update, instead=old)
            for index, key in enumerate(keys):
                self._set(key, _Entry(stored, index, len(keys)))
        self.peak_bytes = max(self.peak_bytes, self.held)
        if host is not None:
            host.note(str(keys[0][0]))

    def _set(self, key: Key, entry: _Entry) -> None:
        self.drop([key])
        self._entries[key] = entry
        self.held += entry.tensor.nbytes if not self._chunks[id(entry.tensor)] else 0
        self._chunks[id(entry.tensor)] += 1

    def read(self, keys: Keys, like: Tensor) -> Tensor | None:
        """Return the tensors under the keys, concatenated: (B, N, C) with the shape, dtype and device of `like`.

        Return None if any chunk is missing, or differs from the chunk of `like` in shape, dtype or device. Conditions
        that are evaluated in one call use the cache together or not at all.
        """
        with self.lock:
            found = [self._entries[key] for key in keys if key in self._entries]
        parts = [entry.chunk() for entry in found]
        chunks = like.chunk(len(keys))
        if len(parts) != len(chunks) or not all(map(_alike, parts, chunks)):
            return None
        complete = _complete(found, len(keys))
        # If the chunks are one entire tensor, return it without a copy.
        update = torch.cat(list(map(self._opened, parts))) if complete is None else self._opened(complete)
        if any(isinstance(entry.tensor, Parked) for entry in found):
            self.read_ahead(tuple(condition for _, condition in keys), str(keys[0][0]))
        return update

    def _opened(self, t: Stored) -> Tensor:
        t = t.take() if isinstance(t, Parked) else t
        return self.dequantize(t) if isinstance(t, Int4Tensor) else t

    def read_ahead(self, conditions: tuple[Hashable, ...], after: str = "") -> None:
        """Begin to copy to the device those tensors in main memory that a merged call for these conditions needs next.
        after: name of the tensor that the call read last."""
        for name in () if self.host is None else self.host.after(after):
            with self.lock:
                found = [self._entries[key] for c in conditions if (key := (name, c)) in self._entries]
            complete = _complete(found, len(conditions))
            for part in [entry.chunk() for entry in found] if complete is None else [complete]:
                if isinstance(part, Parked) and not part.read_ahead():
                    return

    def free_staging(self, device: torch.device) -> None:
        """At the end of a model call, free a device's copies of tensors that lie in main memory."""
        if self.host is not None:
            self.host.free_staging(device)

    def clear(self) -> None:
        with self.lock:
            self._entries.clear()
            self._chunks.clear()
            self.held = 0
            if self.host is not None:
                self.host.clear()


def _complete(entries: list[_Entry], chunks: int) -> Stored | None:
    """Return the cached tensor if these entries are all of its chunks, in order; None otherwise."""
    together = all(e.tensor is entries[0].tensor and e[1:] == (n, chunks) for n, e in enumerate(entries))
    return entries[0].tensor if together and len(entries) == chunks else None


def _alike(a: Stored, b: Stored) -> bool:
    return (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
