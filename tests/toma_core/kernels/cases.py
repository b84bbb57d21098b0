"""Provide tokens, layouts and views for tests of kernels, and run programs without Triton's interpreter."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from toma_core.selection import allocate, spread
from toma_core.windows import Budget, Windows, make_budget, make_windows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Case:
    """A grid of tokens, its windows and its budget. adaptive: a window's budget depends on the spread of its tokens."""

    height: int
    width: int
    size: int
    ratio: float
    channels: int
    dtype: torch.dtype = torch.float32
    batch: int = 1
    adaptive: bool = False

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        name = f"{self.height}x{self.width}-{self.size}-r{self.ratio}-C{self.channels}"
        return f"{name}-B{self.batch}-{dtype}" + ("-adaptive" if self.adaptive else "")

    def tokens(self, seed: int = 0) -> Tensor:
        """Return smooth features with noise, similar to a picture: (B, N, C)."""
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(self.batch, self.channels, self.height, self.width, generator=generator)
        x = torch.nn.functional.avg_pool2d(x, 3, 1, 1) + 0.1 * x
        return x.flatten(2).transpose(1, 2).contiguous().to(DEVICE, self.dtype)

    def normal(self, tokens: int, seed: int) -> Tensor:
        """Return random numbers: (B, tokens, C)."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(self.batch, tokens, self.channels, generator=generator).to(DEVICE, self.dtype)

    def layout(self) -> tuple[Windows, Budget]:
        """Return windows and budget. For an adaptive budget, tokens hardly differ in the left half of the grid."""
        device = torch.device(DEVICE)
        windows = make_windows(self.height, self.width, self.size).to(device)
        budget = make_budget(windows.counts, self.ratio).to(device)
        if not self.adaptive:
            return windows, budget
        flat = torch.arange(windows.tokens, device=device) % self.width < self.width // 2
        picture = torch.where(flat[:, None], 1 + 0.1 * self.tokens(), self.tokens())
        return windows, allocate(budget, spread(windows.split(picture), windows), windows)


def destinations_of(budget: Budget, images: int) -> list[list[int]]:
    return budget.valid.sum(-1).tolist() if budget.adaptive else [list(budget.counts)] * images


def each(*cases: Case, full_size: tuple[Case, ...] = ()) -> Any:
    """Run a test with each case. On a GPU, also run it with cases as large as real models."""
    on_gpu = [pytest.param(case, marks=pytest.mark.gpu) for case in full_size]
    return pytest.mark.parametrize("case", [*cases, *on_gpu], ids=str)


def between(t: Tensor) -> Tensor:
    """Return t as the middle part of longer sequences, whose other parts are NaN."""
    noise = torch.full((t.shape[0], 7, *t.shape[2:]), float("nan"), dtype=t.dtype, device=t.device)
    return torch.cat([noise, t, noise], 1)[:, 7:-7]


def views(t: Tensor) -> list[Tensor]:
    """Return two views equal to t, (B, N, C): the middle part of longer sequences, and one whose tokens are adjacent in
    memory."""
    found = [between(t), t.transpose(1, 2).contiguous().transpose(1, 2)]
    assert not any(view.is_contiguous() for view in found)
    return found


def check_slots(dest_slots: Tensor, windows: Any, budget: Any) -> None:
    """Check that every window has as many destinations as its budget. The destinations must be ascending and distinct,
    and none may be padding. Unused slots must repeat the first destination."""
    for image, kept_here in zip(dest_slots.tolist(), destinations_of(budget, len(dest_slots)), strict=True):
        for row, kept, count in zip(image, kept_here, windows.counts, strict=True):
            assert row[:kept] == sorted(set(row[:kept]))
            assert 0 <= row[0] <= row[kept - 1] < count
            assert all(pick == row[0] for pick in row[kept:])


def printed(source: str, folder: Path, *arguments: str) -> str:
    """Run the program `source` in a separate process without Triton's interpreter, and return its output."""
    pytest.importorskip("triton.backends.nvidia.compiler")
    program = folder / "program.py"
    program.write_text(source)
    environ = {**os.environ, "TRITON_CACHE_DIR": str(folder), "PYTHONPATH": str(Path(__file__).parents[3])}
    environ.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(program), *arguments]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
