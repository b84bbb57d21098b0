"""Write the measurements as a table, JSON, two CSV files, and a page of picture pairs."""

from __future__ import annotations

import csv
import html
import io
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .measure import OTHER_SEED, Pair, Results, Summary
from .metrics import FID, METRICS
from .pictures import UNMERGED, Folder

FEW_FOR_FID = 2048  # the dimension of its features; published values use more pictures
_DIGITS = {"psnr": 1}


def table(summaries: Sequence[Summary]) -> list[list[str]]:
    """Return a head and one row for each setting: means, and medians of seconds."""
    rows = [["setting", "pictures", *(metric.title for metric in METRICS), FID.title, "seconds", "faster"]]
    for summary in summaries:
        means = [_cell(summary.figures.get(m.name, {}).get("mean"), _DIGITS.get(m.name, 4)) for m in METRICS]
        seconds = f"{summary.seconds:.2f} ({summary.timed})" if summary.seconds is not None else "-"
        faster = f"{summary.speedup:.2f}x" if summary.speedup is not None else "-"
        rows.append([summary.setting, str(summary.pictures), *means, _cell(summary.fid, 2), seconds, faster])
    return rows


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Format the rows as text, with a line below the head."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def notes(results: Results, conditions: dict[str, Any]) -> list[str]:
    """Return the notes of the table, and the missing metrics."""
    device, comfyui, pytorch = (conditions[name] for name in ("device", "comfyui", "pytorch"))
    found = [
        f"Measured on {device}, ComfyUI {comfyui}, PyTorch {pytorch}. Seconds: median of the server's own times for "
        "a run (their number in brackets); runs that loaded, encoded text or were a setting's first are left out.",
        "Distances are to the unmerged picture of the same prompt and seed, means over the pictures.",
    ]
    if any(summary.setting == OTHER_SEED for summary in results.summaries):
        found.append(f"'{OTHER_SEED}' compares unmerged pictures of one prompt with each other, as a yardstick.")
    merged = [summary for summary in results.summaries if summary.setting not in (UNMERGED, OTHER_SEED)]
    for summary in merged:
        if summary.identical:
            found.append(
                f"{summary.setting}: {summary.identical} of {summary.pictures} pictures equal the unmerged ones to "
                "the last bit. If that is unexpected, nothing was merged: look at the ToMA line in ComfyUI's log."
            )
    if any(summary.seconds is None for summary in [*merged, *results.summaries[:1]]):
        found.append("Some settings have no time that can be compared: give more seeds for each prompt.")
    if any(summary.fid is not None and summary.pictures < FEW_FOR_FID for summary in merged):
        found.append(
            f"FID of fewer than {FEW_FOR_FID} pictures is too high and depends on their number: compare it between "
            "these settings only."
        )
    return found + results.notes


def write(folder: Folder, results: Results, conditions: dict[str, Any]) -> Path:
    """Write results.json, summary.csv, pairs.csv and index.html, and return the page."""
    notes_shown = notes(results, conditions)
    settings = [asdict(summary) for summary in results.summaries]
    data = {"conditions": conditions, "settings": settings, "notes": notes_shown}
    folder.write(folder.path / "results.json", (json.dumps(data, indent=1, ensure_ascii=False) + "\n").encode())
    folder.write(folder.path / "summary.csv", _csv(table(results.summaries)))
    names = [metric.name for metric in METRICS]
    rows: list[list[Any]] = [["setting", "prompt", "seed", *names, "seconds", "picture", "compared_with"]]
    for pair in results.pairs:
        figures = [pair.figures.get(name, "") for name in names]
        files = [f"pictures/{picture.path.name}" for picture in (pair.picture, pair.twin)]
        rows.append([pair.setting, pair.prompt, pair.seed, *figures, pair.seconds or "", *files])
    folder.write(folder.path / "pairs.csv", _csv(rows))
    page = folder.path / "index.html"
    folder.write(page, _page(results, notes_shown).encode())
    return page


def _page(results: Results, notes_shown: Sequence[str]) -> str:
    head, *body = table(results.summaries)
    figures = [metric for metric in METRICS if any(metric.name in pair.figures for pair in _shown(results.pairs))]
    fill = {
        "HEAD": "".join(f"<th>{_text(cell)}</th>" for cell in head),
        "BODY": "\n".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in body),
        "NOTES": "\n".join(f"<li>{_text(note)}</li>" for note in notes_shown),
        "SETTINGS": "".join(
            f"<option>{_text(name)}</option>" for name in dict.fromkeys(p.setting for p in _shown(results.pairs))
        ),
        "SORTS": "".join(
            f'<option value="{m.name}" data-sign="{-1 if m.higher_is_closer else 1}">{_text(m.title)}</option>'
            for m in figures
        ),
        "PAIRS": "\n".join(_figure(pair) for pair in _shown(results.pairs)),
    }
    template = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")
    # One pass, so that a prompt that looks like a placeholder is not replaced.
    parts = template.split("@@")
    return "".join(fill[part] if index % 2 else part for index, part in enumerate(parts))


def _shown(pairs: Sequence[Pair]) -> list[Pair]:
    return [pair for pair in pairs if pair.setting not in (UNMERGED, OTHER_SEED)]


def _figure(pair: Pair) -> str:
    data = " ".join(f'data-{name}="{value:.6g}"' for name, value in pair.figures.items())
    figures = ", ".join(f"{m.title} {pair.figures[m.name]:.4g}" for m in METRICS if m.name in pair.figures)
    caption = f"<b>{_text(pair.setting)}</b>, seed {pair.seed}: {_text(figures)}<br>{_text(pair.prompt)}"
    images = "".join(
        f'<img loading="lazy" src="pictures/{picture.path.name}" alt="{name}">'
        for name, picture in (("unmerged", pair.twin), ("merged", pair.picture))
    )
    return f'<figure data-setting="{_text(pair.setting)}" {data}>{images}<figcaption>{caption}</figcaption></figure>'


def _csv(rows: Sequence[Sequence[Any]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def _cell(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _text(value: str) -> str:
    return html.escape(value)
