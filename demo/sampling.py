"""Draw pictures with the tiny models through ComfyUI's own samplers: `python -m demo.sampling dit|few|unet|deep`."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from .comfy_setup import prepare

if __name__ == "__main__":
    prepare()

import comfy.sample
import numpy as np
import torch
from PIL import Image

from .checker import FIRST_TEST_SEED, WEIGHTS, accuracy, for_checker, frechet_distance, load_checker
from .conditioning import conditioning, empty_latent, seeded_noise
from .latents import decode
from .models import load_dit, load_unet
from .scenes import CANVAS, Scene, render_batch, scene_from_seed

FOLDER = WEIGHTS.parent
# Default settings of each model.
DEFAULTS: dict[str, dict[str, Any]] = {
    "dit": {"cfg": 2.0, "sampler": "euler", "scheduler": "simple"},
    # The few-step model is distilled to 4 or 8 steps without guidance, on tokens of 2 x 2 pixels.
    "few": {"cfg": 1.0, "sampler": "euler", "scheduler": "simple", "size": 64},
    "unet": {"cfg": 2.0, "sampler": "euler", "scheduler": "normal"},
    "deep": {"cfg": 2.0, "sampler": "euler", "scheduler": "normal"},
    "wan": {"cfg": 2.0, "sampler": "euler", "scheduler": "simple"},
}
PICTURES = tuple(kind for kind in DEFAULTS if kind != "wan")
# The tiny UNet shaped like SDXL, and the one with nearly SDXL's depth.
UNETS = ("unet", "deep")


def load(kind: str, path: Path | str | None = None) -> Any:
    """Load the MODEL of `kind` ("dit", "few", "unet" or "deep") from a safetensors file, by default the trained one in
    demo/weights."""
    path = Path(path) if path else FOLDER / f"{kind}.safetensors"
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: train it with `python -m demo.train {kind} --export {path}`")
    return load_unet(str(path)) if kind in UNETS else load_dit(str(path))


def defaults(kind: str, steps: int) -> dict[str, Any]:
    """Return the arguments of `generate` for pictures of `kind`. The few-step model gets the number of steps as its
    guidance (see `demo.objectives.FewStepsObjective`)."""
    return {"size": CANVAS, **DEFAULTS[kind], **({"guidance": float(steps)} if kind == "few" else {})}


def generate(
    model: Any,
    scenes: list[Scene],
    seeds: list[int],
    steps: int = 20,
    cfg: float = 2.0,
    sampler: str = "euler",
    scheduler: str = "simple",
    size: int = CANVAS,
    batch: int = 16,
    guidance: float | None = None,
) -> torch.Tensor:
    """Sample one latent per scene: (len(scenes), 16, size / 2, size / 2), float32 on the CPU.

    guidance: see `conditioning`. `seeds` gives each picture its own noise, so the result depends on `batch` only by
    rounding.
    """
    results = []
    for start in range(0, len(scenes), batch):
        part, part_seeds = scenes[start : start + batch], seeds[start : start + batch]
        noise, latent = seeded_noise(part_seeds, size, size), empty_latent(size, size, len(part))
        prompts = conditioning(list(part), guidance), conditioning([None], guidance)
        given = model, noise, steps, cfg, sampler, scheduler, *prompts, latent
        results.append(comfy.sample.sample(*given, disable_pbar=True, seed=part_seeds[0]).float().cpu())
    return torch.cat(results)


def contact_sheet(image: torch.Tensor, columns: int) -> Image.Image:
    """Arrange pictures (n, 3, H, W) in -1..1 in one image, row by row. n must be a multiple of `columns`."""
    count, _, height, width = image.shape
    rows = count // columns
    tiles = image.clamp(-1, 1).reshape(rows, columns, 3, height, width).permute(0, 3, 1, 4, 2)
    array = ((tiles.reshape(rows * height, columns * width, 3) + 1) * 127.5).round().to(torch.uint8)
    return Image.fromarray(np.ascontiguousarray(array.numpy()))


def main() -> None:
    """Write a contact sheet. Print the checker's marks and the Frechet distance to real scenes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kind", choices=PICTURES)
    parser.add_argument("--weights", type=Path, default=None)
    parser.add_argument("--checker", type=Path, default=WEIGHTS)
    parser.add_argument("--count", type=int, default=24)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--cfg", type=float, default=None)
    parser.add_argument("--sampler", default=None)
    parser.add_argument("--scheduler", default=None)
    parser.add_argument("--sheet", type=Path, default=None, help="where to write a PNG of the first 24")
    args = parser.parse_args()
    settings = {name: getattr(args, name, None) or value for name, value in defaults(args.kind, args.steps).items()}
    model = load(args.kind, args.weights)
    scenes = [scene_from_seed(FIRST_TEST_SEED + index) for index in range(args.count)]
    begin = time.monotonic()
    latents = generate(model, scenes, list(range(args.count)), args.steps, **settings)
    image = for_checker(decode(latents))
    print(
        f"{args.count} pictures, {args.steps} steps, {settings}, {(time.monotonic() - begin) / args.count:.2f} s each"
    )
    if args.sheet:
        args.sheet.parent.mkdir(parents=True, exist_ok=True)
        contact_sheet(image[: min(24, args.count) // 6 * 6], 6).save(args.sheet, optimize=True)
    if args.checker.exists():
        checker = load_checker(args.checker)
        others = [scene_from_seed(FIRST_TEST_SEED + 10_000 + index) for index in range(args.count)]
        real, other = (for_checker(render_batch(each, settings["size"])) for each in (scenes, others))
        marks, real_marks = accuracy(checker, image, scenes), accuracy(checker, real, scenes)
        for name in marks:
            print(f"{name:14s} generated {marks[name]:.3f}  real {real_marks[name]:.3f}")
        features = [checker.features(x) for x in (image, real, other)]
        print(
            f"frechet generated-real {frechet_distance(features[0], features[1]):.3f}  "
            f"real-other real {frechet_distance(features[2], features[1]):.3f}"
        )


if __name__ == "__main__":
    main()
