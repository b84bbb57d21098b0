"""Show the rows of a measurement as a Pareto plot and a contact sheet."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

Rows = dict[str, dict[str, Any]]
Point = tuple[float, float]


def pareto(rows: Rows) -> list[str]:
    """Return the settings for which no other setting has both a smaller error and a lower cost, cheapest first."""
    best, front = float("inf"), []
    for name in sorted(rows, key=lambda n: (rows[n]["cost"], rows[n]["error"])):
        if rows[name]["error"] < best:
            best = rows[name]["error"]
            front.append(name)
    return front


def plot(path: Path, conditions: dict[str, Any], rows: Rows) -> None:
    """Plot the error over the cost, with the Pareto front. Names beside the plot: the presets, the rivals and the
    settings on the front."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(12, 6.5), constrained_layout=True)
    groups: dict[str, list[str]] = {}
    for name in rows:
        groups.setdefault(name.split(":")[0], []).append(name)
    colours = plt.get_cmap("tab20")
    for index, (group, names) in enumerate(groups.items()):
        values = [rows[n]["cost"] for n in names], [rows[n]["error"] for n in names]
        marker = "*" if group == "rival" else "os^Dv<>Ph"[index % 9]
        size = 110 if group in ("rival", "preset") else 36
        axes.scatter(*values, label=group, marker=marker, s=size, color=colours(index % 20), edgecolors="k", lw=0.3)
    front = pareto(rows)
    axes.plot([rows[n]["cost"] for n in front], [rows[n]["error"] for n in front], color="black", lw=0.8, zorder=0)
    # Number the points, and list their names beside the plot, because names at the points would overlap.
    named = dict.fromkeys([*front, *(n for n in rows if n.startswith(("rival", "preset")))])
    for at, numbers in _apart([(rows[n]["cost"], rows[n]["error"]) for n in named], axes.transData.transform):
        axes.annotate("\n".join(map(str, reversed(numbers))), at, fontsize=7, xytext=(4, 4), textcoords="offset points")
    listing = "\n".join(f"{i} {name}{' *' if name in front else ''}" for i, name in enumerate(named, 1))
    axes.text(1.01, 1.0, listing + "\n\n* on the front", transform=axes.transAxes, fontsize=7, va="top")
    axes.set_xlabel("share of the matrix multiplications left")
    axes.set_ylabel("error of the latent, relative L2")
    pictures = conditions["images"] * conditions["seeds"]
    axes.set_title(f"{conditions['model']}, {conditions['steps']} steps, {conditions['size']} px, {pictures} pictures")
    axes.grid(alpha=0.3)
    figure.legend(fontsize=7, ncol=9, loc="outside lower center")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _apart(points: list[Point], to_pixels: Callable[[Point], Any]) -> list[tuple[Point, list[int]]]:
    """Return labels for the points. A label has a position, and the numbers of its points, counted from 1. Points
    within ten pixels of each other share a label."""
    labels: list[tuple[Point, list[int]]] = []
    for number, point in enumerate(points, 1):
        x, y = to_pixels(point)
        for other, numbers in labels:
            at = to_pixels(other)
            if max(abs(x - at[0]), abs(y - at[1])) < 10:
                numbers.append(number)
                break
        else:
            labels.append((point, [number]))
    return labels


def sheet(strips: dict[str, Image.Image]) -> Image.Image:
    """Arrange rows of pictures, with the name of each row above it."""
    height = 16
    width = max(strip.width for strip in strips.values())
    page = Image.new("RGB", (width, sum(strip.height + height for strip in strips.values())), "white")
    draw, top = ImageDraw.Draw(page), 0
    for name, strip in strips.items():
        draw.text((4, top + 2), name, fill="black", font=ImageFont.load_default(11))
        page.paste(strip, (0, top + height))
        top += strip.height + height
    return page
