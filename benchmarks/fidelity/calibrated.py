"""Measure calibrated models on scenes that Calibrate did not use: `python -m benchmarks.fidelity.calibrated`.

For each number of steps and each target, Calibrate finds ratios for the trained deep UNet. A run with these ratios
needs as much work as the target's preset. Then the preset, the calibrated model and the settings `SINGLE` are compared
on scenes that Calibrate did not use. The table is in results/fidelity/calibrated.md. Transformers have no rows, because
Calibrate returns the preset for them without measuring.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from scripts.comfy_pack import pack_module

from .start import SCENES, command, start

KIND = "deep"
# Settings that need about as much work as `balanced`, with one ratio for all blocks.
SINGLE = {"ratio": 0.75, "start_percent": 0.3}


def _arguments(given: list[str] | None) -> argparse.Namespace:
    parser = command(__doc__)
    parser.add_argument("--weights", type=Path, default=Path("demo/weights"), help="folder with the trained weights")
    parser.add_argument("--steps", type=int, nargs="*", default=[4, 8, 20])
    parser.add_argument("--target", nargs="*", choices=("quality", "balanced", "fast"), default=["balanced"])
    parser.add_argument("--images", type=int, default=8, help="scenes that are reported")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/fidelity/calibrated.json"))
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> None:
    """Measure, print and store the rows that the result file lacks."""
    args = _arguments(given)
    start(args)
    rows: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
    for steps in args.steps:
        missing = [target for target in args.target if _name(steps, target) not in rows]
        for target, row in _measured(steps, missing, args).items():
            rows[_name(steps, target)] = row
            print(_name(steps, target), row, flush=True)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(rows, indent=1) + "\n")


def _name(steps: int, target: str) -> str:
    return f"{KIND} {steps} steps {target}"


def _measured(steps: int, targets: list[str], args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return a row for each target: for each of the three `ways`, the mean error and the FLOPs (1 = unmerged) on the
    reported scenes; and the FLOPs of calibrating, divided by those of one unmerged picture."""
    if not targets:
        return {}
    from demo.checker import FIRST_TEST_SEED
    from demo.conditioning import conditioning, empty_latent, seeded_noise
    from demo.sampling import defaults, generate
    from demo.scenes import scene_from_seed

    from .judge import counting, load
    from .metrics import relative_error
    from .settings import FEWEST

    calibrating = pack_module("nodes.calibrate")
    attach = pack_module("nodes.adapters.patch_model").apply_toma
    settings = pack_module("toma_core").UserSettings
    model, options = load(KIND, args.weights / f"{KIND}.safetensors", "fp32"), defaults(KIND, steps)
    size, overrides = options["size"], {"min_tokens": FEWEST}
    chosen = [SCENES["choose"]]  # seed of the scene on which the model is calibrated
    reported = [SCENES["report"] + i for i in range(args.images)]

    def scenes(seeds: list[int]) -> list[Any]:
        return [scene_from_seed(FIRST_TEST_SEED + seed) for seed in seeds]

    def drawn(patched: Any) -> tuple[torch.Tensor, int]:
        with counting() as counter:
            latents = generate(patched, scenes(reported), reported, steps=steps, batch=args.images, **options)
        return latents, counter.get_total_flops()

    task = calibrating.Task(
        positive=conditioning(scenes(chosen)),
        negative=conditioning([None] * len(chosen)),
        latent=empty_latent(size, size, len(chosen)),
        noise=seeded_noise(chosen, size, size),
        steps=steps,
        cfg=options["cfg"],
        sampler_name=options["sampler"],
        scheduler=options["scheduler"],
    )
    plain, full_flops = drawn(model)
    rows: dict[str, dict[str, Any]] = {}
    for target in targets:
        with counting() as counter:
            found = calibrating.calibrate(model, task, target, overrides=overrides)
        preset, ratio = calibrating.TARGETS[target]
        ways = {
            "preset": drawn(attach(model, settings(preset, {"ratio": ratio, **overrides}))),
            "calibrated": drawn(found.model),
            "single": drawn(attach(model, settings("balanced", {**SINGLE, **overrides}))),
        }
        rows[target] = {name: round(float(relative_error(x, plain).mean()), 4) for name, (x, _) in ways.items()}
        rows[target] |= {f"{name} cost": round(flops / full_flops, 3) for name, (_, flops) in ways.items()}
        pictures = counter.get_total_flops() / (full_flops / len(reported) * len(chosen))
        rows[target]["pictures"] = round(pictures, 1)
        rows[target]["keeps preset"] = found.keeps_preset
        rows[target]["profile"] = dict(found.profile.ratios)
    return rows


if __name__ == "__main__":
    main()
