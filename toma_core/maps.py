"""A plan as something to draw: which destination each token merges into."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .merge import MergePlan


@dataclass(frozen=True)
class MergeMap:
    """The last plan of one token grid, on the CPU, for drawing; of a video, its first frame.

    height, width: the grid. owner: (N,) int64, for each token the grid index of the destination it merges into.
    destinations: (D,) int64. cuts: row and column borders of the windows. frames: how many the video has.
    """

    height: int
    width: int
    owner: Tensor
    destinations: Tensor
    cuts: tuple[tuple[int, ...], tuple[int, ...]]
    frames: int = 1


def draw_map(plan: MergePlan) -> MergeMap:
    """The map of a plan's first image. One device-to-host copy: call it at the end of a run."""
    windows, frames = plan.windows, plan.windows.frames
    count, tokens = len(windows.counts) // frames, windows.tokens // frames
    # The destination a token merges into is the one with the largest share in its unmerged value.
    nearest = plan.unmerge_weights[0, :count].float().argmax(-1).cpu()
    source, picks = windows.source[:count].cpu(), plan.picks[0, :count].cpu()
    owner = source.gather(1, picks.gather(1, nearest)).flatten()[windows.inverse[:tokens].cpu()]
    rows, columns = windows.cuts
    cuts = tuple(row for row in rows if row <= windows.height), columns
    destinations = plan.destinations[0, : plan.kept // frames].cpu()
    return MergeMap(windows.height, windows.width, owner, destinations, cuts, frames)
