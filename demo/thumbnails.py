"""Draw the thumbnails of workflows/ from the workflows themselves: `python -m demo.thumbnails`.

Each has the name of its workflow, its purpose, and the chain of nodes that the model passes. Nothing is sampled: a
thumbnail shows only the settings of its workflow.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from scripts.comfyui import ROOT

FOLDER = ROOT / "workflows"
SIDE = 512
MOST_BYTES = 60_000
_MARGIN = 36
_BOARD, _NODE, _PAPER, _FAINT = (32, 36, 44), (58, 66, 82), (250, 250, 250), (176, 184, 198)
_OURS = (138, 92, 40)
# Okabe and Ito's colours, by how the name of a workflow begins.
_BANDS = {
    "Benchmark": (240, 228, 66),
    "SD": (0, 114, 178),
    "Flux": (0, 158, 115),
    "Z-Image": (204, 121, 167),
    "Qwen": (213, 94, 0),
    "Wan": (86, 180, 233),
    "LTX": (86, 180, 233),
    "MiniMax": (86, 180, 233),
}
# Name of a workflow -> its title in one line or two, and its purpose.
THUMBNAILS = {
    "Benchmark SDXL": ("SDXL", "how fast on\nyour card?"),
    "Benchmark Z-Image": ("Z-Image\nTurbo", "how fast on\nyour card?"),
    "SDXL": ("SDXL", "to begin with"),
    "SDXL advanced + report": ("SDXL", "every setting,\nand the report"),
    "SDXL LoRA + ControlNet": ("SDXL", "with LoRA\nand ControlNet"),
    "SDXL calibrate": ("SDXL", "find out what\nyour model allows"),
    "SDXL compare": ("SDXL", "with and without,\ncompared"),
    "SDXL few steps": ("SDXL", "in 4 steps"),
    "SDXL hires fix 2048": ("SDXL", "hires fix,\n2048 x 2048"),
    "SD1.5": ("SD1.5", "512 x 768\nand larger"),
    "Flux": ("Flux.1", "to begin with"),
    "Flux + report": ("Flux.1", "and the report"),
    "Flux Kontext": ("Flux\nKontext", "edit a picture"),
    "Flux.2 Klein": ("Flux.2\nKlein", "in 4 steps"),
    "Z-Image Turbo": ("Z-Image\nTurbo", "in 8 steps"),
    "Z-Image Turbo.app": ("Z-Image\nTurbo", "as an app: a form\nand no graph"),
    "Wan 2.2 image to video": ("Wan 2.2", "image to video,\n4 steps"),
    "LTX-2.3 image to video": ("LTX-2.3", "image to video,\n8 and 3 steps"),
    "MiniMax H3 image to video": ("MiniMax\nH3", "image to video,\n8 steps"),
    "Qwen-Image-Edit": ("Qwen-Image\nEdit", "edit a picture,\n4 steps"),
    "Qwen-Image 2.1 edit": ("Qwen-Image\n2.1", "edit pictures,\n25 steps"),
    "Qwen-Image 2.1 turbo": ("Qwen-Image\n2.1 turbo", "in 8 steps"),
}
# Prefix of a node type -> its label in the chain; other nodes are not drawn.
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
    """Return the labels of the nodes that the model passes, in order; repeated ones once, with their number."""
    labels = [
        next((label for start, label in _CALLED.items() if node["type"].startswith(start)), "")
        for node in sorted(workflow["nodes"], key=lambda node: node["order"])
    ]
    counts = Counter(label for label in labels if label)
    order = list(dict.fromkeys(label for label in _CALLED.values() if label))
    order.append(order.pop(order.index("report")))  # it comes after the sampler
    return [label if counts[label] == 1 else f"{counts[label]} x {label}" for label in order if counts[label]]


def drawn(name: str) -> Image.Image:
    """Draw the thumbnail of a workflow, SIDE x SIDE."""
    title, use = THUMBNAILS[name]
    image = Image.new("RGB", (SIDE, SIDE), _BOARD)
    pen = ImageDraw.Draw(image)
    pen.rectangle((0, 0, SIDE, 20), next(colour for start, colour in _BANDS.items() if name.startswith(start)))
    top = 44
    for line in title.split("\n"):
        pen.text((_MARGIN, top), line, _PAPER, _fitting([line], 88, SIDE - 2 * _MARGIN))
        top += 96
    pen.multiline_text((_MARGIN, top + 4), use, _FAINT, ImageFont.load_default(42), spacing=6)
    boxes = chain(json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8")))
    gap = 14
    width = (SIDE - 2 * _MARGIN - gap * (len(boxes) - 1)) / len(boxes)
    font = _fitting(boxes, 34, width - 12)
    pen.line((_MARGIN, 424, SIDE - _MARGIN, 424), _FAINT, 4)
    for index, label in enumerate(boxes):
        left = _MARGIN + index * (width + gap)
        pen.rounded_rectangle((left, 380, left + width, 468), 12, _OURS if "ToMA" in label else _NODE, _FAINT, 2)
        pen.text((left + width / 2, 424), label, _PAPER, font, anchor="mm")
    return image


def _fitting(texts: Sequence[str], size: int, width: float) -> Any:
    """Return the font at this size, or at the largest size at which every text fits."""
    while any(ImageFont.load_default(size).getlength(text) > width for text in texts):
        size -= 2
    return ImageFont.load_default(size)


if __name__ == "__main__":
    main()
