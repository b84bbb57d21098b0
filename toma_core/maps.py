"""Reduce a plan to what is drawn: the destination that each token merges into."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .merge import MergePlan


@dataclass(frozen=True)
class MergeMap:
    """The last plan of one token grid, on the CPU; of a video its first frame."""

    height: int
    width: int
    owner: Tensor  # (N,) int64, the grid index of the destination that each token merges into
    destinations: Tensor  # (D,) int64, grid indices
    cuts: tuple[tuple[int, ...], tuple[int, ...]]  # row and column borders of the windows
    frames: int = 1  # frames of the video


def draw_map(plan: MergePlan) -> MergeMap:
    """Return the map of a plan's first image. Copies from device to host: for the end of a run."""
    windows, frames = plan.windows, plan.windows.frames
    count, tokens = len(windows.counts) // frames, windows.tokens // frames
    # A token merges into the destination with the largest unmerge weight.
    nearest = plan.unmerge_weights[0, :count].float().argmax(-1).cpu()
    source, slots = windows.source[:count].cpu(), plan.dest_slots[0, :count].cpu()
    owner = source.gather(1, slots.gather(1, nearest)).flatten()[windows.inverse[:tokens].cpu()]
    rows, columns = windows.cuts
    cuts = tuple(row for row in rows if row <= windows.height), columns
    destinations = plan.destinations[0, : plan.num_destinations // frames].cpu()
    return MergeMap(windows.height, windows.width, owner, destinations, cuts, frames)
