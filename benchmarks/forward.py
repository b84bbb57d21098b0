"""Time one model evaluation of full-width SDXL and Flux with and without ToMA.

    python -m benchmarks.forward [--model sdxl|flux|all] [--size 1024] [--ratio 0.5] [--repeats 3] [--json FILE]

Every variant goes through ComfyUI's own `apply_model` with the pack attached. Variants are interleaved in one run;
the speed-up is the ratio of medians of evaluations that reuse their plans, after one that makes them and warms up.
What making the plans costs is timed inside that one and given as a share of a merged evaluation; the presets pay it
every few steps. Weights are random: the distance only shows that the merged model still computes nearly the same
function. Needs about 7 GB of memory for SDXL and 4 GB for Flux, whose
depth is cut to --flux-blocks (the whole model has 19 double and 38 single blocks).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import fullsize
from scripts.comfy_pack import load_pack, pack_module, use_comfyui


@dataclass(frozen=True)
class Row:
    """One variant. seconds: median of an evaluation that reuses its plans; planning: seconds that making them takes."""

    model: str
    variant: str
    tokens: str
    seconds: float
    spread: tuple[float, float]
    planning: float
    speedup: float
    distance: float


def _sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Variant:
    """One way to run the model: unpatched (settings None) or with ToMA."""

    def __init__(self, name: str, patcher: Any, settings: dict[str, Any] | None) -> None:
        run = pack_module("nodes.adapters.run")
        hooks = pack_module("nodes.adapters.hooks")
        config = pack_module("toma_core.config").ToMAConfig
        self.name, self.stats, self.planning = name, None, 0.0
        self.times: list[float] = []
        self.options: dict[str, Any] = {}
        self.output: torch.Tensor | None = None
        if settings is None:
            return
        patched = run.attach(patcher, config(**settings))
        sampling = run.Sampling.start(
            patched.model_options["transformer_options"][hooks.ATTACHMENT].config, None, [1.0, 0.0]
        )
        sampling.observe(torch.ones(1))
        self.stats = sampling.run.stats
        self._time_planning(sampling.run)
        self.options = {
            **patched.model_options["transformer_options"],
            "wrappers": patched.wrappers,
            hooks.SAMPLING: sampling,
        }

    def _time_planning(self, run: Any) -> None:
        make = run.plan

        def timed(x: torch.Tensor, *rest: Any) -> Any:
            made = run.stats.weighings
            _sync(x.device)
            start = time.perf_counter()
            plan = make(x, *rest)
            _sync(x.device)
            if run.stats.weighings > made:
                self.planning += time.perf_counter() - start
            return plan

        run.plan = timed
        self._stop_timing = lambda: setattr(run, "plan", make)

    def evaluate(self, model: Any, inputs: dict[str, Any]) -> None:
        device = inputs["x"].device
        _sync(device)
        start = time.perf_counter()
        with torch.inference_mode():
            self.output = model.apply_model(**inputs, transformer_options=dict(self.options)).float()
        _sync(device)
        self.times.append(time.perf_counter() - start)
        if self.stats is not None and len(self.times) == 1:
            self._stop_timing()

    @property
    def median(self) -> float:
        return statistics.median(self.times[1:])

    def tokens(self) -> str:
        if self.stats is None:
            return "all"
        return ", ".join(f"{h * w} -> {kept}" for (h, w), kept in sorted(self.stats.grids.items(), reverse=True))


def _inputs(name: str, size: int, batch: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    side = size // 8

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    if name == "sdxl":
        common = {"c_crossattn": noise(batch, 77, 2048), "y": noise(batch, 2816)}
        return {"x": noise(batch, 4, side, side), "t": torch.full((batch,), 5.0, device=device), **common}
    common = {"c_crossattn": noise(batch, 512, 4096), "y": noise(batch, 768)}
    guidance = torch.full((batch,), 3.5, device=device)
    return {
        "x": noise(batch, 16, side, side),
        "t": torch.full((batch,), 0.7, device=device),
        "guidance": guidance,
        **common,
    }


def measure(name: str, args: argparse.Namespace) -> list[Row]:
    """All variants of one model, interleaved."""
    import comfy.model_management
    from comfy.model_patcher import ModelPatcher

    device = comfy.model_management.get_torch_device()
    dtype = getattr(torch, args.dtype)
    print(f"{name}: building", file=sys.stderr, flush=True)
    if name == "sdxl":
        model, granularities = fullsize.sdxl(dtype, device), args.granularity or ["module", "block", "stack"]
    else:
        double, single = args.flux_blocks
        model, granularities = fullsize.flux(dtype, device, double, single), args.granularity or ["module", "block"]
    patcher = ModelPatcher(model, load_device=device, offload_device=device)
    whole = {"flux_whole_double": args.flux_whole[0], "flux_whole_single": args.flux_whole[1]}
    variants = [Variant("unpatched", patcher, None)]
    variants += [
        Variant(f"{g}, ratio {args.ratio:g}", patcher, {"ratio": args.ratio, "granularity": g, **whole})
        for g in granularities
        if not (name == "flux" and g == "stack")
    ]
    inputs = _inputs(name, args.size, args.batch, dtype, device)
    for turn in range(args.repeats + 1):
        for variant in variants:
            variant.evaluate(model, inputs)
            what = "warm-up and plan" if turn == 0 else f"repeat {turn}/{args.repeats}"
            print(f"{name}: {variant.name}: {what}: {variant.times[-1]:.2f} s", file=sys.stderr, flush=True)
    return [_row(name, variant, variants[0]) for variant in variants]


def _row(name: str, variant: Variant, base: Variant) -> Row:
    assert variant.output is not None and base.output is not None
    if not torch.isfinite(variant.output).all():
        raise SystemExit(f"{name}, {variant.name}: the output is not finite, so no speed is reported")
    if variant.stats is not None and not variant.stats.merged_blocks:
        raise SystemExit(f"{name}, {variant.name}: {variant.stats.summary()}, so no speed is reported")
    distance = float((variant.output - base.output).norm() / base.output.norm())
    reused = variant.times[1:]
    return Row(
        name,
        variant.name,
        variant.tokens(),
        variant.median,
        (min(reused), max(reused)),
        variant.planning,
        base.median / variant.median,
        distance,
    )


def conditions(args: argparse.Namespace) -> dict[str, Any]:
    """What a speed needs beside it."""
    import comfy.ldm.modules.attention
    from comfyui_version import __version__ as comfyui

    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} threads",
        "dtype": args.dtype,
        "attention": comfy.ldm.modules.attention.optimized_attention.__name__,
        "size": f"{args.size}x{args.size}",
        "batch": args.batch,
        "repeats": args.repeats,
        "torch": torch.__version__,
        "comfyui": comfyui,
        "flux blocks": "{} double + {} single".format(*args.flux_blocks),
        "flux blocks left whole": "{} double + {} single".format(*args.flux_whole),
        "weights": "random",
    }


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["sdxl", "flux", "all"], default="all")
    parser.add_argument("--size", type=int, default=1024, help="image side in pixels (default 1024)")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--ratio", type=float, default=0.5)
    parser.add_argument("--granularity", nargs="*", choices=["module", "block", "stack"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument(
        "--attention",
        default="comfyui",
        choices=["comfyui", "pytorch"],
        help="what ComfyUI chooses on this device (on a CPU: sub-quadratic), or PyTorch's, which is faster on a CPU",
    )
    parser.add_argument("--flux-blocks", type=int, nargs=2, default=(1, 2), metavar=("DOUBLE", "SINGLE"))
    parser.add_argument("--flux-whole", type=int, nargs=2, default=(0, 0), metavar=("DOUBLE", "SINGLE"))
    parser.add_argument("--json", type=Path, help="write conditions and rows to this file")
    args = parser.parse_args()

    use_comfyui(own_attention=args.attention == "comfyui")
    load_pack()
    told = conditions(args)
    print(", ".join(f"{key}: {value}" for key, value in told.items()), file=sys.stderr, flush=True)
    rows = [row for name in (["sdxl", "flux"] if args.model == "all" else [args.model]) for row in measure(name, args)]

    print("\n" + ", ".join(f"{key}: {value}" for key, value in told.items()))
    absolute = torch.cuda.is_available()
    print(
        f"{'model':6} {'variant':20} {'tokens':28} {'speed-up':>8} {'plan costs':>10} {'distance':>9}"
        + (f" {'seconds':>9}" if absolute else "")
    )
    for row in rows:
        plan = f"{row.planning / row.seconds:10.1%}" if row.planning else f"{'-':>10}"
        print(
            f"{row.model:6} {row.variant:20} {row.tokens:28} {row.speedup:7.2f}x {plan} {row.distance:9.4f}"
            + (f" {row.seconds:9.4f}" if absolute else "")
        )
    print(
        "speed-up: ratio of medians, plans reused; plan costs: making all plans once, as a share of a merged "
        "evaluation; distance: relative error of the output, random weights."
    )
    if args.json:
        args.json.write_text(json.dumps({"conditions": told, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
