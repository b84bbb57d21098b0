"""The error of merged pictures by sampler: `python -m benchmarks.fidelity.samplers [--run few8 wan8] [--sampler lcm]`.

Each merged picture is compared with the unmerged picture of the same scene, noise and sampler. The error is the L2
distance between the two final latents, divided by the norm of the unmerged latent. A sampler's name may include its
eta: `euler_ancestral@0.25`. If a sampler's noise makes all steps full, only one batch is measured. Rows in the result
file are not measured again, so remove them after a change of the code. Choose settings with `--scenes choose`. Measure
results for the pages with `--scenes report`.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import variants
from scripts.comfy_pack import pack_module

from .settings import FEWEST
from .start import SCENES, command, start

# The samplers that the pages report: some add no new noise, some add a known share of noise, and some are named by
# model cards.
REPORTED = ("euler", "er_sde", "euler_ancestral@0.25", "euler_ancestral", "dpmpp_2m_sde", "sa_solver", "lcm")
# Name of a run -> trained model and number of steps.
RUNS = {"few4": ("few", 4), "few8": ("few", 8), "wan8": ("wan", 8), "dit20": ("dit", 20), "few8_all": ("few", 8)}
WEIGHTS = Path("demo/weights")
RESULTS = Path("benchmarks/results/fidelity/samplers.json")


def sampler_of(name: str) -> Any:
    """Return ComfyUI's sampler of this name, with its eta if the name includes one."""
    from comfy.samplers import ksampler, sampler_object

    sampler, _, eta = name.partition("@")
    return ksampler(sampler, {"eta": float(eta)}) if eta else sampler_object(sampler)


def load(kind: str) -> Any:
    """Load a trained model."""
    from demo import models, sampling

    return models.load_wan(str(WEIGHTS / "wan.safetensors")) if kind == "wan" else sampling.load(kind)


def patched(kind: str, model: Any) -> Any:
    """Return the model with the preset `balanced` and a low `min_tokens`, so that tiny grids are merged."""
    return variants.preset("balanced", min_tokens=16 if kind == "wan" else FEWEST).patch(model)


def drawn(kind: str, model: Any, seeds: list[int], steps: int, sampler: str) -> Tensor:
    """Sample one latent for each seed, with the model's own scheduler and guidance: (n, 16, ..., h, w) fp32."""
    from comfy.sample import sample_custom
    from comfy.samplers import calculate_sigmas

    from demo.checker import FIRST_TEST_SEED
    from demo.clips import clip_from_seed
    from demo.conditioning import conditioning, empty_latent, seeded_noise
    from demo.sampling import DEFAULTS, defaults
    from demo.scenes import scene_from_seed
    from demo.video import clip_conditioning, clip_noise

    sigmas = calculate_sigmas(model.get_model_object("model_sampling"), DEFAULTS[kind]["scheduler"], steps)
    if kind == "wan":
        cfg, noise = 1.0, clip_noise(seeds)  # the distilled model samples without guidance
        clips = [clip_from_seed(FIRST_TEST_SEED + seed) for seed in seeds]
        latent = torch.zeros_like(noise)
        prompts = clip_conditioning(list(clips), steps), clip_conditioning([None] * len(seeds), steps)
    else:
        own = defaults(kind, steps)
        cfg, size, guidance = own["cfg"], own["size"], own.get("guidance")
        scenes = [scene_from_seed(FIRST_TEST_SEED + seed) for seed in seeds]
        noise, latent = seeded_noise(seeds, size, size), empty_latent(size, size, len(seeds))
        prompts = conditioning(list(scenes), guidance), conditioning([None], guidance)
    with torch.no_grad():
        found = sample_custom(
            model, noise, cfg, sampler_of(sampler), sigmas, *prompts, latent, disable_pbar=True, seed=seeds[0]
        )
    return found.float()


def row(kind: str, steps: int, sampler: str, seeds: list[int], batch: int) -> dict[str, Any]:
    """Measure a sampler. The row has mean, median and worst error, the number of merged steps, and why steps were
    full."""
    from .metrics import relative_error

    model, errors = load(kind), list[float]()
    merged = patched(kind, model)
    for first in range(0, len(seeds), batch):
        part = seeds[first : first + batch]
        own = drawn(kind, model, part, steps, sampler)
        errors += relative_error(drawn(kind, merged, part, steps, sampler), own).tolist()
        stats = pack_module("nodes.adapters.attachment").last_stats(merged)
        # Only the sampler decides how much noise is new, and so which steps are merged. If none is merged in the first
        # batch, none will be in later batches.
        if not stats.merged_steps:
            break
    return {
        "mean": round(statistics.fmean(errors), 4),
        "median": round(statistics.median(errors), 4),
        "worst": round(max(errors), 4),
        "merged": len(stats.merged_steps),
        "full": sorted({reason.id.value for reason in stats.full_reasons}),
        "pictures": len(errors),
    }


def main(given: list[str] | None = None) -> None:
    """Parse the command line, measure the missing rows, and write each row."""
    parser = command(__doc__)
    parser.add_argument("--run", nargs="*", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--sampler", nargs="*", help="default: those that the pages report; for few8_all all there are")
    parser.add_argument("--scenes", choices=list(SCENES), default="choose")
    parser.add_argument("--pictures", type=int, help="default: 24, of few8_all 2")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(given)
    start(args)
    from comfy.samplers import KSampler

    rows: dict[str, dict[str, Any]] = json.loads(args.out.read_text()) if args.out.exists() else {}
    for run in args.run:
        every = run == "few8_all"
        seeds = [SCENES[args.scenes] + index for index in range(args.pictures or (2 if every else 24))]
        for sampler in args.sampler or (KSampler.SAMPLERS if every else REPORTED):
            if sampler in rows.setdefault(run, {}):
                continue
            rows[run][sampler] = row(*RUNS[run], sampler, seeds, args.batch)
            args.out.write_text(json.dumps(rows, indent=1) + "\n")
            print(run, sampler, rows[run][sampler], file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
