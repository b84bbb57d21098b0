"""Record from which inputs the cached entries of each condition were made, and decide whether these entries may still
be used."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from .cache import Cache, Keys

# Limit of the cache in bytes, beyond its reserved bytes. Without a limit the cache could fill the card: the update of
# one chain of a 720p video takes 1.5 GB for two conditions, and ControlNets may split one chain into 40 chains.
MAX_CACHE_BYTES = 4 << 30
# If sigma is above this factor times the sigma of the refresh, the sampler must have returned to an earlier step.
_SIGMA_FACTOR = 1.5


class Origin(NamedTuple):
    """The inputs from which the entries of a condition were made."""

    step: int
    falling: float  # noise level of the model; in unsampling its inverse, so that it falls in every run
    state: Hashable  # identifies ControlNets, weights and positions, on which the entries depend too
    other_steps: tuple[int, ...]  # `step` as counted in other ways, see `decision._begin`

    def serves(self, now: Origin, interval: int) -> bool:
        """Return whether an evaluation of origin `now` may use entries of this origin. The entries must be less than
        `interval` steps old."""
        if now.state != self.state or not 0 <= now.step - self.step < interval:
            return False
        ages = [abs(a - b) for a, b in zip(now.other_steps, self.other_steps, strict=True)]
        return max(ages, default=0) < interval and now.falling <= self.falling * _SIGMA_FACTOR


@dataclass(eq=False)
class _Record:
    origin: Origin  # origin of the last refresh
    layout: Hashable = None  # layout of the call that refreshed the entries; None until that call has ended
    latent: Tensor | None = None  # (b, C, ..., H, W), the latent of the last call that wrote the entries


@dataclass(eq=False)
class Coverage:
    """The records of a run's conditions, by key: a condition's content, area and shape. Several devices share the
    object."""

    cache: Cache
    _records: dict[Hashable, _Record] = field(default_factory=dict)
    _now: dict[Hashable, Origin] = field(default_factory=dict)  # in this evaluation; under None, of all other keys
    _refreshing: dict[Hashable, Origin] = field(default_factory=dict)  # `_now` in a refresh, else empty
    _absent: set[Hashable] = field(default_factory=set)  # keys announced for a refresh, but not evaluated in it
    _interval: int = 1  # age in steps at which entries are dropped

    def __deepcopy__(self, memo: dict[int, object]) -> Coverage:
        return self  # as `RunState` does

    def begin(self, states: Mapping[Hashable, Hashable], origin: Origin, interval: int) -> bool:
        """Begin an evaluation of these conditions; return whether the entries of all of them may be used.

        states: `Origin.state` of each condition. origin: all other fields, which are the same for all conditions.
        """
        with self.cache.lock:
            self._interval, records = interval, self._records
            # Do not require entries of conditions that the last refresh did not evaluate: some nodes skip conditions.
            # But if the last refresh recorded no condition, another node skipped the refresh: then require all entries.
            if any(s in records and records[s].origin == each for s, each in self._refreshing.items()):
                self._absent.update(s for s in self._refreshing if s is not None and s not in records)
            self._refreshing = {}
            self._now = {None: origin, **{s: origin._replace(state=state) for s, state in states.items()}}
            awaited = states.keys() - self._absent
            return all(s in records and records[s].origin.serves(self._now[s], interval) for s in awaited)

    def refresh(self) -> None:
        """Make the evaluation in progress a refresh."""
        with self.cache.lock:
            self._refreshing = self._now

    def broken_off(self) -> None:
        """Note that the evaluation in progress ends without having refreshed all its conditions."""
        with self.cache.lock:
            self._refreshing = {}
            self.forget({cond_key for cond_key, record in self._records.items() if record.layout is None})

    def fits(self, cond_keys: Iterable[Hashable], layout: Hashable) -> bool:
        """Return whether calls of this layout refreshed these conditions."""
        records = map(self._records.get, cond_keys)
        return all(record is not None and record.layout == layout for record in records)

    def store(self, keys: Keys, update: Tensor, kv: bool = False) -> None:
        """Cache a tensor, (B, N, C), unless the refresh has been broken off. The arguments are those of `Cache.put`."""
        with self.cache.lock:
            if self.cache.disabled or not self._refreshing:
                return
            self._note({cond_key for _, cond_key in keys})
            try:
                self.cache.put(keys, update, kv)
            except torch.OutOfMemoryError:
                self.disable()  # the run can finish without its caches
            self.enforce_limit()

    def _note(self, cond_keys: set[Hashable]) -> None:
        """Record that these conditions are being refreshed, and drop records that are too old. `begin` drops no old
        records, because another node may skip the step that it begins."""
        fresh = {s: self._refreshing.get(s, self._refreshing[None]) for s in cond_keys}
        if all(s in self._records and self._records[s].origin == origin for s, origin in fresh.items()):
            return
        self._refreshing = {**self._refreshing, **fresh}
        step = max(origin.step for origin in fresh.values())
        self.forget({s for s, record in self._records.items() if step - record.origin.step >= self._interval})
        self._records.update({s: _Record(origin) for s, origin in fresh.items()})
        self._absent.difference_update(fresh)

    def ended(self, cond_keys: tuple[Hashable, ...], latent: Tensor, layout: Hashable = None) -> None:
        """Note that a call has written the entries of these conditions. latent: (B, C, ..., H, W), the latent of the
        call. layout: the layout of the call; None if the call is merged."""
        with self.cache.lock:
            if layout is not None:
                if not self._refreshing:
                    return  # the refresh has been broken off
                # Areas with too few tokens have stored nothing in the refresh, but `fits` expects a record of them.
                self._note(set(cond_keys))
            for cond_key, part in zip(cond_keys, latent.chunk(len(cond_keys)), strict=True):
                record = self._records.get(cond_key)
                if record is not None:
                    record.layout, record.latent = layout or record.layout, part

    def latent_of(self, cond_keys: tuple[Hashable, ...]) -> Tensor | None:
        """Return the latents of the calls that wrote these conditions' entries, (B, C, ..., H, W); None if one is
        unknown."""
        latents = [record.latent for s in cond_keys if (record := self._records.get(s)) and record.latent is not None]
        if len(latents) < len(cond_keys) or len({(each.shape, each.device) for each in latents}) > 1:
            return None
        return torch.cat(latents)

    def enforce_limit(self) -> None:
        """Forget the oldest conditions that are not being refreshed, until the cache is within its limit. If a bounded
        cache still exceeds the limit, disable it. Must not be called within a merged step."""
        with self.cache.lock:
            limit = MAX_CACHE_BYTES + self.cache.reserved
            for cond_key in sorted(self._records, key=lambda s: self._records[s].origin.step):
                if self.cache.held > limit and cond_key not in self._refreshing:
                    self.forget({cond_key})
            if self.cache.bounded and self.cache.held > limit:
                self.disable()

    def forget(self, cond_keys: set[Hashable]) -> None:
        """Drop records and entries of these conditions."""
        with self.cache.lock:
            self.cache.drop([key for key in self.cache.keys if key[1] in cond_keys])
            for cond_key in cond_keys:
                self._records.pop(cond_key, None)

    def disable(self) -> bool:
        """Drop all records and entries, and store nothing afterwards. Return whether there was any entry."""
        with self.cache.lock:
            held = bool(self.cache.keys)
            self.cache.disabled = True
            self.clear()
            return held

    def clear(self) -> None:
        """Drop all records and entries, and break off a refresh in progress. The next evaluation is then a refresh."""
        with self.cache.lock:
            self._records.clear()
            self._refreshing = {}
            self.cache.clear()
