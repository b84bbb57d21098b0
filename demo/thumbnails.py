"""Draw the thumbnails of workflows/ from the workflows themselves: `python -m demo.thumbnails`.

ComfyUI's page prints the name of a template below its thumbnail. The thumbnail shows the purpose of the template, the
steps and the counted saving of work (or the output of the template's tool), and the chain of nodes that the model
passes.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from benchmarks.readme import Gain, saved
from scripts.comfyui import ROOT
from toma_core import ToMAConfig
from toma_core.config import KVCache
from toma_core.schedule import Schedule

FOLDER, IMAGES = ROOT / "workflows", ROOT / "docs" / "images"
SIDE = 512
MOST_BYTES = 60_000
_MARGIN = 36
_TOP, _BOTTOM = 186, 386  # top and bottom of the picture in the middle
_BOARD, _NODE, _PAPER, _FAINT = (32, 36, 44), (58, 66, 82), (250, 250, 250), (176, 184, 198)
_OURS = (138, 92, 40)
_FULL, _MERGED, _RECOMMENDED = (148, 148, 148), (86, 180, 233), (230, 159, 0)  # the colours in the charts of the nodes
# Word in the name of a workflow -> colour (Okabe and Ito's). If a name has several of these words, the first in the
# name counts.
_BANDS = {
    "Benchmark": (240, 228, 66),
    "SDXL": (0, 114, 178),
    "Flux": (0, 158, 115),
    "Z-Image": (204, 121, 167),
    "Qwen": (213, 94, 0),
    "video": (86, 180, 233),
}
FULL_STEP_INTERVAL = 4  # copied from `balanced`, because presets need ComfyUI; a test compares it with the preset


@dataclass(frozen=True)
class Thumbnail:
    """The content of a workflow's thumbnail.

    purpose: one line or two. runs: number of steps of each run of a model. gain: the run whose saving of work is shown:
    (model, side) in the table of runs, or the name of a template's run. picture: the output of the tool, in place of
    steps.
    """

    purpose: str
    runs: tuple[int, ...] = ()
    gain: tuple[str, str] | str = ""
    picture: str = ""


_SDXL = ("SDXL", "1024")
# Name of a workflow -> its thumbnail, in the order in which users need the workflows.
THUMBNAILS = {
    "01 SDXL": Thumbnail("Begin here:\none node", (30,), _SDXL),
    "02 Z-Image Turbo": Thumbnail("Fast pictures\nwith text", (8,), ("Z-Image", "1024")),
    "03 SDXL compare": Thumbnail("Without ToMA\nand with it", picture="pair"),
    "04 SDXL few steps": Thumbnail("Lightning and\nTurbo models", (4,), _SDXL),
    "05 Benchmark SDXL": Thumbnail("How fast on\nyour card?", picture="times"),
    "06 Benchmark Z-Image": Thumbnail("How fast on\nyour card?", picture="times"),
    "07 Qwen-Image-Edit": Thumbnail("Edit a picture\nin 4 steps", (4,)),
    "08 Qwen-Image 2.1 turbo": Thumbnail("8 steps,\na large model", (8,), ("Qwen-Image 2.1", "1024")),
    "09 Qwen-Image 2.1 edit": Thumbnail("From one picture,\nor from two", (25,)),
    "10 Wan 2.2 image to video": Thumbnail("A clip in 4 steps,\ntwo models", (2, 2), ("Wan 14B", "832 x 480 x 81")),
    "11 LTX-2.3 image to video": Thumbnail("A clip with sound,\ntwo stages", (8, 3), "LTX-2.3, both"),
    "12 MiniMax H3 image to video": Thumbnail("A clip with sound,\nturbo LoRA", (8,), "H3, 8 steps at 1344 x 768 x 73"),
    "13 Flux": Thumbnail("Flux.1 dev,\nfp8", (20,), ("Flux.1", "1024")),
    "14 Flux.2 Klein": Thumbnail("A small model,\n4 steps", (4,)),
    "15 SDXL hires fix 2048": Thumbnail("Large pictures:\nmost to gain", picture="sizes"),
    "16 SDXL LoRA + ControlNet": Thumbnail("The order\nof nodes", (30,), _SDXL),
    "17 SDXL advanced + report": Thumbnail("See what was\nmerged where", picture="map"),
    "18 SDXL calibrate": Thumbnail("Less error, for\nyour checkpoint", picture="errors"),
    "19 Z-Image Turbo.app": Thumbnail("A form,\nno graph", picture="form"),
}
# Prefix of a node type -> label of the node in the chain. Nodes without a label are not drawn.
_CALLED = {
    **{"CheckpointLoader": "model", "UNETLoader": "model", "Lora": "LoRA", "ToMAReport": "report", "ToMA": "ToMA"},
    **{"KSamplerSelect": "", "KSampler": "sampler", "SamplerCustom": "sampler", "ImageCompare": "compare"},
}


def main() -> None:
    """Parse the command line and write every thumbnail, or the named ones."""
    parser = argparse.ArgumentParser(prog="python -m demo.thumbnails", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=FOLDER)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(THUMBNAILS)}; all if none is given")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(THUMBNAILS)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    for name in arguments.names or THUMBNAILS:
        path = arguments.output / f"{name}.jpg"
        drawn(name).save(path, quality=90, optimize=True)
        print(f"{path.name}: {path.stat().st_size:,} bytes", flush=True)


def chain(workflow: dict[str, Any]) -> list[str]:
    """Return the labels of the nodes that the model passes, in order. A label of several nodes appears once, with the
    number of nodes."""
    labels = [
        next((label for start, label in _CALLED.items() if node["type"].startswith(start)), "")
        for node in sorted(workflow["nodes"], key=lambda node: node["order"])
    ]
    counts = Counter(label for label in labels if label)
    order = list(dict.fromkeys(label for label in _CALLED.values() if label))
    order.append(order.pop(order.index("report")))  # the report comes after the sampler
    return [label if counts[label] == 1 else f"{counts[label]} x {label}" for label in order if counts[label]]


def drawn(name: str) -> Image.Image:
    """Draw the thumbnail of a workflow, SIDE x SIDE."""
    thumbnail = THUMBNAILS[name]
    image = Image.new("RGB", (SIDE, SIDE), _BOARD)
    pen = ImageDraw.Draw(image)
    pen.rectangle((0, 0, SIDE, 20), next(colour for word, colour in _BANDS.items() if word in name))
    lines = thumbnail.purpose.split("\n")
    pen.multiline_text((_MARGIN, 36), thumbnail.purpose, _PAPER, _fitting(lines, 60, SIDE - 2 * _MARGIN), spacing=8)
    if thumbnail.picture:
        _PICTURES[thumbnail.picture](image, pen)
    else:
        _steps(pen, name)
    boxes = chain(json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8")))
    gap = 14
    width = (SIDE - 2 * _MARGIN - gap * (len(boxes) - 1)) / len(boxes)
    font = _fitting(boxes, 34, width - 12)
    pen.line((_MARGIN, 446, SIDE - _MARGIN, 446), _FAINT, 4)
    for index, label in enumerate(boxes):
        left = _MARGIN + index * (width + gap)
        pen.rounded_rectangle((left, 410, left + width, 482), 12, _OURS if "ToMA" in label else _NODE, _FAINT, 2)
        pen.text((left + width / 2, 446), label, _PAPER, font, anchor="mm")
    return image


def merged_steps(name: str) -> list[list[bool]]:
    """Return for each step of each run of a workflow whether `balanced` merges the step, as ToMA Report lists it."""
    thumbnail, nodes = THUMBNAILS[name], json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))["nodes"]
    interval = 0 if thumbnail.gain == _SDXL else FULL_STEP_INTERVAL
    config = ToMAConfig(full_step_interval=interval, kv_cache=KVCache(interval > 0))
    listed = [node["widgets_values"][0] for node in nodes if node["type"] == "ManualSigmas"]
    runs = []
    for index, steps in enumerate(thumbnail.runs):
        sigmas = [1 - step / steps for step in range(steps)]
        if listed:
            sigmas = [float(sigma) for sigma in listed[index].split(",")][:steps]
        # Runs with listed sigmas are separate stages. All other runs share one schedule, as the two models of Wan 2.2
        # do.
        ends, continues = bool(listed) or index == len(thumbnail.runs) - 1, not listed and index > 0
        schedule = Schedule(config, tuple(sigmas), finishes=ends, continues_run=continues)
        runs.append([schedule.decide(sigma, step).mode.merges for step, sigma in enumerate(sigmas)])
    return runs


def _steps(pen: Any, name: str) -> None:
    """Draw a bar for each step, half as high if the step is merged, and the saving of work."""
    thumbnail, runs = THUMBNAILS[name], merged_steps(name)
    count, gap = sum(map(len, runs)), 24 * (len(runs) - 1)
    width = min(40, (SIDE - 2 * _MARGIN - gap) / count)
    left = float(_MARGIN)
    floor = 296
    for run in runs:
        for merged in run:
            top = floor - (50 if merged else 100)
            pen.rectangle((left, top, left + width - 4, floor), _MERGED if merged else _FULL)
            left += width
        left += 24
    number = sum(map(sum, runs))
    text = f"{'every step' if number == count else f'{number} of {count} steps'} on half of the tokens"
    pen.text((_MARGIN, 306), text, _FAINT, _fitting([text], 30, SIDE - 2 * _MARGIN))
    if thumbnail.gain:
        counted = "20" if thumbnail.gain == _SDXL else str(count)  # SDXL saves the same share in any number of steps
        text = f"{saved(Gain('', counted, thumbnail.gain))} less work, counted"
        pen.text((_MARGIN, 346), text, _PAPER, _fitting([text], 36, SIDE - 2 * _MARGIN))


def _pair(image: Image.Image, pen: Any) -> None:
    with Image.open(IMAGES / "pair.jpg") as rows:
        for index, top in enumerate((0, 134)):
            part = rows.crop((256, top, 384, top + 128)).resize((192, 192), Image.Resampling.LANCZOS)
            image.paste(part, (_MARGIN + index * 248, _TOP + 4))


def _map(image: Image.Image, pen: Any) -> None:
    with Image.open(IMAGES / "report.png") as report:
        image.paste(
            report.convert("RGB").crop((210, 240, 210 + 576, 240 + 250)).resize((440, 191)), (_MARGIN, _TOP + 4)
        )


def _bars(pen: Any, lengths: Sequence[float], colours: Sequence[Any], labels: Sequence[str], inside: str = "") -> None:
    """Draw bars with a label before each. inside: text that is written across the bars, from the first bar on."""
    font = _fitting(labels, 28, 120)
    for index, (length, colour, label) in enumerate(zip(lengths, colours, labels, strict=True)):
        top = _TOP + 12 + index * 192 // len(lengths)
        pen.text((_MARGIN, top + 14), label, _FAINT, font, anchor="lm")
        pen.rectangle((_MARGIN + 130, top, _MARGIN + 130 + 310 * length, top + 28), colour)
        word = inside.split()[index] if inside else ""
        pen.text((_MARGIN + 140, top + 14), word, _BOARD, ImageFont.load_default(22), anchor="lm")


def _times(image: Image.Image, pen: Any) -> None:
    """Draw bars as ToMA Benchmark does, with invented lengths."""
    _bars(pen, (1, 0.86, 0.72, 0.6), (_FULL, _MERGED, _MERGED, _RECOMMENDED), ("without", "low", "middle", "high"))
    pen.text((SIDE - _MARGIN, _BOTTOM - 66), "?", _PAPER, ImageFont.load_default(110), anchor="rm")


def _errors(image: Image.Image, pen: Any) -> None:
    """Draw the work and error of a preset and of a profile, as ToMA Calibrate does."""
    colours = (_MERGED, _RECOMMENDED, _MERGED, _RECOMMENDED)
    _bars(pen, (0.7, 0.7, 0.9, 0.45), colours, ("work", "", "error", ""), "preset profile preset profile")


def _sizes(image: Image.Image, pen: Any) -> None:
    """Draw the two passes of the workflow at their sizes."""
    font = ImageFont.load_default(28)
    for left, side, label in ((_MARGIN, 96, "1024"), (200, 168, "2048")):
        pen.rectangle((left, _BOTTOM - side, left + side, _BOTTOM), _NODE, _FAINT, 2)
        for part in range(1, side // 24):
            pen.line((left + 24 * part, _BOTTOM - side, left + 24 * part, _BOTTOM), _FAINT)
            pen.line((left, _BOTTOM - 24 * part, left + side, _BOTTOM - 24 * part), _FAINT)
        pen.text((left + side / 2, _BOTTOM - side - 18), label, _PAPER, font, anchor="mm")
    pen.multiline_text((404, 250), "4 x the\ntokens", _PAPER, _fitting(["4 x the"], 30, 80), spacing=6)


def _form(image: Image.Image, pen: Any) -> None:
    font = ImageFont.load_default(26)
    for index, label in enumerate(("prompt", "ToMA ratio", "width, height", "seed")):
        top = _TOP + 6 + index * 50
        pen.rounded_rectangle((_MARGIN, top, SIDE - _MARGIN, top + 40), 8, _NODE, _FAINT, 2)
        pen.text((_MARGIN + 16, top + 20), label, _PAPER if "ToMA" in label else _FAINT, font, anchor="lm")


_PICTURES = {"pair": _pair, "map": _map, "times": _times, "errors": _errors, "sizes": _sizes, "form": _form}


def _fitting(texts: Sequence[str], size: int, width: float) -> Any:
    """Return the font at this size, or at the largest size at which every text fits."""
    while any(ImageFont.load_default(size).getlength(text) > width for text in texts):
        size -= 2
    return ImageFont.load_default(size)


if __name__ == "__main__":
    main()
