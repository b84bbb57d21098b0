"""The rows of a run as a table for reading, a CSV for computing, and a plot of distance against cost."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

Rows = dict[str, dict[str, float]]


def pareto(rows: Rows) -> list[str]:
    """The settings that no other one beats in both distance and cost, cheapest first."""
    best, front = float("inf"), []
    for name in sorted(rows, key=lambda n: (rows[n]["cost"], rows[n]["distance"])):
        if rows[name]["distance"] < best:
            best = rows[name]["distance"]
            front.append(name)
    return front


def table(conditions: dict[str, Any], rows: Rows, columns: tuple[str, ...]) -> str:
    """A Markdown table; settings on the Pareto front are marked with a star."""
    front = set(pareto(rows))
    lines = [", ".join(f"{k} {v}" for k, v in conditions.items()), ""]
    lines += ["| setting | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name, row in rows.items():
        mark = " *" if name in front else ""
        lines.append(f"| {name}{mark} | " + " | ".join(f"{row[column]:.3f}" for column in columns) + " |")
    return "\n".join(lines) + "\n"


def write(file: Path, conditions: dict[str, Any], rows: Rows, columns: tuple[str, ...]) -> None:
    """Write FILE's .md, .csv and .png beside it, and print the table."""
    text = table(conditions, rows, columns)
    print(text)
    file.with_suffix(".md").write_text(text)
    with file.with_suffix(".csv").open("w", newline="") as out:
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(["setting", *columns])
        writer.writerows([name, *(f"{row[column]:.6g}" for column in columns)] for name, row in rows.items())
    _plot(file.with_suffix(".png"), conditions, rows)


def _plot(path: Path, conditions: dict[str, Any], rows: Rows) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 6), constrained_layout=True)
    groups: dict[str, list[str]] = {}
    for name in rows:
        groups.setdefault(name.split(":")[0], []).append(name)
    for index, (group, names) in enumerate(groups.items()):
        x, y = [rows[n]["cost"] for n in names], [rows[n]["distance"] for n in names]
        axes.scatter(x, y, label=group, marker="os^Dv<>PX*h"[index % 11], s=36)
    front = pareto(rows)
    axes.plot([rows[n]["cost"] for n in front], [rows[n]["distance"] for n in front], color="black", lw=0.8)
    for name in front:
        axes.annotate(
            name, (rows[name]["cost"], rows[name]["distance"]), fontsize=7, xytext=(4, 4), textcoords="offset points"
        )
    axes.set_xlabel("cost: share of matrix-multiplication work left")
    axes.set_ylabel("distance to the unmerged latent")
    axes.set_title(f"{conditions['model']}, {conditions['steps']} steps, {conditions['size']} px")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, ncol=2)
    figure.savefig(path, dpi=120)
    plt.close(figure)
