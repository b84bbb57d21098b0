"""Draw charts with PIL: tokens by step and by block, and what Benchmark and Calibrate measured.

A `Caption` on the node explains each picture in the language of the page. The colours of Okabe and Ito can be
distinguished with every kind of colour vision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from PIL import Image, ImageDraw, ImageFont

from ..toma_core.reasons import MessageId
from ..toma_core.stats import RunStats
from .adapters.report_text import natural_order

Colour = tuple[int, int, int]
# PAPER is as dark as ComfyUI's page; BLACK is for text on colours.
PAPER, INK, FAINT, BLACK = (34, 34, 36), (230, 230, 230), (84, 84, 88), (16, 16, 16)
MERGED, PARTLY, FULL = (86, 180, 233), (240, 228, 66), (150, 150, 150)
RECOMMENDED, ERROR = (230, 159, 0), (204, 121, 167)
# Width of a picture and sizes of its letters, in pixels: large, because a node shows pictures at about half size.
WIDTH, LARGE, SMALL = 784, 24, 22
_PAD = 8
_STRIP, _AXIS = 110, 84  # for `steps_chart`: height of the bars, width of the axis labels
_SQUARE, _PITCH = 32, 35  # for `blocks_chart`: side of a square, distance from square to square
_ROW, _THICK, _THIN = 84, 28, 10  # for `bar_chart`: height of a row, and of its two bars


class Caption(MessageId):
    PICTURE = "picture"
    MAP = "caption_map"
    STEPS = "caption_steps"
    BLOCKS = "caption_blocks"
    TIME = "caption_time"
    WORK = "caption_work"


@cache
def font(size: int = LARGE) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Return Pillow's own font."""
    return ImageFont.load_default(size)


def canvas(width: int, height: int) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    """Return an empty image and a pen that draws on it."""
    image = Image.new("RGB", (width, height), PAPER)
    return image, ImageDraw.Draw(image)


def joined(images: Sequence[Image.Image], across: bool = False, gap: int = 0) -> Image.Image:
    """Return one image of all images, one below the other or, with `across`, side by side. gap: pixels between."""
    widths, heights = zip(*(image.size for image in images), strict=True)
    space = gap * (len(images) - 1)
    sheet, _ = canvas(sum(widths) + space, max(heights)) if across else canvas(max(widths), sum(heights) + space)
    at = 0
    for image in images:
        sheet.paste(image, (at, 0) if across else (0, at))
        at += gap + (image.width if across else image.height)
    return sheet


def steps_chart(stats: RunStats, width: int = WIDTH) -> Image.Image:
    """Draw a bar for each sampling step: its height is the share of tokens that merged blocks compute."""
    total = max([stats.total_steps, *(step + 1 for step in stats.steps)])
    image, pen = canvas(width, _STRIP + 58)
    each, top = (width - _AXIS - _PAD) / max(total, 1), 20
    for percent in (0, 50, 100):
        y = top + _STRIP - percent / 100 * _STRIP
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
    """Draw a square for each transformer block, with one row per stack.

    The square's colour shows whether the block was merged, merged in part or not merged. The numbers in the square
    refer to the reasons in the report's section "Not merged".
    """
    reasons: dict[str, list[str]] = {}
    for number, reason in enumerate(stats.unmerged_reasons(), 1):
        for block in {each.block for each in stats.unmerged[reason] if each.block is not None}:
            reasons.setdefault(block, []).append(str(number))
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
            numbers = reasons.get(block, [])
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
    colour: Colour = MERGED
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
        lines = (low, middle, high, middle), *((x, middle - 7, x, middle + 7) for x in (low, high))
        for colour, width in ((BLACK, 6), (INK, 2)):
            for line in lines:
                pen.line(line, fill=colour, width=width)
    if bar.error:
        top += _THICK + 3
        length = min(1.0, bar.error / largest) * (right - left)
        pen.rectangle([left, top, left + length, top + _THIN], fill=ERROR)
    return image
