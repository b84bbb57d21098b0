"""Measure the host time of one call of merging, in units of a call of torch.add. Where the GPU waits for the host,
merging costs this host time.

    python -m benchmarks.hosttime [--repeats 40] [--out FOLDER]

No GPU is needed: Triton compiles for a GPU offline, and a stub of the driver ends each launch just before Triton's
launcher, which is written in C. The times of that launcher and of CUDA's driver are not measured. The calls of
torch.add use neither, because they run on the CPU. Tensors have only 20 tokens, so that nearly all time is spent on the
calls themselves. A turn measures this thread's CPU time of 200 calls of torch.add, 200 calls of an operation, and again
200 calls of torch.add. The turn's result is the operation's time divided by the mean time of torch.add. A row has the
median over turns.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks import bench
from scripts.comfy_pack import pack_module
from testbed import offline, stand_ins

RESULTS = "hosttime"
# A grid of 5 complete windows of tokens. Plain PyTorch would merge fewer than 5 windows in one product.
_GRID, _WINDOW, _CHANNELS = (2, 10), 2, 16
_CALLS = 200


def in_adds(call: Callable[[], object], repeats: int, calls: int = _CALLS) -> float:
    """Return the duration of a call as a number of calls of torch.add."""
    a = b = torch.ones(4)
    call()

    def seconds(run: Callable[[], object]) -> float:
        begin = time.thread_time()
        for _ in range(calls):
            run()
        return time.thread_time() - begin

    def add() -> Tensor:
        return torch.add(a, b)

    turns = []
    for _ in range(repeats):
        before, took, after = seconds(add), seconds(call), seconds(add)
        turns.append(2 * took / (before + after))
    return statistics.median(turns)


def operations(kernels: Any | None) -> dict[str, Callable[[], object]]:
    """Return the calls to time: making a plan, and merging and unmerging with a plan. kernels: None for plain
    PyTorch."""
    config, core = pack_module("toma_core.config"), pack_module("toma_core.merge")
    layout, state = pack_module("toma_core.windows"), pack_module("toma_core.run")
    propagation, regressing = pack_module("toma_core.pipeline"), pack_module("toma_core.latent_regression")
    windows = layout.make_windows(*_GRID, _WINDOW)
    toma = config.ToMAConfig(window_size=_WINDOW)
    schedule = pack_module("toma_core.schedule").Schedule(toma)
    trial = pack_module("toma_core.kernels.dispatch")
    run = state.RunState(schedule, dispatch=trial.Dispatch(trial.Choice(kernels)))
    decision = schedule.decide(1.0)
    x = torch.randn(1, windows.tokens, _CHANNELS, generator=torch.Generator().manual_seed(0))

    def plan() -> Any:
        return run._selected(x, x, _GRID, decision, even=True)

    # Set the destination slots to 0, because a stubbed kernel writes none.
    made = replace(first := plan(), dest_slots=torch.zeros_like(first.dest_slots))
    y = torch.randn(1, made.num_destinations, _CHANNELS, generator=torch.Generator().manual_seed(1))
    assert made.strips is None
    _ = made.destinations
    # The values of features and rotations do not matter for the time.
    regression = regressing.regress(torch.cat([x[..., :4], torch.ones_like(x[..., :1])], 2), made)
    change = regressing.LatentChange(x, x, {id(made): (made, regression)})
    R = torch.eye(2).expand(1, windows.tokens, 1, 1, 2, 2).contiguous()
    rotation = regressing.Rotation.of(R, R[:, : made.num_destinations], y)
    known, unknown = (
        propagation.Cached(pack_module("toma_core.cache").Cache(), ("keys",), x, change=c) for c in (change, None)
    )
    return {
        "merge": lambda: core.merge(x, made),
        "restore": lambda: core.unmerge_residual(y, y, x, made),
        "propagate": lambda: unknown.propagate(y, made),
        "propagate, regressed": lambda: known.propagate(y, made),
        "propagate keys, regressed": lambda: known.propagate(y, made, rotation),
        "plan": plan,
    }


def measure(repeats: int) -> dict[str, dict[str, float]]:
    """Return the duration of every operation as a number of calls of torch.add, by backend."""
    with torch.inference_mode(), offline.stubbed():
        kernels = pack_module("toma_core.kernels.triton").TritonKernels()
        return {
            by: {name: in_adds(call, repeats) for name, call in operations(used).items()}
            for by, used in (("Triton", kernels), ("PyTorch", None))
        }


def main() -> None:
    """Measure the rows, print them, and write them to the output folder."""
    parser = bench.command_line(__doc__, RESULTS, repeats=40)
    args = parser.parse_args()
    os.environ.pop("TRITON_INTERPRET", None)
    torch.set_num_threads(1)
    stand_ins.prepare(own_attention=False)
    conditions = bench.conditions(dtype="float32", repeats=args.repeats, triton=__import__("triton").__version__)
    result = json.dumps({"conditions": conditions, "rows": measure(args.repeats)}, indent=1)
    print(result)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / f"{RESULTS}.json").write_text(result + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
