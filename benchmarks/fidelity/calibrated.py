"""What ToMA Calibrate gains on scenes that it did not measure: `python -m benchmarks.fidelity.calibrated`.

For each model, number of steps and target: calibrate on one set of scenes at the work of a preset, and compare both on
another set. The table is in results/fidelity/calibrated.md, with a list of single settings that have less error for no
more work, see `beyond`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from scripts.comfy_pack import pack_module

from .start import PICTURES, SCENES, command, start

# A word of ToMA Calibrate -> the preset and ratio whose work it has, as rows of the tables name them.
NEAR = {"quality": "quality", "balanced": "balanced", "fast": "balanced at 0.6"}
# Numbers of steps of the few-step models.
TAUGHT = {"few": (4, 8), "wan": (4, 8)}


def _arguments(given: list[str] | None) -> argparse.Namespace:
    parser = command(__doc__)
    parser.add_argument("--model", nargs="*", choices=(*PICTURES, "wan"), default=["deep", "dit"])
    parser.add_argument("--weights", type=Path, default=Path("demo/weights"), help="folder with the trained weights")
    parser.add_argument("--steps", type=int, nargs="*", default=[4, 8, 20])
    parser.add_argument("--target", nargs="*", choices=[*NEAR], default=[*NEAR])
    parser.add_argument("--cfg", type=float, help="default: 1 for the model taught few steps, else 2")
    parser.add_argument("--images", type=int, default=4, help="in each set of scenes")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/fidelity/calibrated.json"))
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> None:
    """Measure the rows that the file lacks, one at a time, and print the table."""
    args = _arguments(given)
    start(args)
    from demo.sampling import defaults

    # The clips' model needs no guidance.
    guided = args.cfg
    rows: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
    for kind in args.model:
        for steps in (steps for steps in args.steps if steps in TAUGHT.get(kind, args.steps)):
            options = {**defaults(kind, steps), **({"cfg": 1.0} if kind == "wan" else {})}
            if guided is not None:
                options["cfg"] = guided
            names = {target: f"{kind} {steps} steps cfg {options['cfg']:g} {target}" for target in args.target}
            missing = [target for target, name in names.items() if name not in rows]
            for target, row in _measured(kind, steps, missing, options, args).items():
                rows[names[target]] = row
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(rows, indent=1) + "\n")
            print(table(rows), flush=True)
    for name, (setting, factor) in beyond(rows, args.out.parent).items():
        print(f"{name}: {setting} is at {factor:.2f} of the preset")


def _measured(
    kind: str, steps: int, words: list[str], options: dict[str, Any], args: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """A row for each word: errors on the other scenes, shares of the matrix products left, and what was
    predicted and found on the scenes that were measured. options: of `demo.sampling.generate`."""
    if not words:
        return {}
    from .judge import counting
    from .metrics import relative_error
    from .settings import FEWEST

    calibrating = pack_module("nodes.calibrate")
    attach = pack_module("nodes.adapters.patch_model").apply_toma
    settings = pack_module("toma_core").Settings
    model, generate, asked = (_clips if kind == "wan" else _pictures)(kind, steps, options, args)
    overrides = {"min_tokens": FEWEST}

    def drawn(patched: Any) -> tuple[torch.Tensor, int]:
        with counting() as counter:
            latents = generate(patched)
        return latents, counter.get_total_flops()

    task = calibrating.Task(
        steps=steps, cfg=options["cfg"], sampler_name=options["sampler"], scheduler=options["scheduler"], **asked
    )
    plain, full_flops = drawn(model)
    rows: dict[str, dict[str, Any]] = {}
    for target in words:
        found = calibrating.calibrate(model, task, target, overrides=overrides)
        preset, ratio = calibrating.TARGETS[target]
        ways = {
            "preset": drawn(attach(model, settings(preset, {"ratio": ratio, **overrides}))),
            "calibrated": drawn(found.model),
        }
        rows[target] = {name: round(float(relative_error(x, plain).mean()), 4) for name, (x, _) in ways.items()}
        rows[target] |= {f"{name} cost": round(flops / full_flops, 3) for name, (_, flops) in ways.items()}
        rows[target]["found"] = round(found.errors[1], 4)
        rows[target]["keeps preset"] = found.keeps_preset or found.profile is None
        rows[target]["profile"] = dict(found.profile.ratios) if found.profile else str(found.problem)
    return rows


# Number of pictures of each judge's tables, by the ends of their names.
TABLES = {"deep": "128px-8x3", "dit": "128px-22x3", "few": "64px-22x3", "wan": "report"}
# How much farther a calibration may be than the nearest single setting.
_BEYOND = 1.05


def beyond(rows: dict[str, dict[str, Any]], folder: Path) -> dict[str, tuple[str, float]]:
    """Return the calibrations whose error exceeds that of a single setting by more than a twentieth, for no more work
    than the preset: the setting's name, and its error relative to the preset's on the same pictures."""
    found = {}
    for name, row in rows.items():
        kind, steps, *_, target = name.split()
        file = folder / f"{kind}-{steps}steps-{TABLES.get(kind, '')}.json"
        if not file.exists():
            continue
        others = json.loads(file.read_text())["rows"]
        usual = others[f"preset: {NEAR[target]}"]
        single = {n: o for n, o in others.items() if n.split(":")[0] not in ("rival", "stacked", "unmerged", "variate")}
        best = min(
            (n for n, o in single.items() if o["cost"] <= usual["cost"] + 1e-3), key=lambda n: single[n]["error"]
        )
        factor = single[best]["error"] / usual["error"]
        if row["calibrated" if not row["keeps preset"] else "preset"] / row["preset"] > _BEYOND * factor:
            found[name] = best, factor
    return found


def _seeds(which: str, args: argparse.Namespace) -> list[int]:
    return [SCENES[which] + i for i in range(args.images)]


# The model, a function that draws the reported scenes with a patched model, and the inputs of the calibration.
Asked = tuple[Any, Callable[[Any], torch.Tensor], dict[str, Any]]


def _pictures(kind: str, steps: int, options: dict[str, Any], args: argparse.Namespace) -> Asked:
    from demo.checker import FIRST_TEST_SEED
    from demo.conditioning import conditioning, empty_latent, seeded_noise
    from demo.sampling import generate
    from demo.scenes import scene_from_seed

    from .judge import load

    size, guidance = options["size"], options.get("guidance")
    chosen, reported = _seeds("choose", args), _seeds("report", args)
    scenes = {seed: scene_from_seed(FIRST_TEST_SEED + seed) for seed in (*chosen, *reported)}

    def drawn(patched: Any) -> torch.Tensor:
        given = [scenes[seed] for seed in reported]
        return generate(patched, given, reported, steps=steps, batch=args.images, **options)

    return (
        load(kind, args.weights / f"{kind}.safetensors", "fp32"),
        drawn,
        {
            "positive": conditioning([scenes[seed] for seed in chosen], guidance),
            "negative": conditioning([None] * args.images, guidance),
            "latent": empty_latent(size, size, args.images),
            "noise": seeded_noise(chosen, size, size),
        },
    )


def _clips(kind: str, steps: int, options: dict[str, Any], args: argparse.Namespace) -> Asked:
    from demo.checker import FIRST_TEST_SEED
    from demo.clips import clip_from_seed
    from demo.models import load_wan
    from demo.video import clip_conditioning, clip_noise, draw_clips

    chosen, reported = _seeds("choose", args), _seeds("report", args)
    clips = {seed: clip_from_seed(FIRST_TEST_SEED + seed) for seed in (*chosen, *reported)}
    noise = clip_noise(chosen)

    def drawn(patched: Any) -> torch.Tensor:
        given = [clips[seed] for seed in reported]
        return draw_clips(patched, given, reported, steps, options["cfg"], steps, args.images)

    return (
        load_wan(str(args.weights / f"{kind}.safetensors")),
        drawn,
        {
            "positive": clip_conditioning([clips[seed] for seed in chosen], steps),
            "negative": clip_conditioning([None] * args.images, steps),
            "latent": torch.zeros_like(noise),
            "noise": noise,
        },
    )


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Format a Markdown table, a row for each model, number of steps and target."""
    names = ["preset", "calibrated", "preset cost", "calibrated cost", "found", "keeps preset"]
    lines = ["| model steps near | " + " | ".join(names) + " |", "|---" + "|--:" * len(names) + "|"]
    lines += [f"| {key} | " + " | ".join(str(row[name]) for name in names) + " |" for key, row in rows.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
