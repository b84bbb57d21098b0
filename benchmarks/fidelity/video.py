"""How near merged clips stay to unmerged ones: `python -m benchmarks.fidelity.video --weights wan.safetensors`.

The same clips and noise for every setting. distance: of the final latents, relative to the unmerged one's norm.
flicker: energy of the changes from frame to frame, over the unmerged clip's own; seams: see `metrics`, by frame; asked:
attributes that the checker reads in the middle frame, as a share of those it reads in the unmerged one; cost: share of
the matrix products left. Choose settings with `--scenes choose`, report on `--scenes report`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scripts.comfy_pack import pack_module

from .start import command, start
from .step import SCENES

# Windows of this many tokens a side lie in a frame of 16 x 16: as many as in a corner of a real one.
WINDOW = 8


def settings(steps: int) -> dict[str, dict[str, Any]]:
    """Name -> what ToMA Advanced would be given. min_tokens: the grids are far smaller than a real model's."""
    presets: dict[str, dict[str, Any]] = {
        f"preset: {name}": {"preset": name} for name in ("quality", "balanced", "fast")
    }
    every: dict[str, Any] = {"preset": "faithful", "whole_every": 0, "window_size": WINDOW}
    ideas: dict[str, dict[str, Any]] = {
        "every step: 0.5": {**every},
        "every step: 0.25": {**every, "ratio": 0.25},
        "keys only: 0.5": {**every, "keys_only": True},
        "keys only: 0.75": {**every, "keys_only": True, "ratio": 0.75},
        "prediction: 0.5": {**every, "plan_from": "prediction"},
        "balanced, prediction": {"preset": "balanced", "plan_from": "prediction"},
    }
    return {name: {"min_tokens": 16, "ratio": 0.5, **given} for name, given in (presets | ideas).items()}


def flicker(clips: Tensor) -> Tensor:
    """Energy of the changes from frame to frame. (n, 3, T, H, W) -> (n,)."""
    return clips.diff(dim=2).square().flatten(1).mean(1)


def seams(clips: Tensor) -> Tensor:
    """`metrics.seam_energy` of all frames of tokens of two pixels. (n, 3, T, H, W) -> (n,)."""
    from .metrics import PIXELS_PER_TOKEN, seam_energy

    frames = clips.movedim(2, 1).flatten(0, 1)
    doubled = torch.nn.functional.interpolate(frames, scale_factor=PIXELS_PER_TOKEN / 2)
    return seam_energy(doubled, WINDOW).unflatten(0, (len(clips), -1)).mean(1)


def measured(draw: Callable[[Any], Tensor], model: Any, clips: list[Any], steps: int) -> dict[str, dict[str, float]]:
    """A row for each setting. draw: a model -> its latents of all clips."""
    from demo.checker import accuracy, load_checker
    from demo.scenes import CANVAS
    from demo.video import decode_clips

    from .judge import counting
    from .metrics import relative_error

    attach = pack_module("nodes.adapters.run").attach
    checker = load_checker()

    def asked(pictures: Tensor) -> float:
        middle = torch.nn.functional.interpolate(pictures[:, :, pictures.shape[2] // 2], CANVAS, mode="bilinear")
        return accuracy(checker, middle, [clip.scene for clip in clips])["all"]

    with counting() as counter:
        plain = draw(model)
    whole, twin = counter.get_total_flops(), decode_clips(plain)
    rows = {"unmerged": {"distance": 0.0, "flicker": 1.0, "seams": 1.0, "asked": 1.0, "cost": 1.0}}
    for name, given in settings(steps).items():
        given = {**given}
        config = pack_module("toma_core").Settings(given.pop("preset"), given)
        with counting() as counter:
            latents = draw(attach(model, config))
        pictures = decode_clips(latents)
        rows[name] = {
            "distance": float(relative_error(latents, plain).mean()),
            "flicker": float((flicker(pictures) / flicker(twin)).mean()),
            "seams": float((seams(pictures) / seams(twin)).mean()),
            "asked": asked(pictures) / max(asked(twin), 1e-9),
            "cost": counter.get_total_flops() / whole,
        }
    return rows


def table(rows: dict[str, dict[str, float]]) -> str:
    """Markdown."""
    names = list(next(iter(rows.values())))
    lines = ["| setting | " + " | ".join(names) + " |", "|---" + "|--:" * len(names) + "|"]
    lines += [f"| {name} | " + " | ".join(f"{row[key]:.3f}" for key in names) + " |" for name, row in rows.items()]
    return "\n".join(lines) + "\n"


def main(given: list[str] | None = None) -> None:
    """Measure, print the table and write the figures."""
    parser = command(__doc__)
    parser.add_argument("--weights", type=Path, default=Path("demo/weights/wan.safetensors"))
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--cfg", type=float, default=1.0)
    parser.add_argument("--told", type=int, help="how many steps the model is told, where it was taught few")
    parser.add_argument("--scenes", choices=list(SCENES), default="choose")
    parser.add_argument("--clips", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/video"))
    args = parser.parse_args(given)
    start(args)
    from demo.checker import FIRST_TEST_SEED
    from demo.clips import clip_from_seed
    from demo.models import load_wan
    from demo.video import draw_clips

    seeds = [SCENES[args.scenes] + index for index in range(args.clips)]
    clips = [clip_from_seed(FIRST_TEST_SEED + seed) for seed in seeds]
    rows = measured(
        lambda model: draw_clips(model, clips, seeds, args.steps, args.cfg, args.told),
        load_wan(str(args.weights)),
        clips,
        args.steps,
    )
    print(table(rows))
    args.out.mkdir(parents=True, exist_ok=True)
    conditions = {name: str(getattr(args, name)) for name in ("weights", "steps", "cfg", "told", "scenes", "clips")}
    stored = {"conditions": conditions, "rows": rows}
    told = "" if args.told is None else f"-told{args.told}"
    file = args.out / f"{args.weights.stem}-{args.steps}steps-cfg{args.cfg:g}{told}-{args.scenes}.json"
    file.write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    main()
