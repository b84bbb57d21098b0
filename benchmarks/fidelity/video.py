"""The error of merged clips against unmerged ones: `python -m benchmarks.fidelity.video --weights wan.safetensors`.

All settings use the same clips and noise. Rows in the result file are not measured again. Choose settings with
`--scenes choose`. Measure results for the pages with `--scenes report`.

error       mean L2 distance of merged and unmerged final latents, divided by the norm of the unmerged latent
spread      standard error of the mean error over the clips
flicker     energy of the changes from frame to frame, divided by that of the unmerged clip
seams       `metrics.seam_energy` of all frames, divided by that of the unmerged clip
attributes  share of the prompt's attributes that the checker finds in the middle frame
cost        FLOPs of the matrix products, divided by those of the unmerged clips
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import variants
from benchmarks.variants import Patch

from .settings import Setting, packed
from .start import SCENES, command, start

# Side of windows in tokens, in a frame of 16 x 16 tokens.
WINDOW = 8


def settings() -> dict[str, Setting]:
    """Return the settings by name. `min_tokens` is low, because the trained model has much smaller grids than a real
    model."""

    def preset(name: str, **given: Any) -> Setting:
        return Setting(variants.preset(name, min_tokens=16, **given).patch)

    def every(**given: Any) -> Patch:
        return variants.toma("", min_tokens=16, **given).patch

    found = {f"preset: {name}": preset(name) for name in ("quality", "balanced", "paper")}
    found |= {f"preset: balanced at {ratio:g}": preset("balanced", ratio=ratio) for ratio in (0.6, 0.75)}
    found["preset: balanced, keys in four bits"] = Setting(packed(preset("balanced").patch))
    found["preset: quality, keys in four bits"] = Setting(packed(preset("quality").patch))
    found["preset: balanced, in two runs"] = Setting(preset("balanced").patch, runs=2)
    found["preset: balanced, in two runs, keys in four bits"] = Setting(packed(preset("balanced").patch), runs=2)
    found["preset: balanced, windows of 8 x 8"] = preset("balanced", window_size=8)
    found["preset: balanced, random"] = preset("balanced", selector="random")
    found |= {f"every step: {r:g}": Setting(every(ratio=r)) for r in (0.25, 0.5, 0.75)}
    found["rival: EasyCache 0.2"] = Setting(variants.step_cache("EasyCache", 0.2).patch)
    found |= {f"rival: {share:g} of the steps": Setting(lambda model: model, share) for share in (0.75, 0.5)}
    return found


def flicker(clips: Tensor) -> Tensor:
    """Compute the mean squared change from frame to frame: (n, 3, T, H, W) -> (n,)."""
    return clips.diff(dim=2).square().flatten(1).mean(1)


def seams(clips: Tensor) -> Tensor:
    """Compute the mean `metrics.seam_energy` of the frames, whose tokens have a side of two pixels: (n, 3, T, H, W) ->
    (n,)."""
    from .metrics import PIXELS_PER_TOKEN, seam_energy

    frames = clips.movedim(2, 1).flatten(0, 1)
    doubled = torch.nn.functional.interpolate(frames, scale_factor=PIXELS_PER_TOKEN / 2)
    return seam_energy(doubled, WINDOW).unflatten(0, (len(clips), -1)).mean(1)


def measured(
    draw: Callable[..., Tensor],
    model: Any,
    clips: list[Any],
    steps: int,
    tried: dict[str, Setting],
    known: dict[str, dict[str, float]],
) -> dict[str, dict[str, float]]:
    """Return a row for each setting of `tried`. If `known` has the row, return it unchanged. draw: takes a model, a
    number of steps and a number of runs, and returns the latents of all clips."""
    from demo.checker import accuracy, load_checker
    from demo.scenes import CANVAS
    from demo.video import decode_clips

    from .judge import counting
    from .metrics import relative_error

    checker = load_checker()

    def asked(pictures: Tensor) -> float:
        middle = torch.nn.functional.interpolate(pictures[:, :, pictures.shape[2] // 2], CANVAS, mode="bilinear")
        return accuracy(checker, middle, [clip.scene for clip in clips])["all"]

    with counting() as counter:
        plain = draw(model, steps)
    full_flops, twin = counter.get_total_flops(), decode_clips(plain)
    rows = {
        "unmerged": {"error": 0.0, "spread": 0.0, "flicker": 1.0, "seams": 1.0, "attributes": asked(twin), "cost": 1.0}
    }
    for name, setting in tried.items():
        if name in known:
            rows[name] = known[name]
            continue
        with counting() as counter:
            latents = draw(setting.patch(model), max(1, round(steps * setting.steps)), setting.runs)
        pictures, errors = decode_clips(latents), relative_error(latents, plain).tolist()
        rows[name] = {
            "error": statistics.fmean(errors),
            "spread": statistics.stdev(errors) / len(errors) ** 0.5 if len(errors) > 1 else 0.0,
            "flicker": float((flicker(pictures) / flicker(twin)).mean()),
            "seams": float((seams(pictures) / seams(twin)).mean()),
            "attributes": asked(pictures),
            "cost": counter.get_total_flops() / full_flops,
        }
        print(name, rows[name], file=sys.stderr, flush=True)
    return rows


def main(given: list[str] | None = None) -> None:
    """Parse the command line, measure the missing rows, and write all rows."""
    parser = command(__doc__)
    parser.add_argument("--weights", type=Path, default=Path("demo/weights/wan.safetensors"))
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--cfg", type=float, default=1.0)
    parser.add_argument(
        "--model-steps", type=int, help="number of steps to pass to the model, 0 for a model that does not take it"
    )
    parser.add_argument("--scenes", choices=list(SCENES), default="choose")
    parser.add_argument("--clips", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/fidelity"))
    args = parser.parse_args(given)
    start(args)
    model_steps = (args.steps if args.model_steps is None else args.model_steps) or None
    from demo.checker import FIRST_TEST_SEED
    from demo.clips import clip_from_seed
    from demo.models import load_wan
    from demo.video import draw_clips

    seeds = [SCENES[args.scenes] + index for index in range(args.clips)]
    clips = [clip_from_seed(FIRST_TEST_SEED + seed) for seed in seeds]
    names = ("weights", "steps", "cfg", "model_steps", "scenes", "clips")
    conditions = {name: str(getattr(args, name)) for name in names}
    file = args.out / f"{args.weights.stem}-{args.steps}steps-{args.scenes}.json"
    before = json.loads(file.read_text()) if file.exists() else {}
    rows = measured(
        lambda model, steps, runs=1: draw_clips(model, clips, seeds, steps, args.cfg, model_steps, runs=runs),
        load_wan(str(args.weights)),
        clips,
        args.steps,
        settings(),
        before["rows"] if before.get("conditions") == conditions else {},
    )
    args.out.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"conditions": conditions, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
