"""The tables in docs/compatibility.md, from the verdicts of the last `make compatibility`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from scripts.comfyui import ROOT

from .judge import Verdict
from .kit import version_of
from .row import FAMILIES, Row
from .rows import ROWS

PAGE = ROOT / "docs" / "compatibility.md"
RESULTS = Path(__file__).parent / "results.json"
BEGIN, END = "<!-- tables: make compatibility -->", "<!-- end of tables -->"

Results = dict[str, Any]


def recorded() -> Results:
    """`comfyui` and `torch`: versions. `rows`: for each feature and family, `cell` and `whole` of the verdict; for a
    community pack also `tried`, what of it was tried and with which ComfyUI."""
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"rows": {}}


def versions() -> dict[str, str]:
    """What rows are run on here."""
    import torch
    from comfyui_version import __version__ as comfyui

    return {"comfyui": comfyui, "torch": torch.__version__.partition("+")[0]}


def as_json(verdict: Verdict) -> dict[str, Any]:
    """A verdict as it is recorded."""
    return {"cell": verdict.cell, "whole": dict(verdict.whole)}


def record(results: Results, row: Row, family: str, verdict: Mapping[str, Any]) -> None:
    """Put a verdict into the results; for a community pack with what it was reached on."""
    result = results["rows"].setdefault(row.feature, {})
    result[family] = verdict
    if row.pack:
        result["tried"] = f"{version_of(row.pack)}, with ComfyUI {versions()['comfyui']}"
    else:
        results.update(versions())


def write(results: Results) -> None:
    """Keep the results, without rows that are no more, and the page made of them."""
    rows = {row.feature: results["rows"][row.feature] for row in ROWS if row.feature in results["rows"]}
    results = {**results, "rows": rows}
    RESULTS.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8"), results), encoding="utf-8")


def updated(page: str, results: Results) -> str:
    """The page with new tables between its two marks."""
    before, rest = page.split(BEGIN)
    return "".join((before, BEGIN, "\n", tables(results), END, rest.split(END)[1]))


def tables(results: Results) -> str:
    """One table for each group of rows."""
    lines = [f"Tried with ComfyUI {results['comfyui']} and PyTorch {results['torch']}, on the CPU.", ""]
    for group, rows in groupby(ROWS, key=lambda row: row.group):
        lines += [f"| {group} | {' | '.join(FAMILIES.values())} | left whole |", "|---|---|---|---|"]
        lines += [_line(row, results["rows"].get(row.feature, {})) for row in rows]
        lines.append("")
    return "\n".join(lines)


def _line(row: Row, result: Mapping[str, Any]) -> str:
    cells = [result.get(family, {}).get("cell", "not tried") for family in FAMILIES]
    tried = f" ({result['tried']})" if "tried" in result else ""
    return f"| {row.feature}{tried} | {' | '.join(cells)} | {_left(result)} |"


def _left(result: Mapping[str, Any]) -> str:
    """What stays whole, said once where it is the same for all families."""
    left: dict[str, list[str]] = {}
    for family, title in FAMILIES.items():
        for reason, parts in result.get(family, {}).get("whole", {}).items():
            left.setdefault(f"{parts} ({reason})", []).append(title)
    return "; ".join(f"{', '.join(titles)}: {what}" for what, titles in left.items())
