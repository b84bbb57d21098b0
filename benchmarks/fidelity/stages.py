"""Find the steps of a short schedule that have to be full: `python -m benchmarks.fidelity.stages --shape "second
stage"`.

It uses the tiny Wan in the shapes of the most-used video templates. A pattern has a letter for each step: F is full, C
is merged with the KV cache of all tokens, P is merged without caches and planned from tokens, L the same and planned
from the picture that the run starts from. Columns are those of `video`. Choose with `--scenes choose`, report with
`--scenes report`; rows in the result file are not measured again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import variants
from scripts.comfy_pack import pack_module

from .experiments import Patch, during
from .start import SCENES, command, start
from .video import Setting, measured, table


@dataclass(frozen=True)
class Shape:
    """A run."""

    sigmas: tuple[float, ...] | int  # sigmas of its steps, or their number on the model's own schedule
    model_steps: int  # number of steps passed to the model
    patterns: tuple[str, ...]  # patterns to try, some with a ratio other than 0.5
    sampler: str = "euler"
    half: bool = False  # half of the tokens per side
    continues: bool = False  # starts from an upscaled clean clip of half the size

    @property
    def steps(self) -> int:
        return self.sigmas if isinstance(self.sigmas, int) else len(self.sigmas) - 1


FIRST = (1.0, 0.99375, 0.9875, 0.98125, 0.975, 0.909375, 0.725, 0.421875, 0.0)
SECOND = (0.85, 0.725, 0.4219, 0.0)
THREE = ("FCC", "FCC 0.25", "FFC", "PFF", "PFF 0.25", "LFF", "PFC", "PPF")
FOUR = ("FCFF", "FFCF", "FCFC", "FCCC")
EIGHT = ("FCCCFCCF", "FCFCFCFF", "FCCCCCFF", "FCCCCCCF", "FCCCFFFF", "FCCCCFFF")
SHAPES = {
    # LTX: 8 steps at half size, then three at full size.
    "first stage": Shape(FIRST, 8, EIGHT, half=True),
    "first stage at full size": Shape(FIRST, 8, EIGHT),
    "second stage": Shape(SECOND, 4, THREE, continues=True),
    # MiniMax H3.
    "4 steps": Shape(4, 4, FOUR, sampler="res_multistep"),
    "8 steps": Shape(8, 8, EIGHT, sampler="res_multistep"),
}


def forced(patch: Patch, pattern: str, picture: Tensor) -> Patch:
    """Force the mode of each step by its letter. picture: the clip that the run starts from, in the model's space."""

    def scheduled(module: Any) -> dict[str, Any]:
        modes = module.StepMode
        letters = {"F": modes.REFRESH, "C": modes.MERGED_CACHED}

        class Schedule(module.Schedule):  # type: ignore[name-defined, misc]
            def decide(self, sigma: float, step: int | None = None) -> Any:
                step = self.step_at(sigma) if step is None else step
                mode = letters.get(pattern[step], modes.MERGED)
                return replace(super().decide(sigma, step), mode=mode, ratio=self.config.ratio)

        return {"Schedule": Schedule}

    def running(module: Any) -> dict[str, Any]:
        class Run(module.SamplingRun):  # type: ignore[name-defined, misc]
            def awaits_prediction(self, transformer_options: Any) -> bool:
                return False

            def prediction(self, transformer_options: Any) -> Any:
                return picture if self.begun == 1 and pattern[0] == "L" else super().prediction(transformer_options)

        return {"SamplingRun": Run}

    patch = during(patch, lambda: pack_module("nodes.adapters.sampling_run"), scheduled)
    return during(patch, lambda: pack_module("nodes.adapters.patch_model"), running)


def settings(shape: Shape, picture: Tensor) -> dict[str, Setting]:
    """Return the settings by name. By interval `balanced` is FCCF and FCCCFCCF, `quality` FCFF and FCFCFCFF; both are
    FCF in three steps. In the first stage, whose first sigmas are close, they are FCCCCCFF and FCCCFFFF."""

    def preset(name: str, ratio: float = 0.5, **given: Any) -> Patch:
        return variants.preset(name, min_tokens=16, ratio=ratio, **given).patch

    found = {f"preset: {name}": Setting(preset(name)) for name in ("quality", "balanced")}
    found |= {f"preset: balanced at {ratio:g}": Setting(preset("balanced", ratio)) for ratio in (0.25, 0.6, 0.75)}
    for name in shape.patterns:
        pattern, _, ratio = name.partition(" ")
        lasting = preset("balanced", float(ratio or 0.5), full_step_interval=shape.steps)  # age of the caches
        found[name] = Setting(forced(lasting, pattern, picture))
    found["rival: a step less"] = Setting(lambda model: model, 1 - 1 / shape.steps)
    return found


def main(given: list[str] | None = None) -> None:
    """Measure, print the table and write the numbers."""
    parser = command(__doc__)
    parser.add_argument("--weights", type=Path, default=Path("demo/weights/wan.safetensors"))
    parser.add_argument("--shape", choices=list(SHAPES), default="second stage")
    parser.add_argument("--scenes", choices=list(SCENES), default="choose")
    parser.add_argument("--clips", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/fidelity"))
    args = parser.parse_args(given)
    start(args)
    import comfy.sample
    import comfy.samplers

    from demo.checker import FIRST_TEST_SEED
    from demo.clips import clip_from_seed, render_clips
    from demo.data import CLIP_SIZE
    from demo.latents import clips_to_model
    from demo.models import ClipLatents, load_wan
    from demo.video import clip_conditioning, clip_noise

    shape = SHAPES[args.shape]
    seeds = [SCENES[args.scenes] + index for index in range(args.clips)]
    clips = [clip_from_seed(FIRST_TEST_SEED + seed) for seed in seeds]
    model, noise = load_wan(str(args.weights)), clip_noise(seeds)
    if shape.half:
        noise = noise[..., ::2, ::2].contiguous()
    latent = torch.zeros_like(noise)
    if shape.continues:
        frames = render_clips(clips, CLIP_SIZE).movedim(2, 1).flatten(0, 1)
        small = torch.nn.functional.avg_pool2d(frames, 2)
        large = torch.nn.functional.interpolate(small, scale_factor=2.0, mode="bilinear")
        latent = ClipLatents().process_out(clips_to_model(large.unflatten(0, (len(clips), -1)).movedim(2, 1)))

    def draw(model: Any, steps: int, runs: int = 1) -> Tensor:
        if isinstance(shape.sigmas, int):
            sampling = model.get_model_object("model_sampling")
            sigmas = comfy.samplers.calculate_sigmas(sampling, "simple", steps)
        else:  # the remaining steps are spaced as evenly as possible
            at = torch.linspace(0, shape.steps, steps + 1).round().long()
            sigmas = torch.tensor(shape.sigmas)[at]
        conds = [clip_conditioning(list(each), shape.model_steps) for each in (clips, [None] * len(clips))]
        sampler = comfy.samplers.sampler_object(shape.sampler)
        options: dict[str, Any] = {"disable_pbar": True, "seed": seeds[0]}
        return comfy.sample.sample_custom(model, noise, 1.0, sampler, sigmas, *conds, latent, **options).float()

    conditions = {name: str(getattr(args, name)) for name in ("weights", "shape", "scenes", "clips")}
    file = args.out / f"wan-{args.shape.replace(' ', '-')}-{args.scenes}.json"
    before = json.loads(file.read_text()) if file.exists() else {}

    def keep(rows: dict[str, Any]) -> None:
        args.out.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"conditions": conditions, "rows": rows}, indent=1) + "\n")

    rows = measured(
        draw,
        model,
        clips,
        shape.steps,
        settings(shape, ClipLatents().process_in(latent)),
        before["rows"] if before.get("conditions") == conditions else {},
        keep,
    )
    keep(rows)
    print(table(rows))


if __name__ == "__main__":
    main()
