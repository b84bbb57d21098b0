"""Cut token grids into windows and give each window its number of destinations.

Each window lies within one frame, and all frames have the same number of destinations, because models modulate and
position tokens by frame.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

Grid = tuple[int, ...]  # (rows, columns), or (frames, rows, columns) of a video
_Self = TypeVar("_Self", bound="WithTensors")


@dataclass(frozen=True, eq=False)
class WithTensors:
    """A dataclass with tensors as fields."""

    def changed(self: _Self, tensor: Callable[[str, Tensor], Tensor]) -> _Self:
        """Return a copy in which each tensor is replaced by the result of `tensor(name, value)`."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        tensors: dict[str, Any] = {name: tensor(name, t) for name, t in values.items() if isinstance(t, Tensor)}
        return replace(self, **tensors)

    def to(self: _Self, device: torch.device) -> _Self:
        """Return a copy with its tensors on `device`. The host does not wait for the copies."""
        paged = device.type != "cuda" or not torch.cuda.is_available()
        return self.changed(lambda _, t: t.to(device) if paged else t.pin_memory().to(device, non_blocking=True))


@dataclass(frozen=True, eq=False)
class Windows(WithTensors):
    """A partition of the N = frames * height * width tokens (row-major) into W windows of at most S tokens."""

    height: int
    width: int
    counts: tuple[int, ...]  # tokens of each window
    source: Tensor  # (W, S) int64, the token in each slot; padding slots repeat the window's first token
    valid: Tensor | None  # (W, S) bool, False in padding slots; None without padding
    inverse: Tensor  # (N,) int64, each token's slot in the flattened (W * S)
    contiguous: bool  # the tokens of each window lie side by side in memory, and the windows in order
    cuts: tuple[tuple[int, ...], tuple[int, ...]]  # rows and columns at which windows begin and end, over all frames
    frames: int = 1

    @functools.cached_property
    def tiles(self) -> tuple[int, int, int, int] | None:
        """(rows of windows, rows per window, windows per row, columns per window); None if windows differ in size."""
        highs, wides = ([end - start for start, end in itertools.pairwise(cuts)] for cuts in self.cuts)
        if len(set(highs)) > 1 or len(set(wides)) > 1:
            return None
        return len(highs), highs[0], len(wides), wides[0]

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
        slots = x if self.contiguous else x.index_select(1, self.source.flatten())
        return slots.unflatten(1, self.source.shape)

    def join(self, x: Tensor) -> Tensor:
        """Join (B, W, S, C) to (B, N, C), the inverse of `split`; padding slots are dropped."""
        x = x.flatten(1, 2)
        return x if self.contiguous else x.index_select(1, self.inverse)

    def add(self, x: Tensor, update: Tensor) -> Tensor:
        """Return x + join(update), (B, N, C), in one pass if windows have one size. update: (B, W, S, C)."""
        if self.contiguous or self.tiles is None:
            return x + self.join(update)
        tiled = x.unflatten(1, self.tiles).transpose(2, 3)
        return (tiled + update.view(tiled.shape)).transpose(2, 3).flatten(1, 4)


@dataclass(frozen=True, eq=False)
class Budget(WithTensors):
    """The number of destinations in each window: at most K = `slots` per window, D = `total` altogether. An adaptive
    budget has counts for each image, any other the same counts for all. Tensors are None if every slot is used."""

    counts: tuple[int, ...]  # destinations of each window, before an adaptive budget reallocates them
    compact: Tensor | None  # (D,) int64, the slots in use in the flattened (W * K), ascending; adaptive (B, D)
    expand: Tensor | None  # (W * K,) int64, each slot's destination, in unused slots the first; adaptive (B, W * K)
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

    @staticmethod
    def of(counts: tuple[int, ...], used: Tensor, rank: Tensor) -> Budget:
        """Return the budget whose windows use their first `used` slots. used: (W, 1) or (B, W, 1). rank: arange(K)."""
        valid, first = rank < used, used.cumsum(-2) - used
        expand = torch.where(valid, first + rank, first).flatten(-2)
        compact = (~valid).flatten(-2).to(torch.uint8).argsort(dim=-1, stable=True)[..., : sum(counts)]
        return Budget(counts, compact, expand, valid)


Layout = tuple[Windows, Budget]


def _gathered(x: Tensor, index: Tensor | None) -> Tensor:
    """Return the elements of x, (B, N, ...), at indices (n,) or (B, n); x itself without indices."""
    if index is None:
        return x
    if index.ndim == 1:
        return x.index_select(1, index)
    index = index.view(*index.shape, *[1] * (x.ndim - 2))
    return x.gather(1, index.expand(len(x), -1, *x.shape[2:]))


# Make layouts outside of inference mode, because they outlive a run and may be used for training.
@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)
def make_windows(height: int, width: int, size: int, shifted: bool = False, frames: int = 1) -> Windows:
    """Return windows over `frames` grids of `height` x `width` tokens, on the CPU. Raises ValueError.

    Windows are at most `size` x `size`, with cuts spread evenly: 52 rows at size 8 become seven windows of 7 or 8 rows.
    shifted: cuts are offset by half a window.
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
    padding = None if bool(valid.all()) else valid
    contiguous = padding is None and torch.equal(inverse, torch.arange(grid.numel()))
    return Windows(height, width, counts, source, padding, inverse, contiguous, (rows, columns), frames)


def _cuts(length: int, size: int, shifted: bool) -> tuple[int, ...]:
    if shifted and length > size:
        return (0, *range(size // 2 or 1, length, size), length)
    parts = -(-length // size)
    return tuple(round(i * length / parts) for i in range(parts + 1))


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)
def make_budget(counts: tuple[int, ...], ratio: float, frames: int = 1) -> Budget:
    """Share D = N - round(ratio * N) destinations among windows of `counts` tokens, on the CPU. Raises ValueError.

    Each window gets its proportional share, rounded so that the sum is exact (largest remainder). Each window gets at
    least one destination, which can raise the total above D. frames: number of frames; all frames have equal windows
    and totals.
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

    if len(set(rounded)) == 1:
        return Budget(tuple(rounded), None, None, None)
    return Budget.of(tuple(rounded), torch.tensor(rounded)[:, None], torch.arange(max(rounded)))
