"""The goals for a GPU, and whether the rows of a run meet them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks import bench
from benchmarks.bench import Row


@dataclass(frozen=True)
class Goal:
    """A goal for a row. at_least: a minimum speed-up; at_most: a maximum of the value that `read` returns."""

    name: str
    section: str
    model: str
    size: str
    variant: str
    at_least: float | None = None
    at_most: float | None = None
    read: Callable[[Row], float | None] = lambda row: row.speedup

    def row(self, rows: Sequence[Row]) -> Row | None:
        """Return the row that the goal refers to."""
        for row in rows:
            same = (row.model, row.variant) == (self.model, self.variant) and row.size.startswith(self.size)
            if same and row.section.startswith(self.section):
                return row
        return None

    def judged(self, rows: Sequence[Row]) -> tuple[str, str, bool]:
        """Return the goal, the measured value, and whether the goal is missed."""
        wanted = f">= {self.at_least:g}x" if self.at_least is not None else f"<= {self.at_most:g}"
        row = self.row(rows)
        value = None if row is None or row.gate else self.read(row)
        if value is None:
            return wanted, "not measured" if row is None or not row.gate else bench.REFUSED, False
        met = value >= self.at_least if self.at_least is not None else value <= (self.at_most or 0.0)
        return wanted, f"{value:.3g}" + ("x" if self.at_least is not None else ""), not met


def _share(*parts: str) -> Callable[[Row], float | None]:
    return lambda row: 100 * sum(row.shares.get(part, 0.0) for part in parts) if row.shares else None


_RUNS = (
    ("SDXL 1024, CFG", "sample, 20 steps, cfg 7", "sdxl", "1024x1024", 1.45),
    ("SDXL 1024, no CFG", "sample, 20 steps, cfg 1", "sdxl", "1024x1024", 1.35),
    ("SDXL 2048, CFG", "sample, 20 steps, cfg 7", "sdxl", "2048x2048", 1.9),
    ("Flux 1024", "sample, 20 steps", "flux", "1024x1024", 1.5),
    ("Flux 2048", "sample, 8 steps", "flux", "2048x2048", 1.75),
)
_EVERY = "ToMA every step"
GOALS = (
    *(Goal(name, section, model, size, _EVERY, at_least=least) for name, section, model, size, least in _RUNS),
    *(
        Goal(f"{name}: {label}, % of a run", section, model, size, _EVERY, at_most=most, read=_share(*parts))
        for name, section, model, size, _ in _RUNS
        for label, parts, most in (("plans", ("plan",), 1.0), ("merge and unmerge", ("merge", "unmerge"), 3.0))
    ),
    Goal("selection and weights of 64x64x640, us", "micro: selection and weights", "64x64x640", "", "Triton, replayed",
         at_most=20.0, read=lambda row: row.p50 * 1e6),
)  # fmt: skip
