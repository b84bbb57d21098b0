"""Time complete sampling runs through ComfyUI's sampler: unpatched, with ToMA, with step caches, and with both.

A run goes from the noise to the last latent and includes the cost of plans. Weights are random, so a step cache skips
fewer steps than in a trained model. A speed-up is not reported if the output is broken or nothing was merged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks import bench, variants
from benchmarks.bench import Row
from benchmarks.forward import available, tokens
from benchmarks.parts import profile
from benchmarks.variants import UNPATCHED, Variant
from scripts.comfy_pack import pack_module
from testbed.fullsize import Shape


@torch.inference_mode()  # as when ComfyUI runs prompts
def sample(model: Any, shape: Shape, steps: int, cfg: float, seed: int = 5) -> Tensor:
    """Sample latents of shape `shape.latent` from noise with the Euler sampler."""
    import comfy.sample

    latent = torch.zeros(shape.batch, *shape.latent)
    noise = comfy.sample.prepare_noise(latent, seed)
    given = [shape.conditioning(1), shape.conditioning(2)]
    out: Tensor = comfy.sample.sample(
        model, noise, steps, cfg, "euler", "simple", *given, latent, disable_pbar=True, seed=seed
    )
    return out


def stats_of(model: Any) -> Any | None:
    """Return ToMA's stats of the model's last run, or None without ToMA."""
    return pack_module("nodes.adapters.attachment").last_stats(model)


def usual_variants(ratio: float, **more: Any) -> list[Variant]:
    """Return these variants: every step merged; `balanced`; each step cache alone; each step cache with every step
    merged."""
    every = variants.toma(f"every step, ratio {ratio:g}", ratio=ratio, **more)
    caches = [variants.step_cache("EasyCache"), variants.step_cache("LazyCache")]
    balanced = variants.preset("balanced", ratio=ratio, **more)
    return [every, balanced, *caches, *(variants.stacked(every, cache) for cache in caches)]


def measure(
    patcher: Any,
    shape: Shape,
    steps: int,
    cfg: float,
    chosen: Sequence[Variant],
    repeats: int,
    device: torch.device,
    shares: bool = True,
    limit: float = float("inf"),
) -> list[Row]:
    """Time the unpatched model and all variants by `bench.interleave`. shares: whether to profile the first variant,
    which merges every step. limit: seconds of all timing, with warm-up."""
    section = f"sample, {steps} steps, cfg {cfg:g}"
    models, rows = available(chosen, lambda variant: variant.patch(patcher), section, shape)
    cases = {each.name: (lambda model=model: sample(model, shape, steps, cfg)) for each, model in models.items()}
    timings = bench.interleave(cases, repeats, device, limit=limit)
    base = timings[UNPATCHED.name]
    # Profile as many steps as a selection interval has. In fewer steps plans would have too large a share of the time.
    profiled = min(steps, pack_module("toma_core").ToMAConfig().selection_interval)
    for variant, model in models.items():
        row = Row(section, shape.model, shape.size, shape.batch, variant.name, "all", note=variant.note)
        found, stats = [], stats_of(model)
        if stats is not None:
            row.tokens = tokens(stats)
            merged = f"{len(stats.merged_steps)}/{max(stats.total_steps, steps)} steps merged"
            row.note = bench.joined(row.note, merged, ", ".join(sorted(map(str, stats.kernels))))
            if not stats.merged_blocks:
                found.append(pack_module("nodes.adapters.report_text").summary(stats))
            if shares and variant is chosen[0]:
                seen = profile(lambda model=model: sample(model, shape, profiled, cfg))  # type: ignore[misc]
                row.shares, row.profile = seen.shares, seen.top
        rows.append(bench.compared(row, timings[variant.name], base, found))
    return rows
