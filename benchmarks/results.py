"""The results of a suite: one folder of few small files, written anew whenever a section has something to tell."""

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
    """folder: where the files are. told: conditions. notes: what no row says."""

    folder: Path
    told: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> Results:
        """What a process before this one has written."""
        stored = json.loads((folder / f"{NAME}.json").read_text(encoding="utf-8"))
        return cls(folder, stored["conditions"], [Row(**row) for row in stored["rows"]], stored["notes"])

    def add(self, *rows: Row) -> None:
        """Keep and write them at once."""
        self.rows += rows
        self.save()

    def note(self, text: str) -> None:
        """Keep and write a sentence, and say it."""
        bench.say(text)
        self.notes.append(text)
        self.save()

    def save(self, head: str = "", last: bool = False) -> None:
        """results.json and .md, profile.txt; the last time .csv and .png too. head: what the page begins with."""
        alone = [row for row in self.rows if row.section.startswith("micro")]
        checks = [row for row in self.rows if row.section == KERNELS]
        shown = [row for row in self.rows if row not in alone and row not in checks]
        parts = [head, _checked(checks), micro.table(alone) if alone else "", "\n".join(f"- {n}" for n in self.notes)]
        page = "\n\n".join(part for part in parts if part)
        bench.write(self.folder / NAME, self.told, self.rows, page, shown=shown, notes=self.notes, last=last)
        if profiles := [f"{row.section}, {row.model} {row.size}\n{row.profile}\n" for row in self.rows if row.profile]:
            (self.folder / "profile.txt").write_text("\n".join(profiles), encoding="utf-8")

    def wrong(self) -> list[str]:
        """Red rows, and notes of what failed or was stopped."""
        return [*bench.red(self.rows), *(note for note in self.notes if "FAILED" in note)]


def _checked(rows: Sequence[Row]) -> str:
    """How many checks of kernels are right, and which are not."""
    if not rows:
        return ""
    wrong = [f"- {row.model}, {row.variant}: {row.gate}" for row in rows if row.gate]
    return "\n".join([f"Kernels against fp64: {len(rows) - len(wrong)} of {len(rows)} checks are right.", *wrong])
