"""Draw the icon and the banner of the pack for the registry: `python -m demo.emblem`."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from scripts.comfyui import ROOT

FOLDER = ROOT / "assets"
ICON = (400, 400)  # the registry accepts a square of at most this size
BANNER = (1260, 540)  # the registry asks for 21:9
_FINE = 4  # pictures are drawn larger by this factor and then reduced, for smooth edges
_GAP = 0.06  # gap between tokens, as a share of a token's side
# Largest range of a colour within a token, for a token as high as the picture. A smaller token has a range in
# proportion to its height.
_SIMILAR = 0.9
_NIGHT, _INK, _DIM = (24, 28, 42), (245, 245, 245), (176, 186, 204)

Rectangle = tuple[float, float, float, float]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m demo.emblem", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=FOLDER)
    folder = parser.parse_args().output
    folder.mkdir(parents=True, exist_ok=True)
    for name, image in (("icon", icon()), ("banner", banner())):
        image.save(folder / f"{name}.png", optimize=True)
        print(f"{name}.png: {(folder / f'{name}.png').stat().st_size:,} bytes")


def icon() -> Image.Image:
    """Draw a square mosaic with round corners on a transparent ground."""
    side = ICON[0] * _FINE
    sheet = Image.new("RGBA", (side, side), (0, 0, 0, 0))
    pen = ImageDraw.Draw(sheet)
    pen.rounded_rectangle([0, 0, side - 1, side - 1], side // 7, fill=_NIGHT)
    _mosaic(pen, (0.09 * side, 0.09 * side, 0.91 * side, 0.91 * side), rows=8)
    return sheet.resize(ICON, Image.Resampling.LANCZOS)


def banner() -> Image.Image:
    """Draw the name on the left and a wide mosaic on the right."""
    width, height = BANNER[0] * _FINE, BANNER[1] * _FINE
    sheet = Image.new("RGB", (width, height), _NIGHT)
    pen = ImageDraw.Draw(sheet)
    _mosaic(pen, (width - height * 0.94, height * 0.06, width - height * 0.06, height * 0.94), rows=16)
    left = height * 0.11
    pen.text((left, height * 0.27), "ToMA", fill=_INK, font=ImageFont.load_default(height * 0.25))
    for line, text in enumerate(("Token Merge with Attention", "Image models on fewer tokens")):
        font = ImageFont.load_default(height * (0.072 - 0.016 * line))
        pen.text((left, height * (0.575 + 0.115 * line)), text, fill=(_INK, _DIM)[line], font=font)
    return sheet.resize(BANNER, Image.Resampling.LANCZOS)


def _mosaic(pen: ImageDraw.ImageDraw, box: Rectangle, rows: int) -> None:
    """Draw a square landscape of rows x rows tokens into `box`. Squares of similar tokens become one token."""
    left, top, right, _ = box
    cell = (right - left) / rows
    colours = _landscape(rows)

    def draw(y: int, x: int, size: int) -> None:
        part = colours[y : y + size, x : x + size].reshape(-1, 3)
        if size > 1 and np.ptp(part, axis=0).max() > _SIMILAR * size / rows:
            half = size // 2
            for dy in (0, half):
                for dx in (0, half):
                    draw(y + dy, x + dx, half)
            return
        gap = _GAP * cell
        corner = (left + x * cell + gap, top + y * cell + gap)
        far = (left + (x + size) * cell - gap, top + (y + size) * cell - gap)
        colour = tuple(int(value * 255) for value in part.mean(0))
        pen.rounded_rectangle([*corner, *far], cell * 0.22, fill=colour)

    largest = rows // 4
    for y in range(0, rows, largest):
        for x in range(0, rows, largest):
            draw(y, x, largest)


def _landscape(side: int) -> np.ndarray:
    """Return an evening sky, the sun and two hills: (side, side, 3) fp64 in [0, 1]."""
    many = 8 * side
    y, x = np.mgrid[0:many, 0:many] / many
    height = y[..., None]
    picture = (1 - height) * np.array([0.16, 0.30, 0.62]) + height * np.array([0.98, 0.62, 0.30])
    picture[(x - 0.66) ** 2 + (y - 0.40) ** 2 < 0.15**2] = (0.98, 0.90, 0.42)
    picture[y > 0.66 + 0.12 * np.sin(5 * x + 0.6)] = (0.00, 0.45, 0.40)
    picture[y > 0.86 + 0.08 * np.sin(4 * x + 3.4)] = (0.02, 0.27, 0.31)
    return picture.reshape(side, 8, side, 8, 3).mean((1, 3))


if __name__ == "__main__":
    main()
