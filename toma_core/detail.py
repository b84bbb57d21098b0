"""Detail reuse: whole steps keep what each block or stack adds, its update; merged steps after them begin with it.

Not in the paper. Updates change slowly from step to step, in the fine structure that destinations cannot carry above
all. So at a merged step a token gets as much of the kept update as destinations still show of theirs, and what has
changed at its destinations. It costs one activation per block or stack.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from threading import RLock

import torch
from torch import Tensor

from .merge import MergePlan, kernels_for, pick, unmerge_onto, unmerge_update
from .packed import Packed, pack
from .schedule import Decision

# How much is believed of the change that destinations show, where all of the kept update is still there. They are seen
# among fewer tokens than at the whole step, so part of it is not the step's but the merge's (docs/fidelity.md). Where
# nothing is left of the kept update, all is believed: that is plain merging.
TRUST = 0.5

# Bytes that a run may hold of videos. A chain of blocks on one of 720p takes 1.5 GB, for two conditions; but whatever
# breaks chains, as ControlNets do, makes one of every block, and 40 of these would end a run that fits without ToMA.
MOST = 4 << 30


@dataclass(eq=False)
class Details:
    """The updates of one run, by block and by what each part of a batch shows: those of the last whole step, and of
    evaluations after it that ran whole because somebody new took part. Several devices may share it.

    limited: whether it may hold no more than `MOST` bytes beside what was reserved for keys and values. most: the most
    bytes that were held at a time. given_up: it became more, or memory ran out; nothing is kept any more, whole steps
    are only whole, and all others are merged plainly, or whole too where blocks are to look at all tokens. Never in the
    middle of a merged step: a block would look at keys of all tokens and values of some. frozen: merged steps move
    nothing on, as they are made for trial alone. pack, unpack: four bits a number, and back.
    """

    limited: bool = False
    reserved: int = 0
    most: int = 0
    given_up: bool = False
    frozen: bool = False
    pack: Callable[[Tensor], Tensor | Packed] = pack
    unpack: Callable[[Packed], Tensor] = Packed.unpack
    # Whole steps: the last one that was announced, and the one since which updates are kept.
    _announced: int = -1
    _step: int = -1
    _renews: bool = False
    _extra: int = -1
    _conditions: frozenset[Hashable] = frozenset()
    # An update, which of its equal chunks, and how many there are: a chunk alone holds all of its memory as well.
    _kept: dict[Hashable, tuple[Tensor | Packed, int, int]] = field(default_factory=dict)
    # How many chunks of a tensor are kept, by its id, and the bytes of all these tensors.
    _chunks: Counter[int] = field(default_factory=Counter)
    _held: int = 0
    _lock: RLock = field(default_factory=RLock)

    def settle(self, decision: Decision, conditions: frozenset[Hashable], again: bool = False) -> Decision:
        """The decision for an evaluation in which these conditions take part, the same for all of them.

        Guidance takes their difference, so that none may have detail where another has not. If one is new since the
        last whole step, this evaluation runs whole too and keeps; but in one step at most between two whole ones, and
        after that merges plainly: conditions that change all the time would else leave nothing merged.
        again: they are asked once more in the evaluation under way. What this is compared with has been merged: so this
        is too, plainly, and the next evaluation runs whole for all.
        """
        with self._lock:
            if self.given_up:
                return replace(decision, ratio=decision.merged_ratio, keeps_detail=False, plain=True)
            if decision.keeps_detail:
                self._renews = True
                if decision.step != self._announced:
                    self._announced, self._extra, self._conditions = decision.step, -1, frozenset()
            elif conditions <= self._conditions:
                return decision
            elif self._extra == decision.step or (self._extra == -1 and not again):
                self._extra, self._renews = decision.step, False
            else:
                if self._extra == -1:
                    self._conditions = frozenset()
                return replace(decision, plain=True)
            self._conditions |= conditions
            return replace(decision, keeps_detail=True)

    def forget_extra(self) -> None:
        """As if no evaluation had run whole for new conditions since the last whole step: the next one keeps again."""
        with self._lock:
            self._conditions, self._extra = frozenset(), -1

    def keep(self, keys: tuple[Hashable, ...], update: Tensor, packs: bool = False) -> None:
        """Keep the equal chunks of (B, N, C), one under each key. The first of a whole step drops those of the last: no
        sooner, as somebody may skip the step. packs: in four bits a number."""
        with self._lock:
            if self.given_up:
                return
            if self._renews and self._step != self._announced:
                self.clear()
                self._step = self._announced
            try:
                self._put(keys, update, packs)
            except torch.OutOfMemoryError:
                # What is kept is worth less than the run.
                self.give_up()
            self.limit()

    def move_on(self, keys: tuple[Hashable, ...], update: Tensor, packs: bool = False) -> None:
        """What a merged step has made of what is kept under the keys, in its place, for the next. Raises
        `torch.OutOfMemoryError`."""
        with self._lock:
            if not (self.given_up or self.frozen):
                self._put(keys, update, packs)

    def _put(self, keys: tuple[Hashable, ...], given: Tensor, packs: bool) -> None:
        update = self.pack(given) if packs else given
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
        """Give up where more is held than may be; not while a merged step runs."""
        with self._lock:
            if self.limited and self.most > MOST + self.reserved and not self.given_up:
                self.give_up()

    def give_up(self) -> bool:
        """Drop everything for good. False if nothing was held."""
        with self._lock:
            held, self.given_up = bool(self._kept), True
            self.clear()
            return held

    def _drop(self, entry: tuple[Tensor | Packed, int, int] | None) -> None:
        if entry is not None:
            self._chunks[id(entry[0])] -= 1
            if not self._chunks[id(entry[0])]:
                del self._chunks[id(entry[0])]
                self._held -= entry[0].nbytes

    def kept(self, keys: tuple[Hashable, ...], like: Tensor) -> Tensor | None:
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

    def _opened(self, t: Tensor | Packed) -> Tensor:
        return self.unpack(t) if isinstance(t, Packed) else t

    def clear(self) -> None:
        """Drop everything."""
        with self._lock:
            self._kept.clear()
            self._chunks.clear()
            self._held = 0


def _alike(a: Tensor | Packed, b: Tensor | Packed) -> bool:
    return (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)


def _write(into: Tensor | Packed, update: Tensor | Packed) -> None:
    """In the place of what is there, which is alike."""
    if isinstance(into, Packed) and isinstance(update, Packed):
        into.assign(update)
    elif isinstance(into, Tensor) and isinstance(update, Tensor):
        into.copy_(update)


@dataclass(frozen=True, eq=False)
class Detail:
    """One block's part in the details of a run during one evaluation.

    keys: one per equal chunk of the batch. kept: (B, N, C), what the merged block begins with; None if this evaluation
    runs whole, to keep. packs: whether it is kept in four bits a number.
    """

    details: Details
    keys: tuple[Hashable, ...]
    kept: Tensor | None = None
    packs: bool = False

    def keep(self, update: Tensor) -> None:
        """Keep a block's update of (B, N, C)."""
        self.details.keep(self.keys, update, self.packs)

    def moved_on(self, fresh: Tensor, plan: MergePlan) -> Tensor:
        """What is kept, moved on as far as its destinations have moved, and kept so for the next step:
        kept + unmerge(fresh - pick(kept)). fresh: (B, D, C), what destinations have now. Returns (B, N, C)."""
        assert self.kept is not None  # noqa: S101 - for mypy: whoever asks has seen it
        moved = unmerge_update(fresh, pick(self.kept, plan), self.kept, plan)
        if moved.dtype is torch.float16:
            # What passed the limit would be taken off again as infinite at the next step, and leave no number.
            moved = moved.clamp_(-65504, 65504)
        self.details.move_on(self.keys, moved, self.packs)
        return moved


def reuse(out: Tensor, reduced: Tensor, x: Tensor, kept: Tensor, plan: MergePlan) -> Tensor:
    """x + still * kept + unmerge(trust * (out - reduced - still * pick(kept))), with trust = 1 - (1 - TRUST) * still.

    out, reduced: (B, D, C); x, kept: (B, N, C). Returns (B, N, C).
    """
    kernels = kernels_for(plan, out, reduced, x)
    if kernels is not None:
        back, destinations = plan.unmerge_weights, plan.destinations
        return kernels.reuse(out, reduced, x, kept, destinations, back, plan.windows, plan.budget, TRUST)
    fresh, old = out - reduced, pick(kept, plan)
    still = _still(fresh, old).to(x.dtype)
    change = torch.addcmul(fresh, still, old, value=-1)
    believed = torch.addcmul(change, still, change, value=TRUST - 1)  # trust * change
    return unmerge_onto(torch.addcmul(x, still, kept), believed, plan)


def _still(fresh: Tensor, old: Tensor) -> Tensor:
    """How much of an image's old update there still is in the fresh one, 0 to 1: what least squares find, (B, 1, 1).

    Of neighbouring steps among twenty nearly all; among four, where noise levels lie far apart, nearly nothing.
    """
    old = old.float()
    common, whole = ((t * old).sum((1, 2), keepdim=True) for t in (fresh, old))
    return (common / whole.clamp_min(torch.finfo(whole.dtype).tiny)).clamp(0, 1)
