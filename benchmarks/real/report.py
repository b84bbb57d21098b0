"""Lay out the comparison as a table, JSON, and a page of picture pairs."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .compare import METRICS, OTHER_SEED, Pair, Summary
from .pictures import UNMERGED, Folder


def table(summaries: Sequence[Summary]) -> list[list[str]]:
    """Return a head and one row for each setting: mean metrics, and median seconds."""
    rows = [["setting", "pictures", *METRICS, "seconds", "faster"]]
    for summary in summaries:
        figures = (summary.figures.get(name) for name in METRICS)
        cells = ["-" if figure is None else f"{figure:.4g}" for figure in figures]
        seconds = f"{summary.seconds:.2f} ({summary.timed})" if summary.seconds is not None else "-"
        faster = f"{summary.speedup:.2f}x" if summary.speedup is not None else "-"
        rows.append([summary.setting, str(summary.pictures), *cells, seconds, faster])
    return rows


def notes(summaries: Sequence[Summary], conditions: dict[str, Any]) -> list[str]:
    """Return the notes below the table."""
    device, comfyui, pytorch = (conditions[name] for name in ("device", "comfyui", "pytorch"))
    found = [
        f"Measured on {device}, ComfyUI {comfyui}, PyTorch {pytorch}. Seconds: median of the server's own times for "
        "a run (their number in brackets); runs that loaded, encoded text or were a setting's first are left out.",
        "Figures compare with the unmerged picture of the same prompt and seed, means over the pictures. "
        f"'{OTHER_SEED}' compares unmerged pictures of one prompt with each other, as a yardstick.",
    ]
    measured = [summary for summary in summaries if summary.setting != OTHER_SEED]
    for summary in measured:
        if summary.identical:
            found.append(
                f"{summary.setting}: {summary.identical} of {summary.pictures} pictures equal the unmerged ones to "
                "the last bit. If that is unexpected, nothing was merged: look at the ToMA line in ComfyUI's log."
            )
    if any(summary.seconds is None for summary in measured):
        found.append("Some settings have no time that can be compared: give more seeds for each prompt.")
    return found


def write(
    folder: Folder, pairs: Sequence[Pair], summaries: Sequence[Summary], conditions: dict[str, Any], said: Sequence[str]
) -> Path:
    """Write results.json and index.html, and return the page. said: the notes of the table."""
    listed = [{**asdict(pair), "picture": pair.picture.name, "twin": pair.twin.name} for pair in pairs]
    data = {"conditions": conditions, "settings": list(map(asdict, summaries)), "notes": said, "pairs": listed}
    folder.write(folder.path / "results.json", (json.dumps(data, indent=1, ensure_ascii=False) + "\n").encode())
    shown = [pair for pair in pairs if pair.setting not in (UNMERGED, OTHER_SEED)]
    head, *body = table(summaries)
    fill = {
        "HEAD": "".join(f"<th>{html.escape(cell)}</th>" for cell in head),
        "BODY": "\n".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in body),
        "NOTES": "\n".join(f"<li>{html.escape(note)}</li>" for note in said),
        "PAIRS": "\n".join(_figure(pair) for pair in sorted(shown, key=lambda pair: pair.figures["PSNR"])),
    }
    template = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")
    # All placeholders are replaced in one pass, so that a prompt that looks like a placeholder stays unchanged.
    parts = template.split("@@")
    page = folder.path / "index.html"
    folder.write(page, "".join(fill[part] if index % 2 else part for index, part in enumerate(parts)).encode())
    return page


def _figure(pair: Pair) -> str:
    figures = ", ".join(f"{name} {value:.4g}" for name, value in pair.figures.items())
    caption = f"<b>{html.escape(pair.setting)}</b>, seed {pair.seed}: {figures}<br>{html.escape(pair.prompt)}"
    images = "".join(
        f'<img loading="lazy" src="pictures/{path.name}" alt="{name}">'
        for name, path in (("unmerged", pair.twin), ("merged", pair.picture))
    )
    return f"<figure>{images}<figcaption>{caption}</figcaption></figure>"
