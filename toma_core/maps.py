"""A plan as something to draw: which destination each token merges into."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .merge import MergePlan


@dataclass(frozen=True)
class MergeMap:
    """The last plan of one token grid, on the CPU, for drawing.

    height, width: the grid. owner: (N,) int64, for each token the grid index of the destination it merges into.
    destinations: (D,) int64. cuts: row and column borders of the windows.
    """

    height: int
    width: int
    owner: Tensor
    destinations: Tensor
    cuts: tuple[tuple[int, ...], tuple[int, ...]]


def draw_map(plan: MergePlan) -> MergeMap:
    """The map of a plan's first image. One device-to-host copy: call it at the end of a run."""
    windows = plan.windows
    # The destination a token merges into is the one with the largest share in its unmerged value.
    nearest = plan.unmerge_weights[:1].float().argmax(-1).cpu()
    source, picks = windows.source.cpu(), plan.picks[:1].cpu()
    owner = source.gather(1, picks[0].gather(1, nearest[0])).flatten()[windows.inverse.cpu()]
    return MergeMap(windows.height, windows.width, owner, plan.destinations[0].cpu(), windows.cuts)
