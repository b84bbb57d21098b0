"""Cut any token grid into windows, and say how many destinations each window gets.

A grid is (rows, columns), or for a video (frames, rows, columns). Windows lie inside one frame, and every frame keeps
as many tokens: models tell noise levels and positions by frame.

Nothing here depends on the content of an image: a `Windows` and a `Budget` are functions of the grid and the settings
alone, hold their index tensors on the device once per run, and serve every image of a batch.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from .config import WindowShape

# Rows and columns of tokens; before them frames, where there are several.
Grid = tuple[int, ...]


def has_frames(grid: Grid) -> bool:
    """Whether it is that of a video."""
    return len(grid) > 2


@dataclass(frozen=True, eq=False)
class Windows:
    """A partition of the N = frames * height * width tokens (row-major) into W windows of at most S tokens.

    source: (W, S) int64, the token in each slot; a slot past a window's count repeats the window's first token.
    valid: (W, S) bool, False in those padding slots; None if all windows are full.
    inverse: (N,) int64, each token's slot in the flattened (W * S); every token has exactly one.
    counts: tokens per window. cuts: row and column borders; rows go on from frame to frame.
    tiles: rows of windows, rows of a window, windows in a row, columns of a window; None unless all are alike.
    """

    height: int
    width: int
    counts: tuple[int, ...]
    source: Tensor
    valid: Tensor | None
    inverse: Tensor
    contiguous: bool
    cuts: tuple[tuple[int, ...], tuple[int, ...]]
    frames: int = 1
    tiles: tuple[int, int, int, int] | None = field(init=False)

    def __post_init__(self) -> None:
        (rows, high), (columns, wide) = (_pieces(cuts) for cuts in self.cuts)
        object.__setattr__(self, "tiles", (rows, high, columns, wide) if high and wide else None)

    @property
    def tokens(self) -> int:
        return self.frames * self.height * self.width

    @property
    def grid(self) -> Grid:
        """The grid that is cut."""
        return (self.height, self.width) if self.frames == 1 else (self.frames, self.height, self.width)

    @property
    def slots(self) -> int:
        return self.source.shape[1]

    def split(self, x: Tensor) -> Tensor:
        """(B, N, C) -> (B, W, S, C). A view where the windows are contiguous runs of tokens."""
        shape = (x.shape[0], *self.source.shape, x.shape[2])
        return x.reshape(shape) if self.contiguous else x.index_select(1, self.source.flatten()).view(shape)

    def join(self, x: Tensor) -> Tensor:
        """(B, W, S, C) -> (B, N, C), the inverse of `split`; padding slots are dropped."""
        x = x.flatten(1, 2)
        return x if self.contiguous else x.index_select(1, self.inverse)

    def add(self, x: Tensor, update: Tensor) -> Tensor:
        """x + join(update). x: (B, N, C), update: (B, W, S, C) -> (B, N, C), and where all windows are alike in one
        pass: addition takes its operands in any order of memory, and gives the result that of the first."""
        if self.contiguous or self.tiles is None:
            return x + self.join(update)
        tiled = x.unflatten(1, self.tiles).transpose(2, 3)
        return (tiled + update.view(tiled.shape)).transpose(2, 3).flatten(1, 4)

    def to(self, device: torch.device) -> Windows:
        """The same windows with their index tensors on `device`."""
        source, inverse = upload(self.source, device), upload(self.inverse, device)
        return replace(
            self, source=source, valid=None if self.valid is None else upload(self.valid, device), inverse=inverse
        )


@dataclass(frozen=True, eq=False)
class Budget:
    """How many destinations each window keeps: `counts`, at most K = `slots`, D = `total` in all.

    compact: (D,) int64, the slots in use of the flattened (W * K), in order; None if every slot is in use.
    expand: (W * K,) int64, the destination in each slot; an unused slot repeats its window's first destination.
    valid: (W, K) bool, False in unused slots; None if every slot is in use.
    """

    counts: tuple[int, ...]
    compact: Tensor | None
    expand: Tensor | None
    valid: Tensor | None

    @property
    def slots(self) -> int:
        return max(self.counts)

    @property
    def total(self) -> int:
        return sum(self.counts)

    def pack(self, x: Tensor) -> Tensor:
        """(B, W, K, ...) -> (B, D, ...): drop the unused slots."""
        x = x.flatten(1, 2)
        return x if self.compact is None else x.index_select(1, self.compact)

    def unpack(self, x: Tensor) -> Tensor:
        """(B, D, ...) -> (B, W, K, ...), the inverse of `pack`."""
        if self.expand is not None:
            x = x.index_select(1, self.expand)
        return x.view(x.shape[0], len(self.counts), self.slots, *x.shape[2:])

    def beside(self, others: list[Budget]) -> Budget:
        """The budget of a batch that these images and others of the same layout make up: all share this one."""
        return self

    def repeat(self, times: int) -> Budget:
        """The budget of a batch that holds one image `times` times."""
        return self

    def to(self, device: torch.device) -> Budget:
        """The same budget with its index tensors on `device`."""
        compact, expand, valid = (
            None if t is None else upload(t, device) for t in (self.compact, self.expand, self.valid)
        )
        return replace(self, compact=compact, expand=expand, valid=valid)


def repeated(part: Tensor, times: int) -> Tensor:
    """One image's part of a plan, (1, ...), for so many: (times, ...) in the memory of the one."""
    return part.expand(times, *part.shape[1:])


def upload(t: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device. The host does not wait: a GPU reads page-locked memory when its turn comes."""
    paged = device.type != "cuda" or not torch.cuda.is_available()
    return t.to(device) if paged else t.pin_memory().to(device, non_blocking=True)


def make_windows(
    height: int, width: int, kind: WindowShape, size: int, shifted: bool = False, frames: int = 1
) -> Windows:
    """Windows over `frames` grids of `height` x `width` tokens, every token in exactly one. CPU tensors.

    Tiles are `size` x `size`, or smaller where the side does not divide: cuts are spread evenly, so 52 rows at size 8
    become seven windows of 7 or 8 rows. Stripes are full-width bands holding about size^2 tokens. `shifted` moves the
    cuts by half a window.
    """
    if height < 1 or width < 1 or frames < 1:
        raise ValueError(f"a token grid needs at least one row and one column, got {frames} x {height} x {width}")
    # Layouts are kept between runs: made while sampling in inference mode, they could not serve training later.
    with torch.inference_mode(False):
        return _make_windows(height, width, WindowShape(kind), size, shifted, frames)


@functools.lru_cache(maxsize=64)
def _make_windows(height: int, width: int, kind: WindowShape, size: int, shifted: bool, frames: int) -> Windows:
    if kind is WindowShape.TILE:
        rows, columns = _cuts(height, size, shifted), _cuts(width, size, shifted)
    elif kind is WindowShape.STRIPE:
        rows, columns = _cuts(height, max(1, round(size * size / width)), shifted), (0, width)
    else:
        rows, columns = (0, height), (0, width)
    # Frames lie below each other in memory: what borders them is a cut.
    rows = (0, *(frame * height + row for frame in range(frames) for row in rows[1:]))

    grid = torch.arange(frames * height * width).view(frames * height, width)
    members = [
        grid[top:bottom, left:right].flatten()
        for top, bottom in itertools.pairwise(rows)
        for left, right in itertools.pairwise(columns)
    ]
    counts = tuple(len(m) for m in members)
    slots = max(counts)
    source = torch.stack([torch.cat([m, m[:1].expand(slots - len(m))]) for m in members])
    valid = torch.arange(slots) < torch.tensor(counts)[:, None]
    inverse = torch.empty(grid.numel(), dtype=torch.int64)
    inverse[source[valid]] = valid.flatten().nonzero().squeeze(1)
    full = bool(valid.all())
    contiguous = full and bool((inverse == torch.arange(grid.numel())).all())
    valid_slots = None if full else valid
    return Windows(height, width, counts, source, valid_slots, inverse, contiguous, (rows, columns), frames)


def _cuts(length: int, size: int, shifted: bool) -> tuple[int, ...]:
    if shifted and length > size:
        return (0, *range(size // 2 or 1, length, size), length)
    pieces = -(-length // size)
    return tuple(round(i * length / pieces) for i in range(pieces + 1))


def _pieces(cuts: tuple[int, ...]) -> tuple[int, int]:
    """How many pieces there are between cuts, and their length, 0 if they differ."""
    lengths = {end - start for start, end in itertools.pairwise(cuts)}
    return len(cuts) - 1, lengths.pop() if len(lengths) == 1 else 0


def make_budget(counts: tuple[int, ...], ratio: float, frames: int = 1) -> Budget:
    """Share D = N - round(ratio * N) destinations over windows of `counts` tokens. CPU tensors.

    Each window gets its proportional share, rounded so that the sum is exact (largest remainder), and at least one
    destination: only where that floor binds is D larger than asked, by at most one per window. frames: so many equal
    parts of the windows, in their order, each with a budget of its own.
    """
    if not 0 <= ratio < 1:
        raise ValueError(f"ratio must be in [0, 1), got {ratio}")
    with torch.inference_mode(False):
        return _make_budget(counts, ratio, frames)


@functools.lru_cache(maxsize=64)
def _make_budget(counts: tuple[int, ...], ratio: float, frames: int) -> Budget:
    counts = counts[: len(counts) // frames]
    tokens = sum(counts)
    wanted = tokens - round(ratio * tokens)
    shares = [count * wanted / tokens for count in counts]
    kept = [max(1, int(share)) for share in shares]
    by_remainder = sorted(range(len(counts)), key=lambda w: (kept[w] - shares[w], w))
    for w in by_remainder[: max(0, wanted - sum(kept))]:
        kept[w] += 1
    kept *= frames

    slots = max(kept)
    valid = torch.arange(slots) < torch.tensor(kept)[:, None]
    if bool(valid.all()):
        return Budget(tuple(kept), None, None, None)
    first = torch.tensor([0, *kept[:-1]]).cumsum(0)
    expand = torch.where(valid, first[:, None] + torch.arange(slots), first[:, None])
    return Budget(tuple(kept), valid.flatten().nonzero().squeeze(1), expand.flatten(), valid)
