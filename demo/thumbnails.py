"""Makes the thumbnails of workflows/ from real runs of the tiny models: `python -m demo.thumbnails`.

Pictures come from the trained weights if they are there, else from random ones; it says which. Left of the diagonal is
the picture, right of it every token in the mean colour of the tokens that it was merged with.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from scripts.comfy_pack import pack_module, use_comfyui
from scripts.comfyui import ROOT

from .showcase_graphs import DIT, DIT_FILE, UNET, WEIGHTS_FOLDER, Kind, place_dit

FOLDER = ROOT / "workflows"
SIDE = 512
MOST_BYTES = 100_000
STEPS = 20
SCENE = 7
_LINE = (20, 20, 20)
NAMES = ((UNET, "SDXL", "SDXL advanced + report"), (DIT, "Flux", "Flux + report"))


def main() -> None:
    """Command line: write the four thumbnails."""
    parser = argparse.ArgumentParser(prog="python -m demo.thumbnails", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=FOLDER)
    folder = parser.parse_args().output
    use_comfyui()
    for kind, simple, report in NAMES:
        picture, maps = sampled(kind)
        finest = maps[max(maps)]
        images = {simple: split(picture, mosaic(picture, finest)), report: sheet(maps)}
        for name, image in images.items():
            path = folder / f"{name}.jpg"
            save(image, path)
            weights = "trained" if kind.trained else "random"
            print(f"{path.name}: {path.stat().st_size:,} bytes, {weights} weights", flush=True)


def sampled(kind: Kind) -> tuple[Image.Image, dict[tuple[int, int], Any]]:
    """A picture drawn with the merge on, and the merge map of each token grid of that run."""
    import comfy.sample
    import comfy.sd

    from .conditioning import conditioning, empty_latent, seeded_noise
    from .latents import decode
    from .models import load_unet
    from .scenes import CANVAS, scene_from_seed

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
            seeded_noise([SCENE], CANVAS, CANVAS),
            STEPS,
            settings["cfg"],
            settings["sampler_name"],
            settings["scheduler"],
            conditioning([scene_from_seed(SCENE)]),
            conditioning([None]),
            empty_latent(CANVAS, CANVAS),
            disable_pbar=True,
            seed=SCENE,
        )
    pixels = decode(latent.float().cpu())[0].clamp(-1, 1).add(1).mul(127.5).round().byte()
    stats = reports.last(run.attachment_of(model).report_id)
    return Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy()), dict(stats.maps)


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


def split(picture: Image.Image, other: Image.Image) -> Image.Image:
    """`picture` above the diagonal from the lower left to the upper right, `other` below it."""
    whole = picture.resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    mask = Image.new("L", (SIDE, SIDE), 0)
    ImageDraw.Draw(mask).polygon([(0, SIDE), (SIDE, 0), (SIDE, SIDE)], fill=255)
    whole.paste(other, (0, 0), mask)
    ImageDraw.Draw(whole).line([(0, SIDE), (SIDE, 0)], fill=(255, 255, 255), width=3)
    return whole


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
