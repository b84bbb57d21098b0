"""Cut token grids into windows and give each window its number of destinations.

Each window lies within one frame, and all frames have the same number of destinations, because models modulate and
position tokens by frame. `Windows` and `Budget` depend on the grid and the settings only; index tensors are made once a
run.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

Grid = tuple[int, ...]  # (rows, columns), or (frames, rows, columns) of a video


@dataclass(frozen=True, eq=False)
class Windows:
    """A partition of the N = frames * height * width tokens (row-major) into W windows of at most S tokens."""

    height: int
    width: int
    counts: tuple[int, ...]  # tokens of each window
    source: Tensor  # (W, S) int64, the token in each slot; padding slots repeat the window's first token
    valid: Tensor | None  # (W, S) bool, False in padding slots; None without padding
    inverse: Tensor  # (N,) int64, each token's slot in the flattened (W * S)
    contiguous: bool  # the tokens of each window lie side by side in memory, one window after the other
    # Rows and columns at which windows begin, and the end of the last; rows are counted on from frame to frame.
    cuts: tuple[tuple[int, ...], tuple[int, ...]]
    frames: int = 1

    @functools.cached_property
    def tiles(self) -> tuple[int, int, int, int] | None:
        """(rows of windows, rows per window, windows per row, columns per window); None unless all windows have the
        same size."""
        (rows, high), (columns, wide) = map(_parts, self.cuts)
        return (rows, high, columns, wide) if high and wide else None

    @property
    def tokens(self) -> int:
        return self.frames * self.height * self.width

    @property
    def grid(self) -> Grid:
        return (self.height, self.width) if self.frames == 1 else (self.frames, self.height, self.width)

    @property
    def slots(self) -> int:
        return self.source.shape[1]

    def split(self, x: Tensor) -> Tensor:
        """Split (B, N, C) into (B, W, S, C): a view if the windows are contiguous."""
        shape = (x.shape[0], *self.source.shape, x.shape[2])
        return x.reshape(shape) if self.contiguous else x.index_select(1, self.source.flatten()).view(shape)

    def join(self, x: Tensor) -> Tensor:
        """Join (B, W, S, C) to (B, N, C), the inverse of `split`; padding slots are dropped."""
        x = x.flatten(1, 2)
        return x if self.contiguous else x.index_select(1, self.inverse)

    def add(self, x: Tensor, update: Tensor) -> Tensor:
        """Return x + join(update), (B, N, C), in one pass if windows have one size. x: (B, N, C); update: (B, W, S,
        C)."""
        if self.contiguous or self.tiles is None:
            return x + self.join(update)
        tiled = x.unflatten(1, self.tiles).transpose(2, 3)
        return (tiled + update.view(tiled.shape)).transpose(2, 3).flatten(1, 4)

    def to(self, device: torch.device) -> Windows:
        """Return the windows with their index tensors on `device`."""
        valid = None if self.valid is None else upload(self.valid, device)
        return replace(self, source=upload(self.source, device), valid=valid, inverse=upload(self.inverse, device))


@dataclass(frozen=True, eq=False)
class Budget:
    """The number of destinations in each window: at most K = `slots` per window, D = `total` altogether. A budget is
    the same for all images, or adaptive, with counts for each image. Tensors are None if every slot is in use."""

    counts: tuple[int, ...]  # destinations of each window, before an adaptive budget reallocates them
    compact: Tensor | None  # (D,) int64, the slots in use in the flattened (W * K), ascending; adaptive (B, D)
    expand: Tensor | None  # (W * K,) int64, destinations; unused slots repeat the window's first; adaptive (B, W * K)
    valid: Tensor | None  # (W, K) bool, False in unused slots; adaptive (B, W, K)

    @property
    def adaptive(self) -> bool:
        return self.valid is not None and self.valid.ndim == 3

    @property
    def slots(self) -> int:
        return max(self.counts) if self.valid is None else self.valid.shape[-1]

    @property
    def total(self) -> int:
        return sum(self.counts)

    def pack(self, x: Tensor) -> Tensor:
        """Drop the unused slots: (B, W, K, ...) -> (B, D, ...)."""
        return _gathered(x.flatten(1, 2), self.compact)

    def unpack(self, x: Tensor) -> Tensor:
        """Return (B, D, ...) as (B, W, K, ...), the inverse of `pack`."""
        return _gathered(x, self.expand).view(x.shape[0], len(self.counts), self.slots, *x.shape[2:])

    def to(self, device: torch.device) -> Budget:
        """Return the budget with its index tensors on `device`."""
        return self if self.valid is None else self.changed(lambda _, index: upload(index, device))

    def changed(self, tensor: Callable[[str, Tensor], Tensor]) -> Budget:
        """Return the budget with its index tensors replaced, each by the result of `tensor(name, value)`."""
        tensors: dict[str, Any] = {name: tensor(name, getattr(self, name)) for name in ("compact", "expand", "valid")}
        return replace(self, **tensors)


def _gathered(x: Tensor, index: Tensor | None) -> Tensor:
    """Return x, (B, N, ...), at (n,) or (B, n) indices; x itself without an index."""
    if index is None or index.ndim == 1:
        return x if index is None else x.index_select(1, index)
    index = index.view(*index.shape, *[1] * (x.ndim - 2))
    return x.gather(1, index.expand(len(x), -1, *x.shape[2:]))


def upload(t: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to a device without waiting: the copy is pinned, and a GPU reads it later."""
    paged = device.type != "cuda" or not torch.cuda.is_available()
    return t.to(device) if paged else t.pin_memory().to(device, non_blocking=True)


# Make layouts outside of inference mode, because they outlive a run and may be used for training.
@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)
def make_windows(height: int, width: int, size: int, shifted: bool = False, frames: int = 1) -> Windows:
    """Return windows over `frames` grids of `height` x `width` tokens, on the CPU. Raises ValueError.

    Windows are `size` x `size`, or smaller where a side of the grid is not a multiple of `size`: cuts are spread
    evenly, so 52 rows at size 8 become seven windows of 7 or 8 rows. shifted: cuts are offset by half a window.
    """
    if height < 1 or width < 1 or frames < 1:
        raise ValueError(f"a token grid needs at least one row and one column, got {frames} x {height} x {width}")
    rows = _cuts(height, size, shifted)
    columns = _cuts(width, size, shifted)
    # Frames are stacked along the rows, so cut at the borders of frames too.
    rows = (0, *(frame * height + row for frame in range(frames) for row in rows[1:]))

    grid = torch.arange(frames * height * width).view(frames * height, width)
    bands = [grid[top:bottom] for top, bottom in itertools.pairwise(rows)]
    members = [band[:, left:right].flatten() for band in bands for left, right in itertools.pairwise(columns)]
    counts = tuple(len(m) for m in members)
    slots = max(counts)
    source = torch.stack([torch.cat([m, m[:1].expand(slots - len(m))]) for m in members])
    valid = torch.arange(slots) < torch.tensor(counts)[:, None]
    inverse = torch.empty(grid.numel(), dtype=torch.int64)
    inverse[source[valid]] = valid.flatten().nonzero().squeeze(1)
    full = bool(valid.all())
    contiguous = full and torch.equal(inverse, torch.arange(grid.numel()))
    padding = None if full else valid
    return Windows(height, width, counts, source, padding, inverse, contiguous, (rows, columns), frames)


def _cuts(length: int, size: int, shifted: bool) -> tuple[int, ...]:
    if shifted and length > size:
        return (0, *range(size // 2 or 1, length, size), length)
    parts = -(-length // size)
    return tuple(round(i * length / parts) for i in range(parts + 1))


def _parts(cuts: tuple[int, ...]) -> tuple[int, int]:
    """Return the number of parts between cuts, and their length, 0 if they differ."""
    lengths = {end - start for start, end in itertools.pairwise(cuts)}
    return len(cuts) - 1, lengths.pop() if len(lengths) == 1 else 0


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)
def make_budget(counts: tuple[int, ...], ratio: float, frames: int = 1) -> Budget:
    """Share D = N - round(ratio * N) destinations among windows of `counts` tokens, on the CPU. Raises ValueError.

    Each window gets its proportional share, rounded so that the sum is exact (largest remainder), and at least one
    destination. Only this minimum can raise the total above D, by at most one per window. frames: number of frames,
    which have equal windows and get equal totals.
    """
    if not 0 <= ratio < 1:
        raise ValueError(f"ratio must be in [0, 1), got {ratio}")
    counts = counts[: len(counts) // frames]
    tokens = sum(counts)
    wanted = tokens - round(ratio * tokens)
    shares = [count * wanted / tokens for count in counts]
    rounded = [max(1, int(share)) for share in shares]
    by_remainder = sorted(range(len(counts)), key=lambda w: (rounded[w] - shares[w], w))
    for w in by_remainder[: max(0, wanted - sum(rounded))]:
        rounded[w] += 1
    rounded *= frames

    slots = max(rounded)
    valid = torch.arange(slots) < torch.tensor(rounded)[:, None]
    if bool(valid.all()):
        return Budget(tuple(rounded), None, None, None)
    first = torch.tensor([0, *rounded[:-1]]).cumsum(0)
    expand = torch.where(valid, first[:, None] + torch.arange(slots), first[:, None])
    return Budget(tuple(rounded), valid.flatten().nonzero().squeeze(1), expand.flatten(), valid)
