"""Results of the demo: numbers, their table, and the pictures."""

from __future__ import annotations

import io
import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from textwrap import wrap

import torch
from PIL import Image, ImageDraw, ImageFont

from .checker import FIRST_TEST_SEED
from .scenes import ATTRIBUTES, CANVAS, scene_from_seed
from .showcase_graphs import SAMPLER, Kind

_TOKENS = re.compile(r"(\d+) -> (\d+) \((\d+) x (\d+)\)")
_PAPER, _INK = (34, 34, 36), (230, 230, 230)  # the colours of the report's pictures
_MARGIN, _CAPTION, _PANEL = 16, 30, 256
_SHOWN = 4  # number of a case's pictures on the sheet
_LINE = 18  # height of a line under a picture
_BUSY = 1.5  # no speed-up is reported if speed-ups of single pairs differ by this factor
# The legend of the report's map of merged tokens, for files. On ComfyUI's page the node itself shows the legend.
_MAP = (
    "Dots are destination tokens, the patch around each is merged into it, black lines are windows.",
    "Bars: share of the tokens computed at each step; blue merged, grey full.",
    "Squares: blocks, in the same colours.",
)


@dataclass
class Outcome:
    """One sampled batch: the time of a step, the latents (B, C, h, w) fp32, the pictures, and the report if merged."""

    seconds_per_step: float
    latent: torch.Tensor
    pictures: list[Image.Image]
    report: str = ""
    merge_map: Image.Image | None = None


@dataclass
class Case:
    """A model at one size, and its runs. `plain[i]` and `merged[i]` have the same seed and scenes, and ran in
    succession."""

    kind: Kind
    pixels: int
    plain: list[Outcome] = field(default_factory=list)
    merged: list[Outcome] = field(default_factory=list)
    steps: int = 8
    batch: int = 1  # pictures of a run

    @property
    def name(self) -> str:
        return f"{self.kind.title} {self.pixels}x{self.pixels}"

    @property
    def draws(self) -> bool:
        """Return whether the case's pictures show a scene. At sizes other than that of the training, the pictures are
        noise."""
        return self.kind.trained and self.pixels == CANVAS

    @property
    def tokens(self) -> str:
        """Return "before -> after", the tokens of every merged grid from the report, the finest grid first."""
        found = _TOKENS.findall(self.merged[0].report)
        return ", ".join(f"{int(before):,} -> {int(after):,}" for before, after, _, _ in found) or "none merged"

    @property
    def seconds(self) -> tuple[float, float]:
        """Return the median seconds per step without and with ToMA."""
        plain, merged = ([run.seconds_per_step for run in runs] for runs in (self.plain, self.merged))
        return statistics.median(plain), statistics.median(merged)

    @property
    def speed_ratios(self) -> list[float]:
        """Return for each pair the seconds without ToMA divided by the seconds with ToMA."""
        pairs = zip(self.plain, self.merged, strict=True)
        return [plain.seconds_per_step / merged.seconds_per_step for plain, merged in pairs]

    @property
    def speedup(self) -> float:
        """Return the median time without ToMA divided by the median time with it."""
        plain, merged = self.seconds
        return plain / merged

    @property
    def busy(self) -> bool:
        """Return whether the pairs differ so much that no speed-up is reported."""
        return max(self.speed_ratios) > _BUSY * min(self.speed_ratios)

    @property
    def faster(self) -> str:
        """Return the speed-up as text, or why no speed-up is reported."""
        return "this machine is too busy to tell" if self.busy else f"{self.speedup:.2f}x"

    @property
    def error(self) -> float:
        """Return the median of the merged latents' relative errors, one for each seed."""
        pairs = zip(self.plain, self.merged, strict=True)
        return statistics.median(relative_error(merged.latent, plain.latent) for plain, merged in pairs)

    @property
    def seed_error(self) -> float | None:
        """Return the relative error of an unmerged latent against one of another seed. Return None if there is only one
        seed."""
        if len(self.plain) < 2:
            return None
        return relative_error(self.plain[1].latent, self.plain[0].latent)


class StepClock:
    """Times the sampler by the server's websocket messages. Pass it to `ComfyClient.run` as `on_message`.

    The clock runs from the end of the first step to the end of sampling. This time is divided by the number of steps in
    between. So it includes making the plans of all steps but the first.
    """

    def __init__(self, now: Callable[[], float], on_step: Callable[[int, int], None] | None = None) -> None:
        """Store the callbacks. now: a clock in seconds. on_step(done, total): called after every step."""
        self._now, self._on_step = now, on_step
        self._first: float | None = None
        self._end: float | None = None
        self._steps = 0

    def __call__(self, kind: str, data: object) -> None:
        if not isinstance(data, dict):
            return
        if kind == "progress" and data.get("node") == SAMPLER:
            self._steps = int(data["value"])
            if self._first is None and self._steps == 1:
                self._first = self._now()
            if self._on_step is not None:
                self._on_step(self._steps, int(data["max"]))
        elif kind == "executing" and self._steps and self._end is None and data.get("node") != SAMPLER:
            self._end = self._now()

    @property
    def seconds_per_step(self) -> float:
        """Return the mean time of a step. Raises ValueError unless two or more steps have ended."""
        if self._first is None or self._end is None or self._steps < 2:
            raise ValueError(f"the sampler was seen for {self._steps} steps; at least two are needed")
        return (self._end - self._first) / (self._steps - 1)


def relative_error(latent: torch.Tensor, reference: torch.Tensor) -> float:
    """Return ||latent - reference|| / ||reference|| over all elements, in fp64. Raises ValueError if the shapes
    differ."""
    if latent.shape != reference.shape:
        raise ValueError(f"latents of {tuple(latent.shape)} and {tuple(reference.shape)} cannot be compared")
    return float((latent.double() - reference.double()).norm() / reference.double().norm())


def table(cases: list[Case]) -> str:
    """Format the results as aligned text, one line per case."""
    head = ("model", "size", "tokens", "faster", "(pairs)", "s/step without", "with ToMA", "error")
    rows = [head]
    for case in cases:
        ratios = case.speed_ratios
        plain, merged = case.seconds
        rows.append(
            (
                case.kind.title,
                f"{case.batch} of {case.pixels}x{case.pixels}",
                case.tokens,
                "too busy to tell" if case.busy else case.faster,
                "" if case.busy else f"({min(ratios):.2f}-{max(ratios):.2f}, {len(ratios)})",
                "" if case.busy else f"{plain:.3f}",
                "" if case.busy else f"{merged:.3f}",
                f"{case.error:.3f}" if case.draws else "-",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def explanation(cases: list[Case], device: str) -> str:
    """Return the notes below the table."""
    steps = ", ".join(dict.fromkeys(f"{case.steps} of {case.kind.title}" for case in cases))
    lines = [
        f"Measured on {device}: Euler, cfg 2, steps: {steps} (5 without an error); interleaved pairs after a warm-up, "
        "medians; in brackets the range and number of pairs. Seconds depend on this machine and its load; compare the "
        "ratio.",
    ]
    if any(case.busy for case in cases):
        lines.append("Too busy to tell: single pairs differ widely, so something else is using this machine.")
    slower = [case for case in cases if not case.busy and case.speedup < 1.05]
    if slower:
        lines.append(
            f"Hardly faster or slower: {', '.join(case.name for case in slower)}. With so few tokens in so narrow a "
            "model the work that is saved is no larger than the merge's own; real SDXL and Flux are 10 to 24 times "
            "wider."
        )
    lines.append(
        "Error: relative L2 of the final latent against the one without ToMA from the same seed. Up to 0.03 it is hard "
        "to see, at 0.1 small shapes differ, at 0.3 it is visibly another picture."
    )
    seeds = next((case.seed_error for case in cases if case.draws and case.seed_error), None)
    if seeds:
        lines.append(f"For scale: two seeds without ToMA have an error of {seeds:.2f}.")
    if not all(case.draws for case in cases):
        lines.append(
            f"Without an error: timing only. The models were trained at {CANVAS}x{CANVAS}; of another size, or with "
            "random weights, pictures are noise. What they can draw is in demo/weights/MODEL_CARD.md."
        )
    return "\n".join(lines)


def side_by_side(cases: list[Case]) -> Image.Image:
    """Draw two rows of pictures for each case that draws scenes: without ToMA, and below it with ToMA. Each picture has
    its seconds below it. A picture with ToMA also has its error and the prompt."""
    rows = []
    for case in _drawn(cases):
        plain, merged = case.plain[0], case.merged[0]
        for title, run in (("without ToMA", plain), ("with ToMA", merged)):
            panels = []
            for index, picture in enumerate(run.pictures[:_SHOWN]):
                seconds = run.seconds_per_step * case.steps / len(run.pictures)
                lines = ["" if case.busy else f"{seconds:.2f} s"]
                if run is merged:
                    lines[0] += f"   error {relative_error(merged.latent[index], plain.latent[index]):.3f}"
                    lines += wrap(_prompt(FIRST_TEST_SEED + index), 34)
                panels.append((picture, lines))
            rows.append((f"{case.name}, {title}: {case.steps} steps", panels))
    return _sheet(rows)


def _prompt(seed: int) -> str:
    scene = scene_from_seed(seed)
    said = {name: ATTRIBUTES[name][value] for name, value in zip(ATTRIBUTES, scene.values(), strict=True)}
    objects = "" if said["objects"] == "none" else "{object_count} {object_colour} {objects}, "
    return f"{{shape_size}} {{shape_colour}} {{shape}} on {{background}}, {objects}{{word}}".format(**said)


def _drawn(cases: list[Case]) -> list[Case]:
    """Return the cases that draw a scene, or all cases if none does."""
    return [case for case in cases if case.draws] or cases


def merge_maps(cases: list[Case]) -> Image.Image:
    """Stack the report's maps of every case that draws a scene, with a legend."""
    shown = [(case.name, image) for case in _drawn(cases) if (image := case.merged[0].merge_map) is not None]
    width = max(image.width for _, image in shown)
    height = sum(image.height + _CAPTION for _, image in shown) + len(_MAP) * _CAPTION
    sheet = Image.new("RGB", (width, height), _PAPER)
    pen, top = ImageDraw.Draw(sheet), 0
    for line in _MAP:
        pen.text((_MARGIN, top + 8), line, fill=_INK, font=font(18))
        top += _CAPTION
    for title, image in shown:
        pen.text((_MARGIN, top + 4), title, fill=_INK, font=font(20))
        sheet.paste(image, (0, top + _CAPTION))
        top += image.height + _CAPTION
    return sheet


def _sheet(rows: list[tuple[str, list[tuple[Image.Image, list[str]]]]]) -> Image.Image:
    columns = max(len(panels) for _, panels in rows)
    heights = [_CAPTION + _PANEL + _MARGIN + _LINE * max(len(lines) for _, lines in panels) for _, panels in rows]
    sheet = Image.new("RGB", (columns * (_PANEL + _MARGIN) + _MARGIN, sum(heights) + _MARGIN), _PAPER)
    pen, top = ImageDraw.Draw(sheet), _MARGIN
    for (title, panels), height in zip(rows, heights, strict=True):
        pen.text((_MARGIN, top), title, fill=_INK, font=font(18))
        for column, (picture, lines) in enumerate(panels):
            left, below = _MARGIN + column * (_PANEL + _MARGIN), top + _CAPTION + _PANEL
            sheet.paste(fitted(picture, _PANEL), (left, top + _CAPTION))
            for number, line in enumerate(lines):
                pen.text((left, below + 2 + number * _LINE), line, fill=_INK, font=font(14))
        top += height
    return sheet


def fitted(picture: Image.Image, side: int) -> Image.Image:
    """Resize the picture to a square of `side` pixels. Enlarging does not smooth, so that single pixels are visible."""
    small = picture.width < side
    return picture.convert("RGB").resize((side, side), Image.Resampling.NEAREST if small else Image.Resampling.LANCZOS)


def font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Return Pillow's own font, so that pictures are the same on every machine."""
    try:
        return ImageFont.load_default(size)
    except TypeError:  # Pillow before 10.1 has only one size
        return ImageFont.load_default()


def opened(png: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(png))
    image.load()
    return image.convert("RGB")
