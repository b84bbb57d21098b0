"""Time one model evaluation of full-width models, unpatched, with ToMA, with rivals, and with ToMA and a rival
together.

Every variant runs through ComfyUI's own `apply_model`. Each turn times every variant once. The speed-up is unpatched
time / variant's time, its median over the turns. Turns reuse the plans of a warm-up turn. If merged blocks
attend to all tokens, an untimed full step fills the KV cache before the timed turns. Weights are random, so a small
error shows only one thing: the merged model computes nearly the same function as the unpatched model. A speed-up is not
reported if the output is broken, nothing was merged, or the unpatched model changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks import bench, cost, variants
from benchmarks.bench import Row
from benchmarks.gpu import place
from benchmarks.parts import profile
from benchmarks.variants import UNPATCHED, Variant
from scripts.comfy_pack import pack_module
from testbed.fullsize import Shape

# An output with a larger error counts as broken. The limit is high because the weights are random.
FARTHEST = 0.5
# Sigmas of a run whose first step is full.
_LEVELS = [1.0, 0.9, 0.8, 0.0]
GRANULARITIES = ["module", "block", "stack"]


class Runner:
    """A variant on a model, ready to evaluate. plain: use plain PyTorch instead of ToMA's kernels."""

    def __init__(self, variant: Variant, patcher: Any, plain: bool = False) -> None:
        self.variant, self.plain, self.looks = variant, plain, False
        self.patched = variant.patch(patcher)
        self.sampling = self._start()

    @torch.inference_mode()  # as in the sampler, because ToMA merges nothing while gradients are computed
    def _start(self) -> Any | None:
        """Return ToMA's state of a new run, made as in ToMA's wrapper of the sampler. Return None without ToMA."""
        run = pack_module("nodes.adapters.patch_model")
        attachment = run.attachment_of(self.patched)
        if attachment is None:
            return None
        config = run.config_for(attachment.settings, self.patched)
        self.looks = bool(config.kv_cache)
        sampling = run.SamplingRun.start(config, None, _LEVELS if self.looks else [1.0, 0.0])
        sampling.run.cache.quantized = self.variant.packs
        if self.variant.in_host_memory:
            sampling.run.cache.host = place.host_memory(self.patched.load_device)
        if self.plain:
            trial = pack_module("toma_core.kernels.dispatch")
            sampling.run.dispatch = trial.Dispatch(trial.Choice(None))
        if not self.looks:
            sampling.observe(torch.ones(1))
        return sampling

    def _step(self, sigma: float, inputs: dict[str, Any]) -> Tensor:
        """Evaluate the model at this sigma, as in a step of a sampler that adds no noise."""
        assert self.sampling is not None
        sampling, timestep = self.sampling, torch.full((1,), sigma)
        latent = pack_module("nodes.adapters.streams").first(inputs["x"], inputs.get("latent_shapes"))
        sampling.next(timestep)
        sampling.observe(timestep, latent=latent)
        output = self._evaluated(inputs)
        sampling.predicted(latent)
        return output

    @torch.inference_mode()
    def __call__(self, inputs: dict[str, Any]) -> Tensor:
        """Evaluate the model: (B, C, H, W) latents -> the same shape."""
        if not self.looks or self.sampling is None:
            return self._evaluated(inputs)
        if self.sampling.sigma is None:
            self._step(_LEVELS[0], inputs)
        return self._step(_LEVELS[1], inputs)

    def _evaluated(self, inputs: dict[str, Any]) -> Tensor:
        options = dict(self.patched.model_options["transformer_options"])
        options["wrappers"] = self.patched.wrappers
        if self.sampling is not None:
            hooks = pack_module("nodes.adapters.model_hooks")
            options[hooks.SAMPLING] = self.sampling
            self.sampling.shapes = inputs.get("latent_shapes")
            options[hooks.GRAPHS] = pack_module("nodes.adapters.compile_ops").compiled(self.patched.model_options)
        output: Tensor = self.patched.model.apply_model(**inputs, transformer_options=options)
        return output

    @property
    def stats(self) -> Any | None:
        return None if self.sampling is None else self.sampling.run.stats

    def close(self) -> None:
        """Release the memory of the run's caches."""
        if self.sampling is not None:
            self.sampling.run.coverage.clear()


def tokens(stats: Any) -> str:
    """Return the number of tokens of every grid before and after merging."""
    grids = sorted(stats.grids.items(), reverse=True)
    return ", ".join(f"{math.prod(grid)} -> {destinations}" for grid, destinations in grids)


def available(
    chosen: Sequence[Variant], start: Callable[[Variant], Any], section: str, shape: Shape
) -> tuple[dict[Variant, Any], list[Row]]:
    """Call `start` for the unpatched model and for each variant. Return the results, and a row for each variant for
    which `start` raises an error."""
    started, rows = {}, []
    for variant in (UNPATCHED, *chosen):
        try:
            started[variant] = start(variant)
        except Exception as error:
            why = f"cannot be had here: {type(error).__name__}: {error}"
            rows.append(Row(section, shape.model, shape.size, shape.batch, variant.name, gate=why))
    return started, rows


def problems(runner: Runner, output: Tensor, base: Tensor, farthest: float = FARTHEST) -> list[str]:
    """Return the reasons why this variant's speed-up must not be reported."""
    found = []
    if runner.stats is not None and not runner.stats.merged_blocks:
        found.append(pack_module("nodes.adapters.report_text").summary(runner.stats))
    if output.shape == base.shape and torch.isfinite(output).all():
        far = bench.relative_error(output, base)
        if far > farthest:
            found.append(f"the output is {far:.2f} off")
        if runner.variant.unchanged and runner.variant.name != UNPATCHED.name and far:
            found.append("the output changed, and must not")
    return found


def toma_variants(ratios: Sequence[float], granularities: Sequence[str], skipped: dict[str, Any]) -> list[Variant]:
    """Return variants of ToMA at every ratio and granularity."""
    return [
        variants.toma(f"{g}, ratio {r:g}", ratio=r, granularity=g, **skipped) for r in ratios for g in granularities
    ]


def measure(
    patcher: Any,
    shape: Shape,
    chosen: Sequence[Variant],
    repeats: int,
    device: torch.device,
    section: str = "forward",
    check_kernels: bool = False,
    blocks: tuple[int, ...] | None = None,
    limit: float = float("inf"),
    farthest: float = FARTHEST,
    profiles: bool = False,
) -> list[Row]:
    """Time the unpatched model and all variants at one shape, in the turns of `bench.interleave`.

    check_kernels: also compare ToMA's Triton kernels with plain PyTorch, if the kernels run here. profiles: also
    measure the seconds until the host has launched all operations, and the seconds of the GPU.
    """
    inputs = shape.inputs(device)
    runners, unavailable = available(chosen, lambda variant: Runner(variant, patcher), section, shape)
    cases = {variant.name: (lambda runner=runner: runner(inputs)) for variant, runner in runners.items()}
    timings = bench.interleave(cases, repeats, device, limit=limit)
    base = timings[UNPATCHED.name]
    assert base.output is not None
    again = runners[UNPATCHED](inputs).float().cpu()
    changed = [] if torch.allclose(again, base.output, rtol=1e-3, atol=1e-3) else ["the unpatched model changed"]
    rows = []
    for variant, runner in runners.items():
        timing = timings[variant.name]
        assert timing.output is not None
        found = [*changed, *problems(runner, timing.output, base.output, farthest)]
        row = Row(section, shape.model, shape.size, shape.batch, variant.name, "all", note=variant.note)
        if runner.stats is not None:
            used = sorted(map(str, runner.stats.kernels))
            row.tokens = tokens(runner.stats)
            row.note = bench.joined(row.note, f"kernels: {', '.join(used)}")
            if check_kernels and "triton" in used:
                found += _kernels_agree(runner, patcher, inputs, timing.output, base.output)
        if profiles:
            row.host = bench.quantile(timing.handed, 0.5)
            row.gpu = profile(lambda runner=runner: runner(inputs)).seconds  # type: ignore[misc]
        row.ceiling = None if shape.tiny else ceiling(shape, variant, blocks, int(runner.looks))
        rows.append(bench.compared(row, timing, base, found))
        if row.error == 0 and variant is not UNPATCHED:
            row.note = bench.joined("a no-op here: the output is unchanged", row.note)
        runner.close()
    return rows + unavailable


def ceiling(shape: Shape, variant: Variant, blocks: tuple[int, ...] | None = None, step: int = 0) -> float | None:
    """Return the highest speed-up of a step that a variant's FLOPs allow, or None if FLOPs cannot be counted."""
    try:
        return cost.count(shape, blocks=blocks).flops / cost.count(shape, variant, blocks=blocks, step=step).flops
    except Exception as error:
        bench.say(f"{variant.name}: no FLOP ceiling: {type(error).__name__}: {error}")
        return None


def _kernels_agree(runner: Runner, patcher: Any, inputs: dict[str, Any], output: Tensor, base: Tensor) -> list[str]:
    """Compare a variant on Triton kernels with the same variant in plain PyTorch. If the two outputs differ by at least
    half the error of merging, return this problem as text."""
    plain = Runner(runner.variant, patcher, plain=True)(inputs).float().cpu()
    apart, merged = bench.relative_error(output, plain), bench.relative_error(plain, base)
    wrong = f"kernels and plain PyTorch are {apart:.4f} apart, merging costs {merged:.4f}"
    return [] if apart < 0.5 * merged else [wrong]
