"""The residual and KV caches of a run: refreshes store updates of chains, keys and values; merged steps read them.

Not in the paper. Updates change slowly from step to step, above all in the fine structure that destinations cannot
carry. A merged step gives a token the share of its cached update that its destinations still show, and their change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from threading import RLock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .merge import MergePlan, add_unmerged, gather_destinations, unmerge_residual
from .quant4 import Int4Tensor, quantize
from .schedule import StepMode, StepPlan

# Weight of the change at destinations where the cached update still holds: part of that change comes of the merge, not
# of the step (docs/fidelity.md). Where nothing of the cached update holds, the weight is 1: plain merging.
DELTA_WEIGHT = 0.5

# A chain of blocks on a 720p video takes 1.5 GB for two conditions; where ControlNets break chains there may be 40.
MAX_CACHE_BYTES = 4 << 30
# A cached update is used at sigmas up to this factor above its own; above, the sampler has gone back in its run.
_SIGMA_FACTOR = 1.5

Keys = tuple[tuple[Hashable, Hashable], ...]  # (name, signature)


class Refresh(NamedTuple):
    """When and in which state an entry was cached."""

    step: int
    sigma: float  # as given to the model
    state: Hashable = None  # all else that has to be the same, as the ControlNets that take part
    other_steps: tuple[int, ...] = ()  # by other counts


class _Entry(NamedTuple):
    """One of the equal chunks of a cached tensor; a chunk alone holds the memory of all of them."""

    tensor: Tensor | Int4Tensor
    number: int
    chunks: int

    def chunk(self) -> Tensor | Int4Tensor:
        return self.tensor.chunk(self.chunks)[self.number]


@dataclass(eq=False)
class ResidualCache:
    """Cached updates, keys and values of one run, by (name, signature). Several devices may share it.

    A signature names what was evaluated: condition, shape and area. Entries of several sizes and conditions coexist.
    """

    bounded: bool = False  # disable it where dropping old entries does not get below the limit
    reserved: int = 0  # bytes set aside for keys and values
    peak_bytes: int = 0  # the most bytes held at a time
    # Set when the cache exceeds its limit or memory runs out; nothing is cached afterwards. Never set within a merged
    # step: a block would attend to keys of all tokens and values of some.
    disabled: bool = False
    quantize: Callable[[Tensor], Tensor | Int4Tensor] = quantize
    dequantize: Callable[[Int4Tensor], Tensor] = Int4Tensor.dequantize
    coverage: dict[Hashable, Refresh] = field(default_factory=dict)  # the last refresh of each signature
    _now: dict[Hashable, Refresh] = field(default_factory=dict)  # this evaluation, by signature; None: any other
    _refreshing: dict[Hashable, Refresh] = field(default_factory=dict)  # the same if it is a refresh, else empty
    _absent: set[Hashable] = field(default_factory=set)  # not stored in their refresh: another node skips them
    _extra: int | None = None  # step of the last unscheduled refresh since a scheduled one
    _interval: int = 1  # age in steps from which on entries are dropped
    _entries: dict[tuple[Hashable, Hashable], _Entry] = field(default_factory=dict)
    _chunks: Counter[int] = field(default_factory=Counter)  # cached chunks of each tensor, by its id
    _held: int = 0  # bytes of all cached tensors
    _lock: RLock = field(default_factory=RLock)

    def resolve_mode(
        self,
        plan: StepPlan,
        sigma: float,
        other_steps: tuple[int, ...],
        signatures: Mapping[Hashable, Hashable],
        interval: int,
        plain: bool,
    ) -> StepMode:
        """Return the mode of an evaluation that the schedule refreshes or merges with caches.

        Guidance takes the difference of conditions, so all have caches or none. An evaluation with a signature that was
        not refreshed within the interval is a refresh.

        sigma: noise level given to the model. other_steps: by other counts; caches are too old by any.
        signatures: signature -> state, of all conditions that take part. interval: steps from one scheduled refresh to
        the next. plain: the settings are made for merging without caches. Then at most one unscheduled step of an
        interval is a refresh; others that no cache covers are merged without caches.
        """
        with self._lock:
            if self.disabled:
                return StepMode.MERGED if plain and plan.mode.merges else StepMode.FULL
            self._interval = interval
            if any(signature in self.coverage for signature in self._refreshing):
                self._absent.update(s for s in self._refreshing if s is not None and s not in self.coverage)
            self._refreshing = {}
            now = {s: Refresh(plan.step, sigma, state, other_steps) for s, state in signatures.items()}
            self._now = {None: Refresh(plan.step, sigma, None, other_steps), **now}
            if plan.mode is StepMode.REFRESH:
                self._extra = None
            elif all(s in self._absent or self._covers(s, refresh) for s, refresh in now.items()):
                return StepMode.MERGED_CACHED
            elif plain and self._extra not in (None, plan.step):
                return StepMode.MERGED
            else:
                self._extra = plan.step
            self.refresh()
            return StepMode.REFRESH

    def refresh(self) -> None:
        """Make the evaluation in progress a refresh."""
        with self._lock:
            self._refreshing = self._now

    def holds(self, keys: Keys) -> bool:
        """Return whether there is an entry under each key."""
        with self._lock:
            return all(key in self._entries for key in keys)

    def drop(self, keys: Iterable[tuple[Hashable, Hashable]]) -> None:
        """Drop the entries under these keys."""
        with self._lock:
            for entry in (self._entries.pop(key) for key in keys if key in self._entries):
                self._chunks[id(entry.tensor)] -= 1
                if not self._chunks[id(entry.tensor)]:
                    del self._chunks[id(entry.tensor)]
                    self._held -= entry.tensor.nbytes

    def _covers(self, signature: Hashable, now: Refresh) -> bool:
        then = self.coverage.get(signature)
        if then is None or then.state != now.state or not 0 <= now.step - then.step < self._interval:
            return False
        ages = (abs(a - b) for a, b in zip(now.other_steps, then.other_steps, strict=True))
        return max(ages, default=0) < self._interval and now.sigma <= then.sigma * _SIGMA_FACTOR

    def store(self, keys: Keys, update: Tensor, quantized: bool = False) -> None:
        """Cache the equal chunks of (B, N, C) in a refresh, one under each key. quantized: in four bits a number."""
        with self._lock:
            if self.disabled:
                return
            self._note_refresh({signature for _, signature in keys})
            try:
                self._put(keys, update, quantized)
            except torch.OutOfMemoryError:
                self.disable()  # the run matters more than its caches
            self.enforce_limit()

    def _note_refresh(self, signatures: set[Hashable]) -> None:
        """Note refreshed signatures. The first of a step drops entries that are too old; not `resolve_mode`, as another
        node may skip the step."""
        fresh = {s: self._refreshing.get(s, self._refreshing[None]) for s in signatures} if self._refreshing else {}
        if all(self.coverage.get(s) == refresh for s, refresh in fresh.items()):
            return
        self._refreshing = {**self._refreshing, **fresh}
        step = max(refresh.step for refresh in fresh.values())
        self._forget({s for s, then in self.coverage.items() if step - then.step >= self._interval})
        self.coverage.update(fresh)
        self._absent.difference_update(fresh)

    def _forget(self, signatures: set[Hashable]) -> None:
        self.drop([key for key in self._entries if key[1] in signatures])
        for signature in signatures:
            self.coverage.pop(signature, None)

    def update(self, keys: Keys, update: Tensor, quantized: bool = False) -> None:
        """Replace cached updates by those propagated in a merged step. Raises `torch.OutOfMemoryError`."""
        with self._lock:
            if not self.disabled:
                self._put(keys, update, quantized)

    def _put(self, keys: Keys, given: Tensor, quantized: bool) -> None:
        update = self.quantize(given) if quantized else given
        chunks = update.chunk(len(keys))
        replaced = Counter(id(self._entries[key].tensor) for key in keys if key in self._entries)
        for index, key in enumerate(keys):
            entry = self._entries.get(key)
            # Conditions that were evaluated together before and are apart now: write into their shared tensor, as
            # another one beside it would hold their memory twice.
            if entry and len(chunks) == len(keys) and self._chunks[id(entry.tensor)] > replaced[id(entry.tensor)]:
                mine: Any = entry.chunk()
                if _alike(mine, chunks[index]):
                    mine.copy_(chunks[index])
                    continue
            self.drop([key])
            self._entries[key] = _Entry(update, index, len(keys))
            self._held += update.nbytes if not self._chunks[id(update)] else 0
            self._chunks[id(update)] += 1
        self.peak_bytes = max(self.peak_bytes, self._held)

    def enforce_limit(self) -> None:
        """Drop the oldest signatures that are not being refreshed while the limit is exceeded; where that is not enough
        and the cache is bounded, disable it. Must not be called within a merged step."""
        with self._lock:
            limit = MAX_CACHE_BYTES + self.reserved
            if self._held <= limit:
                return
            for signature in sorted(self.coverage, key=lambda s: self.coverage[s].step):
                if self._held > limit and signature not in self._refreshing:
                    self._forget({signature})
            if self.bounded and self._held > limit and not self.disabled:
                self.disable()

    def disable(self) -> bool:
        """Drop everything for good. Return False if nothing was held."""
        with self._lock:
            held, self.disabled = bool(self._entries), True
            self.clear()
            return held

    def read(self, keys: Keys, like: Tensor) -> Tensor | None:
        """Return what is cached under the keys, concatenated: (B, N, C) with the shape, dtype and device of `like`.

        None if any part is missing or differs, so that cond and uncond are treated alike.
        """
        with self._lock:
            found = [self._entries[key] for key in keys if key in self._entries]
        parts, chunks = [entry.chunk() for entry in found], like.chunk(len(keys))
        if len(parts) != len(chunks) or not all(map(_alike, parts, chunks)):
            return None
        first = found[0].tensor
        if all(entry.tensor is first and entry[1:] == (n, len(keys)) for n, entry in enumerate(found)):
            return self._opened(first)  # the very tensor, no copy
        return torch.cat(list(map(self._opened, parts)))

    def _opened(self, t: Tensor | Int4Tensor) -> Tensor:
        return self.dequantize(t) if isinstance(t, Int4Tensor) else t

    def clear(self) -> None:
        """Drop everything; the next evaluation refreshes."""
        with self._lock:
            self._entries.clear()
            self._chunks.clear()
            self.coverage.clear()
            self._held, self._extra = 0, None


def _alike(a: Tensor | Int4Tensor, b: Tensor | Int4Tensor) -> bool:
    return (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)


@dataclass(frozen=True, eq=False)
class CachedBlock:
    """A chain's update, or keys or values of a block, in the cache during one evaluation."""

    cache: ResidualCache
    keys: Keys  # one for each equal chunk of the batch
    update: Tensor | None = None  # (B, N, C), the cached update that the merged block begins with; None in a refresh
    quantized: bool = False  # cached in four bits a number

    def store(self, update: Tensor) -> None:
        """Cache the block's update of (B, N, C)."""
        self.cache.store(self.keys, update, self.quantized)

    def propagate(self, fresh: Tensor, plan: MergePlan) -> Tensor:
        """Return and cache update + unmerge(fresh - update at destinations), (B, N, C).

        fresh: (B, D, C), the new values at destinations.
        """
        assert self.update is not None  # noqa: S101 - for mypy: callers have checked it
        propagated = unmerge_residual(fresh, gather_destinations(self.update, plan), self.update, plan)
        if propagated.dtype is torch.float16:
            # An infinity would be subtracted from itself at the next step.
            propagated = propagated.clamp_(-65504, 65504)
        self.cache.update(self.keys, propagated, self.quantized)
        return propagated


def unmerge_residual_cached(out: Tensor, reduced: Tensor, x: Tensor, cached: Tensor, plan: MergePlan) -> Tensor:
    """Return x + p * cached + unmerge(w * (out - reduced - p * cached at destinations)), (B, N, C).

    p: the projection coefficient; w = 1 - (1 - DELTA_WEIGHT) * p. out, reduced: (B, D, C); x, cached: (B, N, C).
    """
    fresh, old = out - reduced, gather_destinations(cached, plan)
    p = _projection_coefficient(fresh, old).to(x.dtype)
    change = torch.addcmul(fresh, p, old, value=-1)
    weighted = torch.addcmul(change, p, change, value=DELTA_WEIGHT - 1)  # w * change
    return add_unmerged(torch.addcmul(x, p, cached), weighted, plan)


def _projection_coefficient(fresh: Tensor, old: Tensor) -> Tensor:
    """Return the least-squares share of an image's old update in the fresh one, within [0, 1]: (B, 1, 1) fp32.

    Close to 1 between neighbours of twenty steps, close to 0 between those of four, whose noise levels lie far apart.
    """
    old = old.float()
    common, norm = ((t * old).sum((1, 2), keepdim=True) for t in (fresh, old))
    return (common / norm.clamp_min(torch.finfo(norm.dtype).tiny)).clamp(0, 1)
