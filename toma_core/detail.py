"""Detail reuse: what merging loses of a block's update is kept at whole steps and added at the merged ones after them.

Not in the paper. Updates change slowly from step to step, so the part that destinations cannot carry, update minus
unmerge(merge(update)), is still nearly right a few steps later. It costs one activation per block or stack.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from torch import Tensor

from .merge import MergePlan, merge, unmerge
from .stats import RunStats


@dataclass(eq=False)
class Details:
    """The details of one run, by block and by what each part of a batch shows: those of the last whole step only."""

    stats: RunStats
    _step: int = -1
    _bytes: int = 0
    _kept: dict[Hashable, Tensor] = field(default_factory=dict)

    def keep(self, keys: tuple[Hashable, ...], detail: Tensor, step: int) -> None:
        """Keep the equal chunks of (B, N, C), one under each key; what was kept at another step is dropped."""
        if step != self._step:
            self.clear()
            self._step = step
        for key, part in zip(keys, detail.chunk(len(keys)), strict=True):
            self._bytes += part.nbytes - (self._kept[key].nbytes if key in self._kept else 0)
            self._kept[key] = part
        self.stats.count_detail(self._bytes)

    def add_to(self, y: Tensor, keys: tuple[Hashable, ...]) -> Tensor:
        """Add to the equal chunks of y, in place, what is kept under their keys. (B, N, C), returned.

        All or nothing: a chunk that lacks its own, or whose shape, dtype or device has changed, leaves y as it is, so
        that cond and uncond are never told apart by it.
        """
        chunks = y.chunk(len(keys))
        kept = [self._kept[key] for key in keys if key in self._kept]
        if len(kept) == len(chunks) and all(map(_alike, kept, chunks)):
            for part, chunk in zip(kept, chunks, strict=True):
                chunk.add_(part)
        return y

    def clear(self) -> None:
        """Drop everything."""
        self._kept.clear()
        self._bytes = 0


def _alike(a: Tensor, b: Tensor) -> bool:
    return (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)


@dataclass(frozen=True, eq=False)
class Detail:
    """One block's part in the details of a run during one evaluation.

    keys: one per equal chunk of the batch. keeping: this evaluation runs whole and keeps; else it is merged and adds.
    """

    details: Details
    keys: tuple[Hashable, ...]
    step: int
    keeping: bool

    def keep(self, update: Tensor, plan: MergePlan) -> None:
        """Keep what merging loses of an update of (B, N, C)."""
        self.details.keep(self.keys, update - unmerge(merge(update, plan), plan), self.step)

    def add_to(self, y: Tensor) -> Tensor:
        """y, (B, N, C), with what was kept added in place."""
        return self.details.add_to(y, self.keys)
