"""Charts with PIL alone: where tokens went by step and by block, and what the benchmark measured.

Colours are Okabe and Ito's, which are told apart with every kind of colour vision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

from ..toma_core.stats import RunStats, natural_order

Colour = tuple[int, int, int]
PAPER, INK, FAINT = (250, 250, 250), (20, 20, 20), (205, 205, 205)
MERGED, PARTLY, WHOLE = (86, 180, 233), (240, 228, 66), (190, 190, 190)
RECOMMENDED, SECOND = (230, 159, 0), (0, 114, 178)
# Letters of titles, of what explains them, and in squares.
LARGE, SMALL, _TINY = 22, 18, 14
_PAD = 8
_LABEL = 150
_STRIP = 110
_SQUARE = 26
_GAP = 3
_TOP, _LINE = 38, 26


def font(size: int = LARGE) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """The font that comes with Pillow."""
    try:
        return ImageFont.load_default(size)
    except TypeError:  # Pillow before 10.1 has one size
        return ImageFont.load_default()


def steps_chart(stats: RunStats, width: int) -> Image.Image:
    """A bar for each sampling step, as high as the share of the tokens that its merged blocks worked on."""
    total = max([stats.total_steps, *(step + 1 for step in stats.steps)])
    image = Image.new("RGB", (width, _TOP + _STRIP + 2 * _LINE + 16), PAPER)
    pen = ImageDraw.Draw(image)
    pen.text((_PAD, 4), "tokens in merged blocks, by step", fill=INK, font=font())
    top, left = _TOP, 76
    each = (width - left - _PAD) / max(total, 1)
    for percent in (0, 50, 100):
        y = top + _STRIP - percent / 100 * _STRIP
        pen.line([(left, y), (width - _PAD, y)], fill=FAINT)
        pen.text((left - 6, y), f"{percent} %", fill=INK, font=font(SMALL), anchor="rm")
    # A step inside the active range merged nothing if every block had a reason to stay whole.
    merged = stats.merged_steps if stats.merged_blocks else {}
    for step in sorted(stats.steps):
        share = 1 - merged.get(step, 0.0)
        a, b = left + step * each, left + (step + 1) * each - (2 if each > 6 else 0)
        box = [a, top + (1 - share) * _STRIP, max(a, b), top + _STRIP]
        pen.rectangle(box, fill=MERGED if step in merged else WHOLE, outline=INK if each > 6 else None)
    every = next(n for n in (1, 2, 5, 10, 20, 50, 100, 200, 500, total) if n * each >= 34 or n >= total)
    for step in range(0, total, every):
        x = left + (step + 0.5) * each
        pen.text((x, top + _STRIP + 4), str(step + 1), fill=INK, font=font(SMALL), anchor="ma")
    _legend(pen, left, top + _STRIP + 32, [(MERGED, "merged step"), (WHOLE, "full step")])
    return image


def blocks_chart(stats: RunStats, width: int) -> Image.Image:
    """A square for each transformer block, a row for each stage: merged, merged in part, or unmerged with the number of
    the reason, which is spelled out below."""
    reasons = list(stats.unmerged)
    why: dict[str, list[int]] = {}
    for number, reason in enumerate(reasons, 1):
        for part in sorted(stats.unmerged[reason]):
            numbers = why.setdefault(part.split(" ", 1)[0], [])
            if number not in numbers:
                numbers.append(number)
    stages: dict[str, list[str]] = {}
    for block in sorted(stats.blocks, key=natural_order):
        stages.setdefault(block.rpartition(".")[0] or block, []).append(block)
    columns = max(1, (width - _LABEL - 2 * _PAD) // (_SQUARE + _GAP))
    rows = sum(-(-len(blocks) // columns) for blocks in stages.values())
    notes = [line for n, reason in enumerate(reasons, 1) for line in _wrapped(f"{n}: {reason}", width - 2 * _PAD)]
    image = Image.new("RGB", (width, _TOP + rows * (_SQUARE + _GAP) + 36 + _LINE * len(notes) + _PAD), PAPER)
    pen = ImageDraw.Draw(image)
    pen.text((_PAD, 4), "blocks, by stage", fill=INK, font=font())
    y = _TOP
    for stage, blocks in stages.items():
        pen.text((_PAD, y + _SQUARE / 2), stage, fill=INK, font=font(SMALL), anchor="lm")
        for index, block in enumerate(blocks):
            if index and index % columns == 0:
                y += _SQUARE + _GAP
            x = _LABEL + index % columns * (_SQUARE + _GAP)
            merged, numbers = block in stats.merged_blocks, why.get(block, [])
            colour = (PARTLY if numbers else MERGED) if merged else WHOLE
            pen.rectangle([x, y, x + _SQUARE - 1, y + _SQUARE - 1], fill=colour, outline=INK)
            if numbers:
                text = ",".join(map(str, numbers[:2]))
                pen.text((x + _SQUARE / 2, y + _SQUARE / 2), text, fill=INK, font=font(_TINY), anchor="mm")
        y += _SQUARE + _GAP
    _legend(pen, _PAD, y + 6, [(MERGED, "merged"), (PARTLY, "merged in part"), (WHOLE, "unmerged")])
    for line_number, line in enumerate(notes):
        pen.text((_PAD, y + 36 + _LINE * line_number), line, fill=INK, font=font(SMALL))
    return image


@dataclass(frozen=True)
class Bar:
    """One bar of `bar_chart`: its value, the range that most of its measurements lie in, what stands above it, and a
    second value between 0 and 1, drawn as a thinner bar below."""

    name: str
    value: float
    low: float
    high: float
    label: str
    colour: Colour = MERGED
    second: float = 0.0


def bar_chart(verdict: Sequence[str], bars: Sequence[Bar], notes: Sequence[str], width: int = 720) -> Image.Image:
    """Horizontal bars from zero, the range of each as a whisker, under the verdict; `notes` stand below in small print.
    Its letters are large: a node shows the picture at about half its width."""
    row, thick, thin, left, right = 88, 26, 9, 2 * _PAD, width - 2 * _PAD
    told = [line for sentence in verdict for line in _wrapped(sentence, right - left, 24)]
    lines = [line for note in notes for line in _wrapped(note, right - left, 14)]
    top = 2 * _PAD + 32 * len(told) + 8
    image = Image.new("RGB", (width, top + row * len(bars) + 34 + 20 * len(lines) + _PAD), PAPER)
    pen = ImageDraw.Draw(image)
    for index, line in enumerate(told):
        pen.text((left, 2 * _PAD + 32 * index), line, fill=INK, font=font(24))
    scale = (right - left) / max(*(bar.high for bar in bars), *(bar.value for bar in bars), 1e-9)
    for bar in bars:
        pen.text((left, top), bar.name, fill=INK, font=font(22))
        pen.text((right, top), bar.label, fill=INK, font=font(22), anchor="ra")
        y = top + 30
        pen.rectangle([left, y, left + bar.value * scale, y + thick], fill=bar.colour, outline=INK)
        low, high, middle = left + bar.low * scale, left + bar.high * scale, y + thick / 2
        pen.line([(low, middle), (high, middle)], fill=INK, width=2)
        for x in (low, high):
            pen.line([(x, middle - 6), (x, middle + 6)], fill=INK, width=2)
        if bar.second:
            y += thick + 4
            pen.rectangle([left, y, left + bar.second * (right - left), y + thin], fill=SECOND, outline=INK)
        top += row
    _legend(pen, left, top, [(MERGED, "time: shorter is faster"), (SECOND, "error: shorter is closer")])
    for index, line in enumerate(lines):
        pen.text((left, top + 34 + 20 * index), line, fill=INK, font=font(14))
    return image


@dataclass(frozen=True)
class Dot:
    """A setting in `front_chart`: its work left and error, and what stands beside it. hollow: only predicted."""

    work: float
    error: float
    label: str
    colour: Colour
    hollow: bool = False


def front_chart(
    verdict: Sequence[str],
    front: Sequence[tuple[float, float]],
    dots: Sequence[Dot],
    notes: Sequence[str],
    width: int = 720,
) -> Image.Image:
    """Distance against work left, 0 to 1, under the verdict: the predicted front as a line, settings as dots; `notes`
    stand below in small print. Its letters are as large as those of `bar_chart`."""
    left, high, right = 84, 330, width - 2 * _PAD
    told = [
        (line, size)
        for n, sentence in enumerate(verdict)
        for size in (24 if n == 0 else 18,)
        for line in _wrapped(sentence, right - 2 * _PAD, size)
    ]
    lines = [line for note in notes for line in _wrapped(note, right - 2 * _PAD, 14)]
    top = 3 * _PAD + sum(size + 8 for _, size in told)
    image = Image.new("RGB", (width, top + high + 66 + 20 * len(lines) + _PAD), PAPER)
    pen, y = ImageDraw.Draw(image), 2.0 * _PAD
    for line, size in told:
        pen.text((2 * _PAD, y), line, fill=INK, font=font(size))
        y += size + 8
    # So far as there is a dot: what lies far beyond is of no use to anybody.
    farthest = 1.6 * max([*(dot.error for dot in dots), 1e-3])
    least = min([*(work for work, error in front if error <= farthest), *(dot.work for dot in dots), 0.95])
    across = right - left - 150

    def at(work: float, error: float) -> tuple[float, float]:
        return left + (work - least) / (1 - least) * across, top + high - min(error / farthest, 1.0) * high

    for part in range(5):
        work, error = least + (1 - least) * part / 4, farthest * part / 4
        x, y = at(work, error)
        pen.line([(x, top), (x, top + high)], fill=FAINT)
        pen.line([(left, y), (left + across, y)], fill=FAINT)
        pen.text((x, top + high + 6), f"{100 * work:.0f} %", fill=INK, font=font(16), anchor="ma")
        pen.text((left - 6, y), f"{error:.3f}", fill=INK, font=font(16), anchor="rm")
    told_of = "error against work left in the blocks: lower and further left is better"
    pen.text((2 * _PAD, top + high + 32), told_of, fill=INK, font=font(16))
    points = [at(work, error) for work, error in front if error <= farthest]
    if len(points) > 1:
        pen.line(points, fill=INK, width=2)
    for dot in dots:
        x, y = at(dot.work, dot.error)
        pen.ellipse([x - 8, y - 8, x + 8, y + 8], fill=None if dot.hollow else dot.colour, outline=INK, width=2)
        pen.text((x + 14, y), dot.label, fill=INK, font=font(18), anchor="lm")
    for index, line in enumerate(lines):
        pen.text((2 * _PAD, top + high + 62 + 20 * index), line, fill=INK, font=font(14))
    return image


def _legend(
    pen: ImageDraw.ImageDraw, x: float, y: float, entries: Sequence[tuple[Colour, str]], size: int = SMALL
) -> None:
    for colour, name in entries:
        pen.rectangle([x, y + 2, x + size - 1, y + size + 1], fill=colour, outline=INK)
        pen.text((x + size + 5, y), name, fill=INK, font=font(size))
        x += size + 5 + pen.textlength(name, font=font(size)) + 24


def _wrapped(text: str, width: int, size: int = SMALL) -> list[str]:
    """Lines of `text` that are at most so many pixels wide; a longer word has a line of its own."""
    pen = ImageDraw.Draw(Image.new("RGB", (1, 1)))
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and pen.textlength(longer, font=font(size)) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines
