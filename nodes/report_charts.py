"""Draw merge maps, charts of tokens by step and block, and the results of Benchmark and Calibrate. A `Caption` on the
node explains each picture. People with every kind of colour vision can tell the colours apart (Okabe and Ito)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from PIL import Image, ImageColor, ImageDraw, ImageFont, ImageOps
from torch import Tensor

from ..toma_core.merge import MergeMap
from ..toma_core.reasons import MessageId
from ..toma_core.stats import RunStats
from ..toma_core.windows import Grid
from .adapters.report_text import natural_order

# PAPER is as dark as ComfyUI's page; BLACK is for text on colours.
PAPER, INK, FAINT, BLACK = (34, 34, 36), (230, 230, 230), (84, 84, 88), (16, 16, 16)
MERGED, PARTLY, FULL = (86, 180, 233), (240, 228, 66), (150, 150, 150)
RECOMMENDED, ERROR = (230, 159, 0), (204, 121, 167)
# In pixels: width of a picture, two font sizes. Fonts are large, because nodes show pictures at about half size.
WIDTH, LARGE, SMALL = 784, 24, 22
_PAD = 8
_STRIP, _AXIS = 110, 84  # for `steps_chart`: height of the bars, width of the axis labels
_SQUARE, _PITCH = 32, 35  # for `blocks_chart`: side of a square, distance from square to square
_ROW, _THICK, _THIN = 84, 28, 10  # for `bar_chart`: height of a row, and of its two bars
_MARGIN, _CAPTION = 16, 34  # for `draw`: space between panels, height of the line above a merge map
_HEX = "#e69f00 #56b4e9 #009e73 #f0e442 #0072b2 #d55e00 #cc79a7"  # colours of regions
_COLOURS = np.array([ImageColor.getrgb(colour) for colour in _HEX.split()], dtype=np.uint8)
_TINT = 0.25  # opacity of the regions' colours over the picture
_EDGE = (250, 250, 250)  # colour of the line between tokens of different destinations


class Caption(MessageId):
    PICTURE = "picture"
    MAP = "caption_map"
    STEPS = "caption_steps"
    BLOCKS = "caption_blocks"
    TIME = "caption_time"
    WORK = "caption_work"


@cache
def font(size: int = LARGE) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def canvas(width: int, height: int) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    """Return an empty image and a pen that draws on it."""
    image = Image.new("RGB", (width, height), PAPER)
    return image, ImageDraw.Draw(image)


def joined(images: Sequence[Image.Image], across: bool = False, gap: int = 0) -> Image.Image:
    """Join images from top to bottom or, with `across`, from left to right. gap: pixels between two images."""
    widths, heights = zip(*(image.size for image in images), strict=True)
    space = gap * (len(images) - 1)
    sheet, _ = canvas(sum(widths) + space, max(heights)) if across else canvas(max(widths), sum(heights) + space)
    at = 0
    for image in images:
        sheet.paste(image, (at, 0) if across else (0, at))
        at += gap + (image.width if across else image.height)
    return sheet


def steps_chart(stats: RunStats, width: int = WIDTH) -> Image.Image:
    """Draw a bar for each sampling step. The bar's height is the share of tokens that merged blocks compute."""
    total = max([stats.total_steps, *(step + 1 for step in stats.steps)])
    image, pen = canvas(width, _STRIP + 58)
    each, top = (width - _AXIS - _PAD) / max(total, 1), 20
    for percent in (0, 50, 100):
        y = top + _STRIP * (1 - percent / 100)
        pen.line([(_AXIS, y), (width - _PAD, y)], fill=FAINT)
        pen.text((_AXIS - 8, y), f"{percent} %", fill=INK, font=font(SMALL), anchor="rm")
    merged = stats.ratios_in_blocks
    for step in sorted(stats.steps):
        a, b = _AXIS + step * each, _AXIS + (step + 1) * each - (2 if each > 6 else 0)
        box = [a, top + merged.get(step, 0.0) * _STRIP, max(a, b), top + _STRIP]
        pen.rectangle(box, fill=MERGED if step in merged else FULL)
    every = next(n for n in (1, 2, 5, 10, 20, 50, 100, 200, 500, total) if n * each >= 44 or n >= total)
    for step in range(0, total, every):
        x = _AXIS + (step + 0.5) * each
        pen.text((x, top + 6 + _STRIP), str(step + 1), fill=INK, font=font(SMALL), anchor="ma")
    return image


def blocks_chart(stats: RunStats, width: int = WIDTH) -> Image.Image:
    """Draw a square for each transformer block, with one row per stack. Colours show whether a block was merged, merged
    in part or not merged. Numbers refer to the reasons in the report's section "Not merged"."""
    unmerged = [{block for block, _ in stats.unmerged[reason]} for reason in stats.unmerged_reasons()]
    stacks: dict[str, list[str]] = {}
    for block in sorted(stats.blocks, key=natural_order):
        stacks.setdefault(block.rpartition(".")[0] or block, []).append(block)
    left = 2 * _PAD + round(max(map(font(SMALL).getlength, stacks), default=0.0))
    columns = max(1, (width - left - _PAD) // _PITCH)
    rows = [(stack, each[n : n + columns]) for stack, each in stacks.items() for n in range(0, len(each), columns)]
    image, pen = canvas(width, len(rows) * _PITCH)
    for row, (stack, blocks) in enumerate(rows):
        y = row * _PITCH
        pen.text((_PAD, y + _SQUARE / 2), stack, fill=INK, font=font(SMALL), anchor="lm")
        for column, block in enumerate(blocks):
            x = left + column * _PITCH
            numbers = [str(n) for n, names in enumerate(unmerged, 1) if block in names]
            colour = (PARTLY if numbers else MERGED) if block in stats.merged_blocks else FULL
            pen.rectangle([x, y, x + _SQUARE - 1, y + _SQUARE - 1], fill=colour)
            middle = x + _SQUARE / 2, y + _SQUARE / 2
            pen.text(middle, ",".join(numbers[:2]), fill=BLACK, font=font(SMALL), anchor="mm")
    return image


@dataclass(frozen=True)
class Bar:
    """A bar of `bar_chart`: the measurement at one ratio or preset."""

    name: str
    value: float  # length of the bar
    label: str  # text above the bar, at the right
    colour: tuple[int, int, int] = MERGED
    spread: tuple[float, float] | None = None  # range of most measurements, drawn as a whisker
    error: float = 0.0  # drawn as a thin bar below, at full length for NaN


def bar_chart(bars: Sequence[Bar]) -> Image.Image:
    """Draw horizontal bars, one below the other."""
    longest = max([1e-9, *(bar.spread[1] if bar.spread else bar.value for bar in bars)])
    largest = max([1e-9, *(bar.error for bar in bars)])  # 1e-9 comes first, because `max` returns a leading NaN
    return joined([canvas(WIDTH, _PAD)[0], *(_bar_row(bar, longest, largest) for bar in bars)])


def _bar_row(bar: Bar, longest: float, largest: float) -> Image.Image:
    image, pen = canvas(WIDTH, _ROW)
    left, right, top = 2 * _PAD, WIDTH - 2 * _PAD, 32
    scale = (right - left) / longest
    pen.text((left, 0), bar.name, fill=INK, font=font())
    pen.text((right, 0), bar.label, fill=INK, font=font(), anchor="ra")
    pen.rectangle([left, top, left + bar.value * scale, top + _THICK], fill=bar.colour)
    if bar.spread:
        low, high = (left + end * scale for end in bar.spread)
        middle = top + _THICK / 2
        for colour, width in ((BLACK, 6), (INK, 2)):
            pen.line([low, middle, high, middle], fill=colour, width=width)
            for end in (low, high):
                pen.line([end, middle - 7, end, middle + 7], fill=colour, width=width)
    if bar.error:
        top += _THICK + 3
        length = min(1.0, bar.error / largest) * (right - left)
        pen.rectangle([left, top, left + length, top + _THIN], fill=ERROR)
    return image


def draw(maps: Mapping[Grid, MergeMap], picture: Tensor | None = None, charts: Sequence[Image.Image] = ()) -> Tensor:
    """Draw one panel for each token grid, side by side, the finest grid first; draw the charts below. Return an IMAGE.
    picture: (B, H, W, C) fp32 in [0, 1]; its first image shows through the panels."""
    photo = None
    if picture is not None:
        pixels = picture[0, ..., :3].detach().float().nan_to_num().clamp(0, 1).mul(255).round().byte()
        photo = Image.fromarray(pixels.expand(-1, -1, 3).cpu().numpy())
    side = (WIDTH + _MARGIN) // max(1, len(maps)) - _MARGIN
    panels = [_panel(maps[grid], photo, side) for grid in sorted(maps, reverse=True)]
    rows = [joined(panels, across=True, gap=_MARGIN)] if panels else []
    return as_image(ImageOps.expand(joined([*rows, *charts, canvas(WIDTH, 0 if rows else _MARGIN)[0]]), _MARGIN, PAPER))


def as_image(sheet: Image.Image) -> Tensor:
    """Return a picture as ComfyUI's IMAGE: (1, H, W, 3), fp32 in [0, 1]."""
    return torch.from_numpy(np.asarray(sheet, dtype=np.float32) / 255.0)[None]


def _panel(merged: MergeMap, photo: Image.Image | None, side: int) -> Image.Image:
    height, width = merged.height, merged.width
    cell = max(2, side // max(height, width))
    caption, pen = canvas(max(width * cell, side), _CAPTION)
    frame = f" (1/{merged.frames})" if merged.frames > 1 else ""
    title = f"{height} x {width}{frame}: {height * width} -> {len(merged.destinations)}"
    pen.text((0, 4), title, fill=INK, font=font())
    grid = _regions(merged, photo, cell)
    pen = ImageDraw.Draw(grid)
    rows, columns = ([cut * cell for cut in cuts] for cuts in merged.cuts)
    for line in [(0, y, grid.width, y) for y in rows] + [(x, 0, x, grid.height) for x in columns]:
        pen.line(line, fill=BLACK, width=max(1, cell // 8))
    radius = max(1, cell // 5)
    for index in merged.destinations.tolist():
        y, x = (index // width + 0.5) * cell, (index % width + 0.5) * cell
        pen.ellipse([x - radius, y - radius, x + radius, y + radius], fill=(255, 255, 255), outline=BLACK)
    return joined([caption, grid])


def _regions(merged: MergeMap, photo: Image.Image | None, cell: int) -> Image.Image:
    """Draw each token in its destination's colour over the photo, with a line where the destination changes."""
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
