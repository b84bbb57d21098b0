"""The merge map: each token grid as a picture of its windows, destinations and merged regions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from ..toma_core.maps import MergeMap
from ..toma_core.windows import Grid
from .report_charts import INK, PAPER, SMALL, font

# Okabe and Ito's palette without black: told apart with every kind of colour vision.
_COLOURS = np.array(
    [[230, 159, 0], [86, 180, 233], [0, 158, 115], [240, 228, 66], [0, 114, 178], [213, 94, 0], [204, 121, 167]],
    dtype=np.uint8,
)
# Of all panels together, in pixels: a node shows the picture at about half of that, and its letters are to be read.
_WIDTH = 784
_MARGIN = 16
_CAPTION = 34
# How much of a region's colour lies over the picture, which is to be recognised; its border is drawn then as well.
_TINT = 0.25


def draw(
    maps: Mapping[Grid, MergeMap],
    fallback: str,
    picture: Tensor | None = None,
    charts: Callable[[int], Iterable[Image.Image]] = lambda _: (),
) -> Tensor:
    """One panel per token grid, the finest first, side by side. Returns (1, H, W, 3) fp32 in [0, 1], as ComfyUI's
    IMAGE. Without a map, a page that says `fallback`.

    picture: (B, H, W, C) fp32 in [0, 1]; the first is drawn under the regions. charts: given a width in pixels, what
    stands below the panels, one under the other.
    """
    below = None if picture is None else _photo(picture)
    side = (_WIDTH + _MARGIN) // max(1, len(maps)) - _MARGIN
    panels = [_panel(maps[grid], below, side) for grid in sorted(maps, reverse=True)] or [_page(fallback)]
    width = max(_WIDTH, sum(panel.width for panel in panels) + _MARGIN * (len(panels) - 1))
    rows = [*([_legend(width, below is not None)] if maps else []), *charts(width)]
    height = max(panel.height for panel in panels)
    sheet = Image.new("RGB", (width + 2 * _MARGIN, height + sum(r.height for r in rows) + 2 * _MARGIN), PAPER)
    left = _MARGIN
    for panel in panels:
        sheet.paste(panel, (left, _MARGIN))
        left += panel.width + _MARGIN
    top = _MARGIN + height
    for row in rows:
        sheet.paste(row, (_MARGIN, top))
        top += row.height
    return as_image(sheet)


def as_image(sheet: Image.Image) -> Tensor:
    """(1, H, W, 3) fp32 in [0, 1], as ComfyUI's IMAGE."""
    return torch.from_numpy(np.asarray(sheet).astype(np.float32) / 255)[None]


def _photo(picture: Tensor) -> Image.Image:
    pixels = picture[0, ..., :3].detach().float().nan_to_num().clamp(0, 1).mul(255).round().byte().cpu().numpy()
    return Image.fromarray(pixels if pixels.shape[-1] == 3 else pixels.repeat(3, -1))


def _legend(width: int, picture: bool) -> Image.Image:
    row = Image.new("RGB", (width, 2 * _CAPTION), PAPER)
    signs = "dot: a token that stayed    patch: merged into it\nblack line: window" + picture * "    white line: patch"
    ImageDraw.Draw(row).multiline_text((0, 4), signs, fill=INK, font=font(SMALL), spacing=6)
    return row


def _panel(merged: MergeMap, picture: Image.Image | None, side: int) -> Image.Image:
    height, width = merged.height, merged.width
    cell = max(2, side // max(height, width))
    owner = merged.owner.view(height, width).numpy()
    pixels = Image.fromarray(_colours(owner).repeat(cell, 0).repeat(cell, 1))
    if picture is not None:
        pixels = Image.blend(picture.resize(pixels.size, Image.Resampling.BICUBIC), pixels, _TINT)
        _outline(pixels, owner, cell)
    size = (max(width * cell, side), height * cell + _CAPTION)
    panel = Image.new("RGB", size, PAPER)
    panel.paste(pixels, (0, _CAPTION))
    pen = ImageDraw.Draw(panel)

    rows, columns = merged.cuts
    for row in rows:
        pen.line([(0, _CAPTION + row * cell), (width * cell, _CAPTION + row * cell)], fill=INK, width=max(1, cell // 8))
    for column in columns:
        pen.line(
            [(column * cell, _CAPTION), (column * cell, _CAPTION + height * cell)], fill=INK, width=max(1, cell // 8)
        )
    radius = max(1, cell // 5)
    for index in merged.destinations.tolist():
        y, x = _CAPTION + (index // width + 0.5) * cell, (index % width + 0.5) * cell
        pen.ellipse([x - radius, y - radius, x + radius, y + radius], fill=(255, 255, 255), outline=INK)

    title = f"{height} x {width} tokens -> {len(merged.destinations)}"
    if merged.frames > 1:
        title += f" (frame 1 of {merged.frames})"
    pen.text((0, 4), title, fill=INK, font=font())
    return panel


def _outline(image: Image.Image, owner: np.ndarray, cell: int) -> None:
    """Draw a line wherever two tokens that touch have different destinations. owner: (H, W)."""
    pen, width = ImageDraw.Draw(image), max(1, cell // 12)
    for y, x in np.argwhere(owner[:, 1:] != owner[:, :-1]).tolist():
        pen.line([((x + 1) * cell, y * cell), ((x + 1) * cell, (y + 1) * cell)], fill=PAPER, width=width)
    for y, x in np.argwhere(owner[1:] != owner[:-1]).tolist():
        pen.line([(x * cell, (y + 1) * cell), ((x + 1) * cell, (y + 1) * cell)], fill=PAPER, width=width)


def _colours(owner: np.ndarray) -> np.ndarray:
    """(H, W) destination of each token -> (H, W, 3) uint8: touching regions of different destinations differ.

    Greedy colouring in reading order. A destination with neighbours of every colour (rare: regions are small) takes
    the colour that the fewest of them have.
    """
    neighbours: dict[int, set[int]] = {}
    for a, b in ((owner[:, :-1], owner[:, 1:]), (owner[:-1], owner[1:])):
        for p, q in zip(a.ravel().tolist(), b.ravel().tolist(), strict=True):
            if p != q:
                neighbours.setdefault(p, set()).add(q)
                neighbours.setdefault(q, set()).add(p)
    chosen: dict[int, int] = {}
    for destination in np.unique(owner).tolist():
        taken = [chosen[n] for n in neighbours.get(destination, ()) if n in chosen]
        order = [(destination + k) % len(_COLOURS) for k in range(len(_COLOURS))]
        chosen[destination] = min(order, key=taken.count)
    return _COLOURS[np.vectorize(chosen.__getitem__, otypes=[np.int64])(owner)]


def _page(text: str) -> Image.Image:
    page = Image.new("RGB", (_WIDTH, 170), PAPER)
    words, lines = text.split(), [""]
    for word in words:
        if len(lines[-1]) + len(word) > 66:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    ImageDraw.Draw(page).multiline_text((8, 12), "\n".join(lines[:5]), fill=INK, font=font(), spacing=6)
    return page
