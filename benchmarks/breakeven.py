"""Measure the number of tokens from which merging pays on this device: `python -m benchmarks.suite --only break-even`.

This benchmark times chains of transformer blocks at both resolutions of SDXL, unmerged and merged, on token grids of
growing side. The preset `balanced` makes one plan for several steps. So the time of a plan, divided by that number of
steps, is added to the merged time. Every grid is merged, however small. The note of a row says whether Auto
(`min_tokens` = 0) would merge the grid. Auto is right if it merges exactly the grids with a speed-up above 1. On a CPU,
the process's CPU time is measured, on which other programs have little influence.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks import bench
from benchmarks.bench import Row, Timing
from scripts.comfy_pack import pack_module

# Channels and number of transformer blocks of a stack, at each resolution of SDXL.
STACKS = ((640, 2), (1280, 10))


def stack(width: int, depth: int, dtype: torch.dtype, device: torch.device) -> list[Any]:
    """Build the transformer blocks of one SpatialTransformer of SDXL, with random weights."""
    import comfy.ops
    from comfy.ldm.modules.attention import BasicTransformerBlock

    generator = torch.Generator().manual_seed(0)
    blocks = []
    for _ in range(depth):
        made = {"dtype": dtype, "device": device, "operations": comfy.ops.disable_weight_init}
        block = BasicTransformerBlock(width, width // 64, 64, context_dim=2048, **made)
        for parameter in block.parameters():
            fan_in = parameter[0].numel() if parameter.ndim > 1 else 1
            noise = torch.randn(parameter.shape, generator=generator) / fan_in**0.5
            parameter.data = (noise if parameter.ndim > 1 else 1 + 0.1 * noise).to(device, dtype)
        blocks.append(block.requires_grad_(False).eval())
    return blocks


def _auto(x: Tensor, ratio: float) -> str:
    """Return as text whether Auto would merge the tokens x, (B, N, C), of B conditions of one image."""
    core = pack_module("toma_core")
    run = core.RunState(core.Schedule(core.ToMAConfig(ratio=ratio, min_tokens=0)))
    evaluation = core.Evaluation(run, run.schedule.decide(1.0), (None,) * len(x))
    reason = evaluation.obstacle(x, pack_module("nodes.adapters.families.unet").COST, run.config.granularity)
    return f"Auto does not merge it ({reason})" if reason else "Auto merges it"


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    bench.synchronize(device)
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    start = clock()
    call()
    bench.synchronize(device)
    return clock() - start


def measure(
    width: int, depth: int, sides: Sequence[int], ratio: float, repeats: int, dtype: torch.dtype, device: torch.device,
    batch: int = 2,
) -> list[Row]:  # fmt: skip
    """Return one row for each side of the token grid: the speed-up of a merged chain of blocks over the unmerged
    chain."""
    core = pack_module("toma_core")
    plans_per_step = 1 / core.UserSettings("balanced").resolved().selection_interval
    blocks = stack(width, depth, dtype, device)
    generator = torch.Generator().manual_seed(1)
    context = torch.randn(batch, 77, 2048, generator=generator).to(device, dtype)

    def chain(x: Tensor) -> Tensor:
        for block in blocks:
            x = block(x, context=context)
        return x

    rows = []
    with torch.inference_mode():
        for side in sides:
            x = torch.randn(batch, side * side, width, generator=generator).to(device, dtype)
            run = core.RunState(core.Schedule(core.ToMAConfig(ratio=ratio, min_tokens=4)))
            evaluation = core.Evaluation(run, run.schedule.decide(1.0), (None,) * batch)

            def plan(run: Any = run, x: Tensor = x, side: int = side, evaluation: Any = evaluation) -> Any:
                run._plans.clear()
                return evaluation.plan(x, (side, side), None)

            made = plan()

            def merged(x: Tensor = x, plan: Any = made) -> Tensor:
                reduced = core.reduce(x, plan)
                return core.restore(chain(reduced), reduced, x, plan)

            # Drop the first turn, a warm-up.
            calls: tuple[Callable[[], Any], ...] = (functools.partial(chain, x), merged, plan)
            turns = [[_seconds(call, device) for call in calls] for _ in range(repeats + 1)][1:]
            times, merged_times, plan_times = map(list, zip(*turns, strict=True))
            planning = plans_per_step * bench.quantile(plan_times, 0.5)
            unmerged = Timing(times, chain(x).float().cpu())
            this = Timing([seconds + planning for seconds in merged_times], merged().float().cpu())
            tokens = f"{side * side} -> {made.num_destinations}"
            row = Row("break-even", f"{depth} blocks", f"{side}x{side}x{width}", batch, "ToMA stack", tokens)
            row.note = _auto(x, ratio)
            rows.append(bench.compared(row, this, unmerged))
            bench.say(f"{row.size}: {row.speedup:.2f}x; {row.note}" if row.speedup else row.gate)
    return rows
