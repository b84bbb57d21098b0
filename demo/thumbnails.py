"""Makes the thumbnails of workflows/ from real runs of the tiny models: `python -m demo.thumbnails`.

It says which model and weights a picture is from: trained ones where they are there, else random ones. A mosaic is a
picture in which every token has the mean colour of the tokens that it was merged with.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont, ImageOps

from scripts.comfy_pack import pack_module, use_comfyui
from scripts.comfyui import ROOT

from .scenes import CANVAS, Scene, scene_from_seed
from .showcase_graphs import DIT, DIT_FILE, KINDS, UNET, WEIGHTS_FOLDER, Kind, place_dit

FOLDER = ROOT / "workflows"
SIDE = 512
MOST_BYTES = 100_000
_LINE = (20, 20, 20)
_PAPER = (250, 250, 250)
_BOARD, _NODE, _OURS, _FAINT = (32, 36, 44), (58, 66, 82), (138, 92, 40), (150, 158, 172)


@dataclass(frozen=True)
class Shot:
    """One sampled picture of side x side pixels, and the merge map of each token grid of its run."""

    picture: Image.Image
    maps: dict[tuple[int, int], Any]

    @property
    def finest(self) -> Any:
        return self.maps[max(self.maps)]


@dataclass(frozen=True)
class Thumbnail:
    """How the thumbnail of a workflow is made: what is sampled, and how it is laid out."""

    kind: Kind
    layout: Callable[[Thumbnail], Image.Image]
    scene: int = 0
    side: int = CANVAS
    steps: int = 20

    @property
    def model(self) -> Kind:
        """The kind itself; while it is untrained, the other one if that is trained: a picture says more than noise."""
        return next((kind for kind in (self.kind, *KINDS) if kind.trained), self.kind)

    def shot(self, **changes: Any) -> Shot:
        """The picture of this scene, with attributes of the scene changed."""
        return sampled(self.model, replace(scene_from_seed(self.scene), **changes), self.scene, self.side, self.steps)


def main() -> None:
    """Command line: write every thumbnail, or the named ones."""
    parser = argparse.ArgumentParser(prog="python -m demo.thumbnails", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=FOLDER)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(THUMBNAILS)}; all if none is given")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(THUMBNAILS)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    folder = arguments.output
    use_comfyui()
    for name in arguments.names or THUMBNAILS:
        thumbnail = THUMBNAILS[name]
        path = folder / f"{name}.jpg"
        save(thumbnail.layout(thumbnail), path)
        weights = "trained" if thumbnail.model.trained else "random"
        print(f"{path.name}: {path.stat().st_size:,} bytes, {thumbnail.model.title}, {weights} weights", flush=True)


def sampled(kind: Kind, scene: Scene, seed: int, side: int, steps: int) -> Shot:
    """A picture drawn with the merge on."""
    import comfy.sample
    import comfy.sd

    from .conditioning import conditioning, empty_latent, seeded_noise
    from .latents import decode
    from .models import load_unet

    run, reports = pack_module("nodes.adapters.run"), pack_module("nodes.adapters.reports")
    with tempfile.TemporaryDirectory() as folder:
        if kind is DIT:
            place_dit(Path(folder))
            model = comfy.sd.load_diffusion_model(str(Path(folder) / "diffusion_models" / DIT_FILE))
        else:
            model = load_unet(str(WEIGHTS_FOLDER / "unet.safetensors") if kind.trained else None)
        model = run.attach(model, pack_module("toma_core.config").ToMAConfig(**kind.merge))
        settings = kind.sampling
        latent = comfy.sample.sample(
            model,
            seeded_noise([seed], side, side),
            steps,
            settings["cfg"],
            settings["sampler_name"],
            settings["scheduler"],
            conditioning([scene]),
            conditioning([None]),
            empty_latent(side, side),
            disable_pbar=True,
            seed=seed,
        )
    pixels = decode(latent.float().cpu())[0].clamp(-1, 1).add(1).mul(127.5).round().byte()
    stats = reports.last(run.attachment_of(model).report_id)
    return Shot(Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy()), dict(stats.maps))


def split(thumbnail: Thumbnail) -> Image.Image:
    """The picture above the diagonal, its mosaic below."""
    shot = thumbnail.shot()
    return diagonal(enlarged(shot.picture), mosaic(shot.picture, shot.finest))


def report(thumbnail: Thumbnail) -> Image.Image:
    """What the report node shows."""
    return sheet(thumbnail.shot().maps)


def edges(thumbnail: Thumbnail) -> Image.Image:
    """The edges of the picture, as a ControlNet gets them, above the diagonal; its mosaic below."""
    shot = thumbnail.shot()
    found = enlarged(shot.picture).convert("L").filter(ImageFilter.FIND_EDGES)
    lines = ImageOps.autocontrast(ImageOps.crop(found, 2).resize((SIDE, SIDE)), cutoff=1).convert("RGB")
    return diagonal(lines, mosaic(shot.picture, shot.finest))


def doubled(thumbnail: Thumbnail) -> Image.Image:
    """A picture at half the size in one corner of the full-size mosaic."""
    small, large = thumbnail.shot(), replace(thumbnail, side=2 * thumbnail.side).shot()
    image = mosaic(large.picture, large.finest)
    inset = ImageOps.expand(small.picture.resize((SIDE // 2, SIDE // 2), Image.Resampling.BICUBIC), 4, _PAPER)
    image.paste(inset, (SIDE - inset.width, 0))
    return image


def edited(thumbnail: Thumbnail) -> Image.Image:
    """A picture above the diagonal, and below it the mosaic of the same scene in another colour."""
    before, after = thumbnail.shot(), thumbnail.shot(background=5, shape_colour=2)
    return diagonal(enlarged(before.picture), mosaic(after.picture, after.finest))


def named(*words: str) -> Callable[[Thumbnail], Image.Image]:
    """The name of the model in large letters, the last of the words in a box of its own, above the chain of nodes."""

    def layout(_: Thumbnail) -> Image.Image:
        image = Image.new("RGB", (SIDE, SIDE), _BOARD)
        draw, top = ImageDraw.Draw(image), 56
        *name, fact = words
        for word in name:
            draw.text((36, top), word, _PAPER, ImageFont.load_default(76))
            top += 84
        draw.text((40, top + 10), fact, _FAINT, ImageFont.load_default(36))
        left, right = 36, SIDE - 36
        draw.line((left, 400, right, 400), _FAINT, 4)
        for n, (label, colour) in enumerate((("model", _NODE), ("ToMA", _OURS), ("sampler", _NODE))):
            box = (left + n * 152, 360, left + n * 152 + 136, 440)
            draw.rounded_rectangle(box, 12, colour, _FAINT, 2)
            draw.text((box[0] + 68, 400), label, _PAPER, ImageFont.load_default(30), anchor="mm")
        return image

    return layout


# By the names of the workflows.
THUMBNAILS = {
    "SDXL": Thumbnail(UNET, split, scene=49),
    "SDXL advanced + report": Thumbnail(UNET, report, scene=49),
    "SDXL LoRA + ControlNet": Thumbnail(UNET, edges, scene=22),
    "SDXL few steps": Thumbnail(UNET, split, scene=10, steps=8),
    "SDXL hires fix 2048": Thumbnail(UNET, doubled, scene=6),
    "SD1.5": Thumbnail(UNET, split, scene=21),
    "Flux": Thumbnail(DIT, split, scene=41),
    "Flux + report": Thumbnail(DIT, report, scene=41),
    "Flux Kontext": Thumbnail(DIT, edited, scene=28),
    # No small model of these families draws: their thumbnails say what the graph is.
    "Flux.2 Klein": Thumbnail(DIT, named("Flux.2", "Klein", "4 steps")),
    "Z-Image Turbo": Thumbnail(DIT, named("Z-Image", "Turbo", "8 steps")),
    "Qwen-Image-Edit": Thumbnail(DIT, named("Qwen-Image", "Edit", "4 steps")),
}


def enlarged(picture: Image.Image) -> Image.Image:
    """At SIDE x SIDE."""
    return picture.resize((SIDE, SIDE), Image.Resampling.BICUBIC)


def mosaic(picture: Image.Image, merged: Any) -> Image.Image:
    """The picture with every token in the mean colour of the tokens merged into the same destination; lines run
    between different destinations, dots mark them. merged: a `MergeMap`. Returns SIDE x SIDE."""
    height, width = merged.height, merged.width
    # One pixel per token: a box filter over exactly the pixels of each.
    tokens = np.asarray(picture.convert("RGB").resize((width, height), Image.Resampling.BOX), np.float64)
    owner = merged.owner.numpy()
    counts = np.bincount(owner, minlength=owner.size)
    sums = np.stack([np.bincount(owner, tokens.reshape(-1, 3)[:, c], owner.size) for c in range(3)], 1)
    means = (sums / np.maximum(counts, 1)[:, None])[owner].reshape(height, width, 3)
    image = Image.fromarray(means.round().astype(np.uint8)).resize((SIDE, SIDE), Image.Resampling.NEAREST)
    pen, grid = ImageDraw.Draw(image), owner.reshape(height, width)
    cell_x, cell_y = SIDE / width, SIDE / height
    for y, x in np.argwhere(grid[:, 1:] != grid[:, :-1]):
        pen.line([((x + 1) * cell_x, y * cell_y), ((x + 1) * cell_x, (y + 1) * cell_y)], fill=_LINE)
    for y, x in np.argwhere(grid[1:] != grid[:-1]):
        pen.line([(x * cell_x, (y + 1) * cell_y), ((x + 1) * cell_x, (y + 1) * cell_y)], fill=_LINE)
    radius = min(cell_x, cell_y) / 6
    for index in merged.destinations.tolist():
        x, y = (index % width + 0.5) * cell_x, (index // width + 0.5) * cell_y
        pen.ellipse([x - radius, y - radius, x + radius, y + radius], fill=(255, 255, 255), outline=_LINE)
    return image


def diagonal(whole: Image.Image, other: Image.Image) -> Image.Image:
    """`whole` above the diagonal from the lower left to the upper right, `other` below it."""
    image = whole.copy()
    mask = Image.new("L", (SIDE, SIDE), 0)
    ImageDraw.Draw(mask).polygon([(0, SIDE), (SIDE, 0), (SIDE, SIDE)], fill=255)
    image.paste(other, (0, 0), mask)
    ImageDraw.Draw(image).line([(0, SIDE), (SIDE, 0)], fill=(255, 255, 255), width=3)
    return image


def sheet(maps: dict[tuple[int, int], Any]) -> Image.Image:
    """What the report node shows for the finest grid, as a square."""
    finest = max(maps)
    drawn = pack_module("nodes.drawing").draw({finest: maps[finest]}, "")[0]
    image = Image.fromarray((drawn.numpy() * 255).round().astype(np.uint8))
    image.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    square = Image.new("RGB", (SIDE, SIDE), image.getpixel((0, 0)))
    square.paste(image, ((SIDE - image.width) // 2, (SIDE - image.height) // 2))
    return square


def save(image: Image.Image, path: Path) -> None:
    """As JPEG, at the best of a few qualities that stays below MOST_BYTES; ComfyUI's page asks for .jpg only."""
    for quality in (88, 75, 60, 40):
        image.save(path, quality=quality, optimize=True)
        if path.stat().st_size < MOST_BYTES:
            return
    raise ValueError(f"{path.name} has {path.stat().st_size:,} bytes, more than {MOST_BYTES:,}")


if __name__ == "__main__":
    main()
