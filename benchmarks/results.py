"""The results of a suite: a folder of a few small files, which are rewritten after each new row."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import bench, micro
from benchmarks.bench import Row

NAME = "results"
KERNELS = "kernels"


@dataclass
class Results:
    """The rows of a suite and the files that hold them."""

    folder: Path  # where the files lie
    conditions: dict[str, Any]  # conditions of the measurement, see `bench.conditions`
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # sentences that accompany the rows

    @classmethod
    def read(cls, folder: Path) -> Results:
        """Read the results of an earlier process."""
        stored = json.loads((folder / f"{NAME}.json").read_text(encoding="utf-8"))
        return cls(folder, stored["conditions"], [Row(**row) for row in stored["rows"]], stored["notes"])

    def add(self, *rows: Row) -> None:
        """Add rows, and then write the files."""
        self.rows += rows
        self.save()

    def note(self, text: str) -> None:
        """Add a note, write the files, and print the note."""
        bench.say(text)
        self.notes.append(text)
        self.save()

    def save(self) -> None:
        """Write results.json, results.md and profile.txt."""
        alone = [row for row in self.rows if row.section.startswith("micro")]
        checks = [row for row in self.rows if row.section == KERNELS]
        shown = [row for row in self.rows if row not in alone and row not in checks]
        parts = [_checked(checks), micro.table(alone) if alone else "", "\n".join(f"- {n}" for n in self.notes)]
        page = "\n\n".join(part for part in parts if part)
        bench.write(self.folder / NAME, self.conditions, self.rows, page, shown=shown, notes=self.notes)
        if profiles := [f"{row.section}, {row.model} {row.size}\n{row.profile}\n" for row in self.rows if row.profile]:
            (self.folder / "profile.txt").write_text("\n".join(profiles), encoding="utf-8")

    def wrong(self) -> list[str]:
        """Return why rows have no speed-up, and the notes on sections that failed or were stopped."""
        return [*bench.red(self.rows), *(note for note in self.notes if "FAILED" in note)]


def _checked(rows: Sequence[Row]) -> str:
    """Count the kernel checks that passed, and list the checks that failed and the counted launches."""
    if not rows:
        return ""
    wrong = [f"- {row.model}, {row.variant}: {row.gate}" for row in rows if row.gate]
    counts = dict.fromkeys(f"- {row.variant}: {row.note}" for row in rows if " launches" in row.note)
    right = f"Kernels against fp64: {len(rows) - len(wrong)} of {len(rows)} checks are right."
    return "\n".join([right, *wrong, *counts])
