"""Write the measured results into docs/fidelity.md and results/fidelity/*.md: `python -m benchmarks.fidelity.page`.

The pages' tables name the settings. This command fills in the numbers and sorts the rows. It also draws the plots, and
the sheets of pictures if this machine has the pictures.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from itertools import takewhile
from pathlib import Path
from typing import Any

from PIL import Image

RESULTS = Path("benchmarks/results/fidelity")
PAGE, TABLES, GAINED = Path("docs/fidelity.md"), RESULTS / "tables.md", RESULTS / "calibrated.md"
IMAGES = PAGE.parent / "images"
CALIBRATIONS, SAMPLER_ROWS = "calibrated.json", "samplers.json"
# Model in the head of a table -> start and end of the name of the table's result file. For example, the results of the
# table "| DiT, 8 steps | error | ..." are in dit-8steps-128px-22x3.json.
MODELS = {
    "DiT": ("dit", "128px-22x3"),
    "Few-step DiT": ("few", "64px-22x3"),
    "Deep UNet": ("deep", "128px-8x3"),
    "Wan": ("wan", "report"),
}
HEAD = re.compile(rf"\| ({'|'.join(MODELS)}), (\d+) steps \| error \|")
# Head of a table of advice: "| DiT | setting | error | ...". A row, "| 4 steps | balanced | ...", has a number of steps
# and the end of a setting's name in the results. Columns that are not in FORMATS stay unchanged.
ANSWERS = re.compile(rf"\| ({'|'.join(MODELS)}) \| setting \| error \|")
# Head of the table of calibrations: "| Deep UNet | `balanced` | calibrated | ...". Its rows begin "| 4 steps | ...".
GAINS = re.compile(r"\| Deep UNet \| `(\w+)` \| calibrated \|")
# Head of the table of samplers: "| sampler | few-step DiT, 4 steps | ...". Its rows begin "| `er_sde` | ...".
SAMPLERS = re.compile(r"\| sampler \| .*, \d+ steps \|")
# Column of the table of samplers -> name of the column's run in `samplers.RUNS`.
SAMPLED = {
    "few-step DiT, 4 steps": "few4",
    "few-step DiT, 8 steps": "few8",
    "2 pictures, 8 steps": "few8_all",
    "Wan, 8 steps": "wan8",
    "DiT, 20 steps": "dit20",
}
PLOTS = {"fidelity.png": "dit-20steps-128px-22x3", "fidelity-few.png": "few-4steps-64px-22x3"}
# File of a sheet of pictures -> (name of the result file, {setting: title of the setting's row}). In a title {cost}
# stands for the setting's cost in percent.
SHEETS: dict[str, tuple[str, dict[str, str]]] = {
    "fidelity-pictures.jpg": (
        "dit-20steps-128px-22x3",
        {
            "unmerged": "without ToMA",
            "preset: balanced": "balanced, {cost} of the work: every fourth step in full",
            "preset: quality": "quality, {cost}: every second step in full",
            "every step: 0.5": "every step merged and no detail reused, {cost}",
            "rival: half the steps": "half the steps instead, {cost}",
        },
    ),
    "fidelity-pictures-unet.jpg": (
        "deep-4steps-128px-8x3",
        {
            "unmerged": "4 steps without ToMA",
            "preset: balanced": "balanced, {cost} of the work: the last three stacks not merged",
            "preset: balanced at 0.75": "balanced at ratio 0.75, {cost}",
            "every step: 0.5": "every stack merged at ratio 0.5, {cost}",
            "rival: three quarters of the steps": "three steps instead, {cost}",
            "rival: half the steps": "two steps instead, {cost}",
        },
    ),
}
FORMATS = {
    "error": "{error:.3f} ± {spread:.3f}",
    "SSIM": "{ssim:.2f}",
    "detail": "{detail:.2f}",
    "seams": "{seams:.2f}",
    "flicker": "{flicker:.2f}",
    "Fréchet": "{frechet:.0f}",
    "attributes": "{attributes:.3f}",
    "work left": "{cost:.2f}",
}


def results_of(head: str) -> str | None:
    """Return the name of the result file for a table with this head, or None if the head does not match `HEAD`."""
    found = HEAD.match(head)
    if found is None:
        return None
    kind, pictures = MODELS[found[1]]
    return f"{kind}-{found[2]}steps-{pictures}"


def renewed(text: str, folder: Path = RESULTS) -> str:
    """Return the page with its tables filled from the results, and with the rows of settings ordered by error.

    Raises FileNotFoundError for a table without results, KeyError for a row or a column that the results lack.
    """
    lines = text.split("\n")
    for start, head in enumerate(lines):
        end = start + len(list(takewhile(lambda line: line.startswith("|"), lines[start:])))
        body = lines[start + 2 : end]
        shown = [_cells(line)[0] for line in body]
        if found := ANSWERS.match(head):
            columns = _cells(head)[2:]
            body = [_answer(*MODELS[found[1]], line, columns, folder) for line in body]
        elif SAMPLERS.match(head):
            sampled: dict[str, dict[str, Any]] = json.loads((folder / SAMPLER_ROWS).read_text())
            runs = [sampled[SAMPLED[column]] for column in _cells(head)[1:]]
            body = [_sampler(each, runs) for each in shown]
        elif found := GAINS.match(head):
            gained: dict[str, dict[str, Any]] = json.loads((folder / CALIBRATIONS).read_text())
            body = [_gain(steps, gained[f"deep {steps} {found[1]}"]) for steps in shown]
        elif name := results_of(head):
            rows, columns = _rows(folder, name), _cells(head)[1:]
            body = [_line(each, rows[each], columns) for each in sorted(shown, key=lambda each: rows[each]["error"])]
        lines[start + 2 : end] = body
    return "\n".join(lines)


def _rows(folder: Path, name: str) -> dict[str, dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = json.loads((folder / f"{name}.json").read_text())["rows"]
    return rows


def _gain(steps: str, row: dict[str, Any]) -> str:
    """Return a row of the table of calibrations: error and work with the preset, with calibrated ratios, and with
    `calibrated.SINGLE`."""
    ways = [f"{row[way]:.3f} for {row[f'{way} cost']:.2f}" for way in ("preset", "calibrated", "single")]
    return f"| {' | '.join((steps, *ways, format(row['pictures'], '.1f')))} |"


def _sampler(shown: str, columns: list[dict[str, Any]]) -> str:
    """Return the row of a sampler: merged steps, mean and worst error in each column. shown: the row's first cell,
    which has the sampler's name in backticks."""
    name = shown.split("`")[1]
    rows = [rows[name.replace(", eta ", "@")] for rows in columns]
    cells = [f"{row['merged']}: {row['mean']:.3f}, {row['worst']:.2f}" if row["merged"] else "full" for row in rows]
    return f"| {shown} | " + " | ".join(cells) + " |"


def _answer(kind: str, pictures: str, line: str, columns: list[str], folder: Path) -> str:
    """Renew the numbers in `line`, a row of a table of advice. The row's first cell has the number of steps."""
    steps, setting, *shown = _cells(line)
    rows = _rows(folder, f"{kind}-{steps.split()[0]}steps-{pictures}")
    plain = setting.strip("*")
    names = [name for name in rows if name == plain or name.endswith(f": {plain}")]
    if len(names) != 1:
        raise KeyError(setting)
    cells = [
        FORMATS[c].format(**rows[names[0]]) if c in FORMATS else old for c, old in zip(columns, shown, strict=True)
    ]
    return f"| {steps} | {setting} |" + "".join(f" {cell} |" if cell else " |" for cell in cells)


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def _line(setting: str, row: dict[str, Any], columns: list[str]) -> str:
    return f"| {setting} | " + " | ".join(FORMATS[column].format(**row) for column in columns) + " |"


def sheet(name: str) -> Image.Image | None:
    """Draw the sheet of pictures of this name, one row for each setting. Return None if this machine lacks the
    pictures."""
    from scripts.cache import cache_dir

    from . import report
    from .judge import Conditions
    from .store import Store

    results, labels = SHEETS[name]
    stored = json.loads((RESULTS / f"{results}.json").read_text())
    store = Store(Conditions(**stored["conditions"]), RESULTS, cache_dir())
    strips = {setting: store.pictures(setting) for setting in labels}
    costs = {setting: f"{100 * row['cost']:.0f} %" for setting, row in stored["rows"].items()}
    rows = {labels[s].format(cost=costs[s]): strip for s, strip in strips.items() if strip is not None}
    return report.sheet(rows) if len(rows) == len(labels) else None


def main() -> None:
    """Write the tables, plots and sheets of all pages."""
    from . import report

    argparse.ArgumentParser(prog="python -m benchmarks.fidelity.page", description=__doc__).parse_args()
    for page in (PAGE, TABLES, GAINED):
        page.write_text(renewed(page.read_text(encoding="utf-8")), encoding="utf-8")
    for name, results in PLOTS.items():
        stored = json.loads((RESULTS / f"{results}.json").read_text())
        report.plot(IMAGES / name, stored["conditions"], stored["rows"])
    for name in SHEETS:
        picture = sheet(name)
        if picture is None:
            print(f"{IMAGES / name} stays: its pictures were not drawn here", file=sys.stderr)
        else:
            picture.save(IMAGES / name, quality=88)


if __name__ == "__main__":
    main()
