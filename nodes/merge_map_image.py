"""Draw the merge map: a picture of each token grid with its windows, destinations and merged regions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from PIL import Image, ImageColor, ImageDraw, ImageOps
from torch import Tensor

from ..toma_core.merge import MergeMap
from ..toma_core.windows import Grid
from .report_charts import BLACK, INK, PAPER, WIDTH, canvas, font, joined

# The palette of Okabe and Ito without black, see `report_charts`.
_HEX = "#e69f00 #56b4e9 #009e73 #f0e442 #0072b2 #d55e00 #cc79a7"
_COLOURS = np.array([ImageColor.getrgb(colour) for colour in _HEX.split()], dtype=np.uint8)
_MARGIN, _CAPTION = 16, 34
_TINT = 0.25  # opacity of the regions' colours over the picture
_EDGE = (250, 250, 250)  # colour of the line between tokens of different destinations


def draw(maps: Mapping[Grid, MergeMap], picture: Tensor | None = None, charts: Sequence[Image.Image] = ()) -> Tensor:
    """Draw one panel per token grid side by side, the finest grid first, with charts below.

    picture: (B, H, W, C) fp32 in [0, 1]; its first image is drawn under the regions. Returns (1, H, W, 3) fp32 in [0,
    1], as ComfyUI's IMAGE.
    """
    photo = None if picture is None else _photo(picture)
    side = (WIDTH + _MARGIN) // max(1, len(maps)) - _MARGIN
    panels = [_panel(maps[grid], photo, side) for grid in sorted(maps, reverse=True)]
    rows = [joined(panels, across=True, gap=_MARGIN)] if panels else []
    return as_image(ImageOps.expand(joined([*rows, *charts, canvas(WIDTH, 0 if rows else _MARGIN)[0]]), _MARGIN, PAPER))


def as_image(sheet: Image.Image) -> Tensor:
    """Return (1, H, W, 3) fp32 in [0, 1], as ComfyUI's IMAGE."""
    return torch.from_numpy(np.asarray(sheet, dtype=np.float32) / 255.0)[None]


def _photo(picture: Tensor) -> Image.Image:
    pixels = picture[0, ..., :3].detach().float().nan_to_num().clamp(0, 1).mul(255).round().byte()
    return Image.fromarray(pixels.expand(-1, -1, 3).cpu().numpy())


def _panel(merged: MergeMap, photo: Image.Image | None, side: int) -> Image.Image:
    height, width = merged.height, merged.width
    cell = max(2, side // max(height, width))
    panel, pen = canvas(max(width * cell, side), height * cell + _CAPTION)
    frame = f" (1/{merged.frames})" if merged.frames > 1 else ""
    title = f"{height} x {width}{frame}: {height * width} -> {len(merged.destinations)}"
    pen.text((0, 4), title, fill=INK, font=font())
    grid = _regions(merged, photo, cell)
    pen = ImageDraw.Draw(grid)
    rows, columns = ([cut * cell for cut in cuts] for cuts in merged.cuts)
    lines = [(0, y, grid.width, y) for y in rows] + [(x, 0, x, grid.height) for x in columns]
    for line in lines:
        pen.line(line, fill=BLACK, width=max(1, cell // 8))
    radius = max(1, cell // 5)
    for index in merged.destinations.tolist():
        y, x = (index // width + 0.5) * cell, (index % width + 0.5) * cell
        pen.ellipse([x - radius, y - radius, x + radius, y + radius], fill=(255, 255, 255), outline=BLACK)
    panel.paste(grid, (0, _CAPTION))
    return panel


def _regions(merged: MergeMap, photo: Image.Image | None, cell: int) -> Image.Image:
    """Draw each token in the colour of its destination, over the photo, with lines between destinations."""
    owner = merged.owner.view(merged.height, merged.width).numpy().repeat(cell, 0).repeat(cell, 1)
    places = 3 * (owner // merged.width) + owner % merged.width
    image = Image.fromarray(_COLOURS[places % len(_COLOURS)])
    if photo is not None:
        image = Image.blend(photo.resize(image.size, Image.Resampling.BICUBIC), image, _TINT)
    pixels = np.array(image)
    line = max(1, cell // 12)
    pixels[:, line:][owner[:, line:] != owner[:, :-line]] = _EDGE
    pixels[line:][owner[line:] != owner[:-line]] = _EDGE
    return Image.fromarray(pixels)
