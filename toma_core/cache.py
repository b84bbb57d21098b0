"""Detail reuse: whole steps keep what each block or stack adds, its update; merged steps after them begin with it.

Not in the paper. Updates change slowly from step to step, in the fine structure that destinations cannot carry above
all. So at a merged step a token gets as much of the kept update as destinations still show of theirs, and what has
changed at its destinations. It costs one activation per block or stack.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from threading import RLock
from typing import NamedTuple

import torch
from torch import Tensor

from .merge import MergePlan, add_unmerged, kernels_for, pick, unmerge_residual
from .quant4 import Int4Tensor, pack
from .schedule import StepMode, StepPlan

# How much is believed of the change that destinations show, where all of the kept update is still there. They are seen
# among fewer tokens than at the whole step, so part of it is not the step's but the merge's (docs/fidelity.md). Where
# nothing is left of the kept update, all is believed: that is plain merging.
DELTA_WEIGHT = 0.5

# Bytes that a run may hold of videos. A chain of blocks on one of 720p takes 1.5 GB, for two conditions; but whatever
# breaks chains, as ControlNets do, makes one of every block, and 40 of these would end a run that fits without ToMA.
MOST = 4 << 30


# A cached update serves noise levels up to this factor above the one it is of; above it (below it where noise is added,
# as in unsampling) a sampler has gone back to another part of its run.
_SAME_PART = 1.5


class Refresh(NamedTuple):
    """When and under what state something was cached.

    step: sampling step. sigma: the noise level that the model was given. state: what else has to be the same, as which
    ControlNets take part.
    """

    step: int
    sigma: float
    state: Hashable = None


@dataclass(eq=False)
class ResidualCache:
    """The updates of one run, by (block, signature). Several devices may share it.

    A signature says what was evaluated: condition, shape and place. Entries of several sizes and conditions live beside
    each other. `coverage` says when those of each signature were refreshed.

    limited: whether no more than `MOST` bytes beside `reserved` may be held.
    reserved: bytes that were set aside for keys and values.
    most: the most bytes that were held at a time.
    disabled: set when more is held than may be, or memory ran out; nothing is cached afterwards. Never in the middle of
    a merged step: a block would attend to keys of all tokens and values of some.
    frozen: merged steps do not propagate updates, because they are made for trial.
    pack, unpack: four bits a number, and back.
    """

    limited: bool = False
    reserved: int = 0
    most: int = 0
    disabled: bool = False
    frozen: bool = False
    pack: Callable[[Tensor], Tensor | Int4Tensor] = pack
    unpack: Callable[[Int4Tensor], Tensor] = Int4Tensor.unpack
    coverage: dict[Hashable, Refresh] = field(default_factory=dict)
    # The refresh under way, by signature; those of it that nobody was asked for; the step of the last refresh that was
    # not scheduled, since the last that was.
    _announced: dict[Hashable, Refresh] = field(default_factory=dict)
    _absent: set[Hashable] = field(default_factory=set)
    _extra: int | None = None
    # Steps after which an entry is too old.
    _interval: int = 1
    # An update, which of its equal chunks, and how many there are: a chunk alone holds all of its memory as well.
    _kept: dict[tuple[Hashable, Hashable], tuple[Tensor | Int4Tensor, int, int]] = field(default_factory=dict)
    # How many chunks of a tensor are kept, by its id, and the bytes of all these tensors.
    _chunks: Counter[int] = field(default_factory=Counter)
    _held: int = 0
    _lock: RLock = field(default_factory=RLock)

    def settle(
        self, plan: StepPlan, sigma: float, signatures: Mapping[Hashable, Hashable], interval: int, plain: bool
    ) -> StepMode:
        """Return the mode of an evaluation that the schedule refreshes or merges with caches.

        Guidance takes the difference of conditions: all have caches, or none. An evaluation with a signature that was
        not refreshed within the interval is a refresh. plain: merging without caches is what the settings are made for;
        then at most one step between two scheduled refreshes becomes one, and signatures that change at every step are
        merged without caches.

        sigma: noise level that the model is given. signatures: signature -> state, of all conditions that take part.
        interval: steps from one scheduled refresh to the next.
        """
        with self._lock:
            if self.disabled:
                return StepMode.MERGED if plain and plan.mode.merges else StepMode.FULL
            self._interval = interval
            if any(signature in self.coverage for signature in self._announced):
                self._absent.update(s for s in self._announced if s not in self.coverage)
            self._announced = {}
            now = {s: Refresh(plan.step, sigma, state) for s, state in signatures.items()}
            if plan.mode is StepMode.REFRESH:
                self._extra = None
            elif all(s in self._absent or self._covers(s, refresh) for s, refresh in now.items()):
                return StepMode.MERGED_CACHED
            elif plain and self._extra not in (None, plan.step):
                return StepMode.MERGED
            else:
                self._extra = plan.step
            self._announced = now
            return StepMode.REFRESH

    def _covers(self, signature: Hashable, now: Refresh) -> bool:
        then = self.coverage.get(signature)
        if then is None or then.state != now.state or not 0 <= now.step - then.step < self._interval:
            return False
        return now.sigma <= then.sigma * _SAME_PART

    def keep(self, keys: tuple[tuple[Hashable, Hashable], ...], update: Tensor, quantized: bool = False) -> None:
        """Cache the equal chunks of (B, N, C), one under each (block, signature). packs: in four bits a number."""
        with self._lock:
            if self.disabled:
                return
            self._covered({signature for _, signature in keys})
            try:
                self._put(keys, update, quantized)
            except torch.OutOfMemoryError:
                # The run is worth more than its caches.
                self.disable()
            self.limit()

    def _covered(self, signatures: set[Hashable]) -> None:
        """Note what is being refreshed. The first of a step drops what has grown too old: no sooner, as another node
        may skip the step."""
        fresh = {s: self._announced[s] for s in signatures if s in self._announced}
        if all(self.coverage.get(s) == refresh for s, refresh in fresh.items()):
            return
        step = max(refresh.step for refresh in fresh.values())
        self._forget({s for s, then in self.coverage.items() if step - then.step >= self._interval})
        self.coverage.update(fresh)
        self._absent.difference_update(fresh)

    def _forget(self, signatures: set[Hashable]) -> None:
        for key in [key for key in self._kept if key[1] in signatures]:
            self._drop(self._kept.pop(key))
        for signature in signatures:
            self.coverage.pop(signature, None)

    def move_on(self, keys: tuple[tuple[Hashable, Hashable], ...], update: Tensor, quantized: bool = False) -> None:
        """What a merged step has made of what is kept under the keys, in its place, for the next. Raises
        `torch.OutOfMemoryError`."""
        with self._lock:
            if not (self.disabled or self.frozen):
                self._put(keys, update, quantized)

    def _put(self, keys: tuple[tuple[Hashable, Hashable], ...], given: Tensor, quantized: bool) -> None:
        update = self.pack(given) if quantized else given
        parts = update.chunk(len(keys))
        going = Counter(id(self._kept[key][0]) for key in keys if key in self._kept)
        for place, key in enumerate(keys):
            entry = self._kept.get(key)
            # Conditions that were asked about together and now are not: beside what is kept of all of them each part
            # would be held twice.
            if entry and len(parts) == len(keys) and self._chunks[id(entry[0])] > going[id(entry[0])]:
                whole, at, count = entry
                mine = whole.chunk(count)[at]
                if _alike(mine, parts[place]):
                    _write(mine, parts[place])
                    continue
            self._drop(entry)
            self._kept[key] = update, place, len(keys)
            self._held += update.nbytes if not self._chunks[id(update)] else 0
            self._chunks[id(update)] += 1
        self.most = max(self.most, self._held)

    def limit(self) -> None:
        """Keep within the limit: drop what was refreshed longest ago and is not being refreshed; where that is not
        enough and `limited`, give up. Not while a merged step runs."""
        with self._lock:
            limit = MOST + self.reserved
            if self._held <= limit:
                return
            for signature in sorted(self.coverage, key=lambda s: self.coverage[s].step):
                if self._held > limit and signature not in self._announced:
                    self._forget({signature})
            if self.limited and self._held > limit and not self.disabled:
                self.disable()

    def disable(self) -> bool:
        """Drop everything for good. False if nothing was held."""
        with self._lock:
            held, self.disabled = bool(self._kept), True
            self.clear()
            return held

    def _drop(self, entry: tuple[Tensor | Int4Tensor, int, int] | None) -> None:
        if entry is not None:
            self._chunks[id(entry[0])] -= 1
            if not self._chunks[id(entry[0])]:
                del self._chunks[id(entry[0])]
                self._held -= entry[0].nbytes

    def kept(self, keys: tuple[tuple[Hashable, Hashable], ...], like: Tensor) -> Tensor | None:
        """What is kept under the keys, side by side: (B, N, C) as `like` is.

        All or nothing: None if a part is missing, or if shape, dtype or device have changed, so that cond and uncond
        are never told apart by it.
        """
        with self._lock:
            found = [self._kept[key] for key in keys if key in self._kept]
        parts, chunks = [whole.chunk(count)[place] for whole, place, count in found], like.chunk(len(keys))
        if len(parts) != len(chunks) or not all(map(_alike, parts, chunks)):
            return None
        first = found[0][0]
        if all(whole is first and (place, count) == (n, len(keys)) for n, (whole, place, count) in enumerate(found)):
            return self._opened(first)  # the same ones side by side are no copy
        return torch.cat(list(map(self._opened, parts)))

    def _opened(self, t: Tensor | Int4Tensor) -> Tensor:
        return self.unpack(t) if isinstance(t, Int4Tensor) else t

    def clear(self) -> None:
        """Drop everything; the next evaluation refreshes."""
        with self._lock:
            self._kept.clear()
            self._chunks.clear()
            self.coverage.clear()
            self._held, self._extra = 0, None


def _alike(a: Tensor | Int4Tensor, b: Tensor | Int4Tensor) -> bool:
    return (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)


def _write(into: Tensor | Int4Tensor, update: Tensor | Int4Tensor) -> None:
    """In the place of what is there, which is alike."""
    if isinstance(into, Int4Tensor) and isinstance(update, Int4Tensor):
        into.assign(update)
    elif isinstance(into, Tensor) and isinstance(update, Tensor):
        into.copy_(update)


@dataclass(frozen=True, eq=False)
class CachedBlock:
    """One block's part in the details of a run during one evaluation.

    keys: one per equal chunk of the batch. kept: (B, N, C), what the merged block begins with; None if this evaluation
    runs whole, to keep. packs: whether it is kept in four bits a number.
    """

    details: ResidualCache
    keys: tuple[tuple[Hashable, Hashable], ...]
    kept: Tensor | None = None
    quantized: bool = False

    def keep(self, update: Tensor) -> None:
        """Keep a block's update of (B, N, C)."""
        self.details.keep(self.keys, update, self.quantized)

    def propagate(self, fresh: Tensor, plan: MergePlan) -> Tensor:
        """What is kept, moved on as far as its destinations have moved, and kept so for the next step:
        kept + unmerge(fresh - pick(kept)). fresh: (B, D, C), what destinations have now. Returns (B, N, C)."""
        assert self.kept is not None  # noqa: S101 - for mypy: whoever asks has seen it
        moved = unmerge_residual(fresh, pick(self.kept, plan), self.kept, plan)
        if moved.dtype is torch.float16:
            # What passed the limit would be taken off again as infinite at the next step, and leave no number.
            moved = moved.clamp_(-65504, 65504)
        self.details.move_on(self.keys, moved, self.quantized)
        return moved


def unmerge_residual_cached(out: Tensor, reduced: Tensor, x: Tensor, kept: Tensor, plan: MergePlan) -> Tensor:
    """x + still * kept + unmerge(trust * (out - reduced - still * pick(kept))), with trust = 1 - (1 - TRUST) * still.

    out, reduced: (B, D, C); x, kept: (B, N, C). Returns (B, N, C).
    """
    kernels = kernels_for(plan, out, reduced, x)
    if kernels is not None:
        back, destinations = plan.unmerge_weights, plan.destinations
        return kernels.unmerge_residual_cached(
            out, reduced, x, kept, destinations, back, plan.windows, plan.budget, DELTA_WEIGHT
        )
    fresh, old = out - reduced, pick(kept, plan)
    still = _projection_coefficient(fresh, old).to(x.dtype)
    change = torch.addcmul(fresh, still, old, value=-1)
    believed = torch.addcmul(change, still, change, value=DELTA_WEIGHT - 1)  # trust * change
    return add_unmerged(torch.addcmul(x, still, kept), believed, plan)


def _projection_coefficient(fresh: Tensor, old: Tensor) -> Tensor:
    """How much of an image's old update there still is in the fresh one, 0 to 1: what least squares find, (B, 1, 1).

    Of neighbouring steps among twenty nearly all; among four, where noise levels lie far apart, nearly nothing.
    """
    old = old.float()
    common, whole = ((t * old).sum((1, 2), keepdim=True) for t in (fresh, old))
    return (common / whole.clamp_min(torch.finfo(whole.dtype).tiny)).clamp(0, 1)
