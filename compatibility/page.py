"""The tables in docs/compatibility.md, from the verdicts of the last `make compatibility`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from scripts.comfyui import ROOT

from .judge import Verdict
from .kit import PRESET, version_of
from .row import ALL, FAMILIES, LATEST, OTHERS, NotFor, Row
from .rows import ROWS

PAGE = ROOT / "docs" / "compatibility.md"
RESULTS = Path(__file__).parent / "results.json"
BEGIN, END = "<!-- tables: make compatibility -->", "<!-- end of tables -->"

# The text between the tables of `FAMILIES` and the tables of `OTHERS`.
FURTHER = """### The other models

Features that depend on the model were also tried on small models of 2 to 5 blocks. *-*: ComfyUI does not have the
feature for this model. *not tried*: left out to save time, because the feature does the same in another model.
tests/nodes/adapters/compile/test_compile.py counts the compiled graphs of every model. Qwen-Image 2.1 is newer than
this ComfyUI, so a stand-in for its class was tried, with ComfyUI's cache of the prompt on."""
# The text before the table of the families in LATEST.
LAST = """### Further models

On these models, only the rows that depend most on the model were tried. SCAIL takes poses, WanDancer takes music."""

Results = dict[str, Any]


def recorded() -> Results:
    """Return the recorded results. `comfyui` and `torch`: versions. `rows`: for each feature and family, `cell` and
    `unmerged` of the verdict; for a community pack also `tried`, the versions of the pack and of ComfyUI. `presets`:
    for each preset, feature and family, whether the verdict equals the verdict without a preset."""
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"rows": {}}


def versions() -> dict[str, str]:
    """Return the versions of ComfyUI and PyTorch."""
    import torch
    from comfyui_version import __version__ as comfyui

    return {"comfyui": comfyui, "torch": torch.__version__.partition("+")[0]}


def as_json(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict in the form that is recorded."""
    return {"cell": verdict.cell, "unmerged": dict(verdict.unmerged)}


def record(results: Results, row: Row, family: str, verdict: Mapping[str, Any]) -> None:
    """Put a verdict into the results. If the row is for a community pack, also put in the pack's version."""
    result = results["rows"].setdefault(row.feature, {})
    result[family] = verdict
    if row.pack:
        if isinstance(row.expected[family], NotFor):
            return  # this verdict needs no installed pack, so there is no version
        result["tried"] = f"{version_of(row.pack)}, with ComfyUI {versions()['comfyui']}"
    else:
        results.update(versions())


def compare(results: Results, row: Row, family: str, verdict: Mapping[str, Any] | None) -> bool:
    """Compare a verdict under a preset (None if a check failed) with the verdict without a preset, and record whether
    the two are equal."""
    same = verdict == results["rows"].get(row.feature, {}).get(family)
    if not isinstance(row.expected[family], NotFor):
        results.setdefault("presets", {}).setdefault(PRESET, {}).setdefault(row.feature, {})[family] = same
    return same


def write(results: Results) -> None:
    """Drop rows that no longer exist, and write the results and the page."""
    rows = {row.feature: results["rows"][row.feature] for row in ROWS if row.feature in results["rows"]}
    presets = {
        preset: {feature: tried[feature] for feature in rows if feature in tried}
        for preset, tried in results.get("presets", {}).items()
    }
    results = {**results, "rows": rows, "presets": presets}
    RESULTS.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8"), results), encoding="utf-8")


def updated(page: str, results: Results) -> str:
    """Return the page with new tables between its two marks."""
    before, rest = page.split(BEGIN)
    return "".join((before, BEGIN, "\n", tables(results), END, rest.split(END)[1]))


def tables(results: Results) -> str:
    """Return the tables of `FAMILIES`, `OTHERS` and `LATEST`, with one table for each group of rows."""
    lines = [f"Tried with ComfyUI {results['comfyui']} and PyTorch {results['torch']}, on the CPU."]
    lines += [*(_under(preset, tried) for preset, tried in results.get("presets", {}).items()), ""]
    for families, heading in ((FAMILIES, ""), (OTHERS, FURTHER), (LATEST, LAST)):
        lines += [heading, ""] if heading else []
        tried_on = [row for row in ROWS if set(families) <= set(row.expected)]
        for group, rows in groupby(tried_on, key=lambda row: "Feature" if families is LATEST else row.group):
            lines.append(f"| {group} | {' | '.join(families.values())} | left unmerged |")
            lines.append("|---" * (len(families) + 2) + "|")
            lines += [_line(row, results["rows"].get(row.feature, {}), families) for row in rows]
            lines.append("")
    return "\n".join(lines)


def _under(preset: str, tried: Mapping[str, Mapping[str, bool]]) -> str:
    """Count the verdicts that a preset leaves unchanged, and list the verdicts that it changes."""
    same = [same for families in tried.values() for same in families.values()]
    other = [f"{feature} ({ALL[f]})" for feature, families in tried.items() for f in families if not families[f]]
    line = f"Under the preset `{preset}`, {sum(same)} of {len(same)} verdicts equal those in the tables"
    return f"{line}; these differ: {', '.join(other)}." if other else f"{line}."


def _line(row: Row, result: Mapping[str, Any], families: Mapping[str, str]) -> str:
    cells = [result.get(family, {}).get("cell", "not tried") for family in families]
    tried = f" ({result['tried']})" if "tried" in result else ""
    return f"| {row.feature}{tried} | {' | '.join(cells)} | {_left(result, families)} |"


def _left(result: Mapping[str, Any], families: Mapping[str, str]) -> str:
    """List the unmerged parts, each with the families that leave it unmerged."""
    left: dict[str, list[str]] = {}
    for family, title in families.items():
        for reason, parts in result.get(family, {}).get("unmerged", {}).items():
            left.setdefault(f"{parts} ({reason})", []).append(title)
    return "; ".join(f"{', '.join(titles)}: {what}" for what, titles in left.items())
