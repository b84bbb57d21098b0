"""Draw charts with PIL: tokens by step and by block, and what Benchmark and Calibrate measured.

Colours are Okabe and Ito's, which are told apart with every kind of colour vision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from PIL import Image, ImageDraw, ImageFont

from ..toma_core.stats import RunStats, natural_order

Colour = tuple[int, int, int]
PAPER, INK, FAINT = (250, 250, 250), (20, 20, 20), (205, 205, 205)
MERGED, PARTLY, FULL = (86, 180, 233), (240, 228, 66), (190, 190, 190)
RECOMMENDED, ERROR = (230, 159, 0), (0, 114, 178)
# Sizes of letters: titles, explanations, and in squares.
LARGE, SMALL, _TINY = 22, 18, 14
_PAD = 8
# Heights of the steps' bars and of a legend.
_STRIP, _LEGEND = 110, 32
# Width of the steps' axis labels and of the blocks' stack names.
_AXIS, _LABEL = 76, 150
_SQUARE, _GAP = 26, 3
# `bar_chart`: width, height of a row and of its two bars.
_WIDTH, _ROW, _THICK, _THIN = 720, 88, 26, 9


@cache
def font(size: int = LARGE) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Return Pillow's own font."""
    return ImageFont.load_default(size)


def canvas(width: int, height: int) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    """Return an empty image and a pen for it."""
    image = Image.new("RGB", (width, height), PAPER)
    return image, ImageDraw.Draw(image)


def stacked(*rows: Image.Image) -> Image.Image:
    """Return images one below the other."""
    sheet, _ = canvas(max(row.width for row in rows), sum(row.height for row in rows))
    top = 0
    for row in rows:
        sheet.paste(row, (0, top))
        top += row.height
    return sheet


def text_row(text: str, width: int, size: int = SMALL) -> Image.Image:
    """Return text as an image of this width, each line of the text wrapped."""
    lines = [line for paragraph in text.splitlines() for line in _wrapped(paragraph, width - 2 * _PAD, size)]
    image, pen = canvas(width, len(lines) * (size + 8) + _PAD)
    for number, line in enumerate(lines):
        pen.text((_PAD, 4 + number * (size + 8)), line, fill=INK, font=font(size))
    return image


def steps_chart(stats: RunStats, width: int) -> Image.Image:
    """Draw a bar for each sampling step, as high as the share of the tokens that its merged blocks compute."""
    total = max([stats.total_steps, *(step + 1 for step in stats.steps)])
    image, pen = canvas(width, _STRIP + 40)
    each = (width - _AXIS - _PAD) / max(total, 1)
    for percent in (0, 50, 100):
        y = 10 + _STRIP - percent / 100 * _STRIP
        pen.line([(_AXIS, y), (width - _PAD, y)], fill=FAINT)
        pen.text((_AXIS - 6, y), f"{percent} %", fill=INK, font=font(SMALL), anchor="rm")
    # A step inside the active range merged nothing if every block had a reason against it.
    merged = stats.merged_steps if stats.merged_blocks else {}
    for step in sorted(stats.steps):
        a, b = _AXIS + step * each, _AXIS + (step + 1) * each - (2 if each > 6 else 0)
        box = [a, 10 + merged.get(step, 0.0) * _STRIP, max(a, b), 10 + _STRIP]
        pen.rectangle(box, fill=MERGED if step in merged else FULL, outline=INK if each > 6 else None)
    every = next(n for n in (1, 2, 5, 10, 20, 50, 100, 200, 500, total) if n * each >= 34 or n >= total)
    for step in range(0, total, every):
        x = _AXIS + (step + 0.5) * each
        pen.text((x, 14 + _STRIP), str(step + 1), fill=INK, font=font(SMALL), anchor="ma")
    title = text_row("tokens in merged blocks, by step", width, LARGE)
    return stacked(title, image, _legend(width, [(MERGED, "merged step"), (FULL, "full step")]))


def blocks_chart(stats: RunStats, width: int) -> Image.Image:
    """Draw a square for each transformer block, a row for each stack: merged, merged in part, or not merged.

    Squares show the numbers of the reasons, which are written below.
    """
    reasons: dict[str, list[str]] = {}
    for number, parts in enumerate(stats.unmerged.values(), 1):
        for block in sorted({part.split(" ", 1)[0] for part in parts}):
            reasons.setdefault(block, []).append(str(number))
    stacks: dict[str, list[str]] = {}
    for block in sorted(stats.blocks, key=natural_order):
        stacks.setdefault(block.rpartition(".")[0] or block, []).append(block)
    columns = max(1, (width - _LABEL - 2 * _PAD) // (_SQUARE + _GAP))
    rows = sum(-(-len(blocks) // columns) for blocks in stacks.values())
    image, pen = canvas(width, rows * (_SQUARE + _GAP))
    y = 0
    for stack, blocks in stacks.items():
        pen.text((_PAD, y + _SQUARE / 2), stack, fill=INK, font=font(SMALL), anchor="lm")
        for index, block in enumerate(blocks):
            if index and index % columns == 0:
                y += _SQUARE + _GAP
            x = _LABEL + index % columns * (_SQUARE + _GAP)
            numbers = reasons.get(block, [])
            colour = (PARTLY if numbers else MERGED) if block in stats.merged_blocks else FULL
            pen.rectangle([x, y, x + _SQUARE - 1, y + _SQUARE - 1], fill=colour, outline=INK)
            middle = x + _SQUARE / 2, y + _SQUARE / 2
            pen.text(middle, ",".join(numbers[:2]), fill=INK, font=font(_TINY), anchor="mm")
        y += _SQUARE + _GAP
    legend = _legend(width, [(MERGED, "merged"), (PARTLY, "merged in part"), (FULL, "not merged")])
    notes = "\n".join(f"{number}: {reason}" for number, reason in enumerate(stats.unmerged, 1))
    return stacked(text_row("blocks, by stack", width, LARGE), image, legend, text_row(notes, width))


@dataclass(frozen=True)
class Bar:
    """One setting in `bar_chart`.

    Attributes:
        value: Length of the bar.
        label: Stands above it, at the right.
        spread: Range of most measurements, drawn as a whisker.
        error: Drawn as a thinner bar below, NaN as the largest.
    """

    name: str
    value: float
    label: str
    colour: Colour = MERGED
    spread: tuple[float, float] | None = None
    error: float = 0.0


def bar_chart(verdict: Sequence[object], measure: str, bars: Sequence[Bar], notes: Sequence[object]) -> Image.Image:
    """Draw horizontal bars under a verdict, with notes in small letters below. measure: what the bars' lengths mean."""
    longest = max([1e-9, *(bar.spread[1] if bar.spread else bar.value for bar in bars)])
    farthest = max([1e-9, *(bar.error for bar in bars)])  # the first is no NaN, and is kept beside one
    return stacked(
        text_row("\n".join(map(str, verdict)), _WIDTH, LARGE),
        *(_bar_row(bar, longest, farthest) for bar in bars),
        _legend(_WIDTH, [(MERGED, measure), (ERROR, "error: shorter is closer")]),
        text_row("\n".join(map(str, notes)), _WIDTH, _TINY),
    )


def _bar_row(bar: Bar, longest: float, farthest: float) -> Image.Image:
    image, pen = canvas(_WIDTH, _ROW)
    left, right, top = _PAD, _WIDTH - 2 * _PAD, 30
    scale = (right - left) / longest
    pen.text((left, 0), bar.name, fill=INK, font=font())
    pen.text((right, 0), bar.label, fill=INK, font=font(), anchor="ra")
    pen.rectangle([left, top, left + bar.value * scale, top + _THICK], fill=bar.colour, outline=INK)
    if bar.spread:
        low, high = (left + end * scale for end in bar.spread)
        middle = top + _THICK / 2
        pen.line([(low, middle), (high, middle)], fill=INK, width=2)
        for x in (low, high):
            pen.line([(x, middle - 6), (x, middle + 6)], fill=INK, width=2)
    if bar.error:
        top += _THICK + 4
        length = min(1.0, bar.error / farthest) * (right - left)
        pen.rectangle([left, top, left + length, top + _THIN], fill=ERROR, outline=INK)
    return image


def _legend(width: int, entries: Sequence[tuple[Colour, str]]) -> Image.Image:
    image, pen = canvas(width, _LEGEND)
    x: float = _PAD
    for colour, name in entries:
        pen.rectangle([x, 6, x + SMALL - 1, 5 + SMALL], fill=colour, outline=INK)
        pen.text((x + SMALL + 5, 4), name, fill=INK, font=font(SMALL))
        x += SMALL + 29 + pen.textlength(name, font=font(SMALL))
    return image


def _wrapped(text: str, width: int, size: int) -> list[str]:
    """Return lines of text that are at most `width` pixels wide; a longer word has its own line."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and font(size).getlength(longer) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines
