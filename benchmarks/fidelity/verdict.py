"""Check the measurements against the claims for a preset.

    python -m benchmarks.fidelity.verdict [--setting "preset: balanced"] [FILE.json ...]

Pictures are compared in pairs of the same scene and noise. "Closer" means a smaller mean error over all pictures, by
more than the deviation of that mean over the seed sets, and in every set.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path("benchmarks/results/fidelity")
SAME_RATIO = ("selector: tome", "selector: random", "selector: grid", "rival: ToDo 1/2", "rival: ToDo 1/4")
SAME_COST = ("rival: HyperTile", "rival: EasyCache", "rival: LazyCache", "rival: half", "rival: three quarters")
# Relative difference below which costs and times count as equal.
NEAR = 0.05


@dataclass(frozen=True)
class Claim:
    """One line of the verdict. holds: None if the rows for it are missing."""

    text: str
    holds: bool | None
    numbers: str

    def __str__(self) -> str:
        return f"| {self.text} | {({True: 'yes', False: 'NO', None: '?'})[self.holds]} | {self.numbers} |"


def gain(row: dict[str, Any], rival: dict[str, Any], sets: int) -> tuple[float, float, bool]:
    """Compare the error of a row with a rival's: mean of the paired differences, its deviation over the sets, and
    whether the difference is significant."""
    pairs = [b - a for a, b in zip(row["errors"], rival["errors"], strict=True)]
    size = len(pairs) // sets
    means = [statistics.fmean(pairs[i * size : (i + 1) * size]) for i in range(sets)]
    mean, spread = statistics.fmean(means), statistics.stdev(means) if sets > 1 else 0.0
    return mean, spread, mean > spread and min(means) > 0


def claims(
    stored: dict[str, Any], times: dict[str, float], name: str = "preset: balanced", attributes: float = 0.02
) -> Iterator[Claim]:
    """Return the claims for the setting `name`, from the rows and times of one file."""
    rows, sets = stored["rows"], stored["conditions"]["seeds"]
    if name not in rows or "unmerged" not in rows:
        yield Claim(f"`{name}` was measured", None, "its row, or that of the unmerged pictures, is missing")
        return
    row = rows[name]
    if "rounding" in stored:
        numbers = f"error {row['error']:.4f}, rounding {stored['rounding']:.4f}"
        yield Claim("its error is more than twice rounding's", row["error"] > 2 * stored["rounding"], numbers)
    for rival in SAME_RATIO:
        text = f"closer than `{rival}` at equal ratio"
        yield _closer(text, row, rows[rival], sets) if rival in rows else Claim(text, None, "not measured")
    for rival in (r for r in rows if r.startswith(SAME_COST)):
        for what, at in (("cost", {n: r["cost"] for n, r in rows.items()}), ("time", times)):
            if rival not in at or name not in at:
                continue
            place = "as dear" if abs(at[rival] - at[name]) <= NEAR else "cheaper" if at[rival] < at[name] else "dearer"
            text = f"closer than `{rival}`, which is {place} by {what} ({at[rival]:.2f} against {at[name]:.2f})"
            yield _closer(text, row, rows[rival], sets)
    seams = row["seams"]
    yield Claim("seams within 5 % of the unmerged run", abs(seams - 1) <= 0.05, f"{100 * (seams - 1):+.1f} %")
    lost = rows["unmerged"]["attributes"] - row["attributes"]
    numbers = f"{100 * row['attributes']:.1f} % against {100 * rows['unmerged']['attributes']:.1f} %"
    yield Claim(f"attributes within {100 * attributes:.0f} points", lost <= attributes, numbers)


def _closer(text: str, row: dict[str, Any], rival: dict[str, Any], sets: int) -> Claim:
    mean, spread, holds = gain(row, rival, sets)
    numbers = f"{row['error']:.4f} against {rival['error']:.4f}, nearer by {mean:+.4f} +- {spread:.4f}"
    return Claim(text, holds, numbers)


def main() -> None:
    """Print a table of claims for each file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "files", nargs="*", type=Path, help="result files (default: all in benchmarks/results/fidelity)"
    )
    parser.add_argument("--setting", default="preset: balanced")
    args = parser.parse_args()
    for file in args.files or sorted(f for f in FOLDER.glob("*steps-*.json") if not f.stem.endswith("-time")):
        beside = file.with_name(f"{file.stem}-time.json")
        times = json.loads(beside.read_text())["rows"] if beside.exists() else {}
        print(f"## {file.stem}: `{args.setting}`\n\n| claim | holds | figures |\n|---|---|---|")
        for claim in claims(json.loads(file.read_text()), times, args.setting):
            print(claim)
        print()


if __name__ == "__main__":
    main()
