"""A fast judge of plans: minutes, where tables of whole runs take hours. What looks well here is tried there.

    python -m benchmarks.fidelity.step [--model dit] [--steps 8] [--cfg 2] [--ratio 0.5] [--scenes choose]

At chosen steps of the unmerged run each site (a block of the DiT, a stack of the UNet) is merged alone, then all
together, and the clean picture that this evaluation predicts is compared: |merged - whole| / |x - whole|. "sharing":
the site runs whole, and every token is given its destination's exact update; "computing": the real merge. Plans are
made from the site's own input (x), its own output (out, an oracle), the clean picture that the step before predicted
(x0) or the site's output at the step before (before). Below stand the distances of whole runs with such plans, every
site merged in all steps but the first. Choose settings on one set of scenes, report on the other; no table uses either.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from .start import PICTURES, command, start

# From the checker's first test seed: scenes that neither the training nor any other table uses.
SCENES = {"choose": 20_000, "report": 30_000}
# Tokens of a side, corner and scale of what is seen of a scene of 32 x 32 tokens, see `demo.data.View`.
VIEWS = {"whole": (32, (0, 0), 1), "half": (16, (0, 0), 2), "crop": (16, (8, 8), 1)}


def _arguments(given: list[str] | None) -> argparse.Namespace:
    parser = command(__doc__)
    parser.add_argument("--model", choices=PICTURES, default="dit")
    parser.add_argument("--weights", type=Path, help="file of such a model, by default the one in demo/weights")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--at", type=int, nargs="*", help="steps to look at, counted from 1 (default: 3, 5, ...)")
    parser.add_argument("--cfg", type=float, help="default: 1 for the model taught few steps, else 2")
    parser.add_argument("--ratio", type=float, default=0.5)
    parser.add_argument("--scenes", choices=list(SCENES), default="choose")
    parser.add_argument("--images", type=int, default=4)
    parser.add_argument("--plans", nargs="*", choices=["x", "out", "x0", "before"], default=["x", "out", "x0"])
    parser.add_argument("--runs", nargs="*", choices=["x", "x0"], default=["x", "x0"], help="plans of whole runs")
    parser.add_argument(
        "--view", choices=list(VIEWS), default="whole", help="of the DiT: whole scenes, half-size, crops"
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/step"))
    args = parser.parse_args(given)
    args.weights = args.weights or Path("demo/weights") / f"{args.model}.safetensors"
    args.at = tuple(args.at if args.at is not None else range(3, args.steps + 1, 2))
    if args.view != "whole" and args.model in ("unet", "deep"):
        parser.error("--view is of the DiT")
    return args


def main(given: list[str] | None = None) -> None:
    """Measure, print the tables and write the figures."""
    args = _arguments(given)
    start(args)
    from demo.sampling import DEFAULTS

    from .judge import load

    args.cfg = DEFAULTS[args.model]["cfg"] if args.cfg is None else args.cfg

    stored = measured(load(args.model, args.weights, "fp32"), args)
    print(table(stored))
    args.out.mkdir(parents=True, exist_ok=True)
    view = "" if args.view == "whole" else f"-{args.view}"
    name = f"{args.weights.stem}-{args.steps}steps-cfg{args.cfg:g}-r{args.ratio:g}{view}-{args.scenes}.json"
    (args.out / name).write_text(json.dumps(stored, indent=1) + "\n")


def measured(model: Any, args: argparse.Namespace) -> dict[str, Any]:
    """conditions; steps: errors at each step looked at; runs: distances of whole runs by plan, mean and deviation of
    the mean over the scenes."""
    from demo.checker import FIRST_TEST_SEED
    from demo.data import View
    from demo.models import token_pixels
    from demo.sampling import defaults, generate
    from demo.scenes import scene_from_seed

    from .metrics import relative_error
    from .probe import Probe, free_run, teacher_forced

    side, offset, scale = VIEWS[args.view]
    if args.view != "whole":
        model = model.clone()
        positions = View(offset, scale).rope_options(torch.device("cpu"))
        model.model_options["transformer_options"]["rope_options"] = positions
    first = SCENES[args.scenes]
    scenes = [scene_from_seed(FIRST_TEST_SEED + first + i) for i in range(args.images)]
    seeds = [first + i for i in range(args.images)]
    options = {**defaults(args.model, args.steps), "cfg": args.cfg, "size": side * token_pixels(model)}
    probe = Probe(model, args.ratio)

    def draw(patched: Any) -> torch.Tensor:
        probe.begin()
        return generate(patched, scenes, seeds, steps=args.steps, batch=args.images, **options)

    forced, errors = teacher_forced(probe, tuple(args.plans), args.at)
    plain = draw(forced)
    runs = {}
    for plan in args.runs:
        distances = relative_error(draw(free_run(probe, plan)), plain).tolist()
        deviation = statistics.stdev(distances) / len(distances) ** 0.5 if len(distances) > 1 else 0.0
        runs[plan] = [round(statistics.fmean(distances), 4), round(deviation, 4)]
    names = ("model", "steps", "cfg", "ratio", "scenes", "images", "view")
    conditions = {"weights": args.weights.stem, **{name: getattr(args, name) for name in names}}
    return {"conditions": conditions, "steps": [asdict(e) for e in errors], "runs": runs}


def table(stored: dict[str, Any]) -> str:
    """Markdown: a table for each step, a row for each site, and one of the whole runs."""
    lines = [", ".join(f"{k} {v}" for k, v in stored["conditions"].items()), ""]
    for step in stored["steps"]:
        plans = step["by_plan"]
        lines += [f"Step {step['step']}, sigma {step['sigma']:.3f}: sharing / computing", ""]
        lines += ["| site | " + " | ".join(plans) + " |", "|---" + "|--:" * len(plans) + "|"]
        for site in next(iter(plans.values())):
            cells = (" / ".join(f"{value:.3f}" for value in by_site[site]) for by_site in plans.values())
            lines.append(f"| {site} | " + " | ".join(cells) + " |")
        lines.append("")
    lines += ["Whole runs, distance: " + ", ".join(f"{k} {m:.3f} +- {d:.3f}" for k, (m, d) in stored["runs"].items())]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
