"""Check every Triton kernel on this device against fp64. New tensors are filled with NaN before a kernel runs, and a
second call must give bit-identical results. Count the launches of `propagate`, which updates a cached tensor.

The suite's section `kernels` has one row for each check. A failure is named in the row's `gate`. In Triton's
interpreter, on a CPU, only tiny cases run.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import gcd
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks import micro
from benchmarks.bench import Row
from benchmarks.results import KERNELS
from scripts.comfy_pack import pack_module
from testbed.meter import Meter

_B, _H, _F = torch.bfloat16, torch.float16, torch.float32
_EPS = {_B: 4e-3, _H: 6e-4, _F: 2e-6}
# Free bytes of memory that the case with tensors of more than 2^31 elements needs.
_LARGE = 30e9
# Number of features of a token in the regression (Flux's latent, the latent's change, and 1), and number of rotated
# pairs in a head.
_FEATURES, _PAIRS = 129, 64


@dataclass(frozen=True)
class Case:
    """A grid of tokens. grid: (frames,) rows, columns. adaptive: whether windows get different numbers of destinations.
    beside: number of text tokens, filled with NaN, that precede the image's tokens in memory, as in a stream of text
    and image."""

    name: str
    grid: tuple[int, ...]
    channels: int
    window: int = 8
    ratio: float = 0.5
    batch: int = 2
    dtype: torch.dtype = _B
    adaptive: bool = False
    beside: int = 0

    def layout(self, device: torch.device) -> tuple[Any, Any]:
        """Return the windows and the budget."""
        module = pack_module("toma_core.windows")
        *frames, height, width = self.grid
        windows = module.make_windows(height, width, self.window, False, *frames).to(device)
        return windows, module.make_budget(windows.counts, self.ratio, windows.frames).to(device)

    def noise(self, count: int, device: torch.device, seed: int = 0) -> Tensor:
        """Return normal noise, (B, count, C)."""
        generator = torch.Generator(device).manual_seed(seed)
        x = torch.randn(self.batch, count, self.channels, device=device, generator=generator)
        return x.to(self.dtype)

    def tokens(self, device: torch.device) -> Tensor:
        """Return smooth tokens with noise, as in a picture. (B, N, C)"""
        *frames, height, width = self.grid
        pictures = self.batch * (frames[0] if frames else 1)
        generator = torch.Generator(device).manual_seed(0)
        x = torch.randn(pictures, self.channels, height, width, device=device, generator=generator)
        x = torch.nn.functional.avg_pool2d(x, 3, 1, 1) + 0.1 * x
        x = x.unflatten(0, (self.batch, -1)).flatten(3).movedim(2, 3).flatten(1, 2).to(self.dtype).contiguous()
        if self.beside:
            text = torch.full((self.batch, self.beside, self.channels), torch.nan, device=device, dtype=self.dtype)
            x = torch.cat([text, x], 1)[:, self.beside :]
        return x


TINY = (Case("tiny", (13, 10), 40, dtype=_H), Case("tiny adaptive", (16, 16), 32, 4, dtype=_F, adaptive=True))
CASES = (
    Case("SDXL 64", (64, 64), 640),
    Case("SDXL 64 fp16", (64, 64), 640, dtype=_H),
    Case("SDXL 32", (32, 32), 1280, dtype=_H),
    Case("Flux 64", (64, 64), 3072, beside=512, batch=1),
    Case("SDXL 832x1216", (52, 76), 640, dtype=_H),
    Case("SDXL fp32", (64, 64), 640, dtype=_F),
    Case("Flux 832x1216", (52, 76), 3072, beside=512),
    Case("Qwen 83", (83, 83), 3072, batch=1),
    Case("Z 64 ratio 0.75", (64, 64), 3840, ratio=0.75, batch=1),
    Case("adaptive", (64, 64), 640, adaptive=True),
    Case("adaptive window 4", (52, 76), 3072, 4, adaptive=True),
    Case("window 4", (64, 64), 3072, 4, batch=1),
    Case("window 11", (66, 66), 640, 11),
    Case("Wan 480p", (21, 30, 52), 5120, batch=1),
)


def measure(dry: bool, device: torch.device, left: Callable[[], float]) -> Iterator[Row]:
    """Yield a row for each check. left: returns the remaining seconds. If few remain, the last cases are skipped."""
    kernels = pack_module("toma_core.kernels.triton").TritonKernels()
    jobs: list[tuple[Case, Callable[..., Iterator[Row]]]] = [(case, check) for case in (TINY if dry else CASES)]
    if dry:
        jobs.append((Case("large, as dry run", (2, 8, 8), 32), large))
    elif torch.cuda.mem_get_info(device)[0] > _LARGE:
        # This case has tensors of more than 2^31 elements, which need 64-bit addresses.
        jobs.insert(4, (Case("large: Wan 720p", (21, 45, 80), 5120, batch=6), large))
    for case, run in jobs:
        if not dry and left() < 12:
            yield _row(case, "all", note="left out: no time")
            continue
        try:
            yield from run(case, kernels, device)
        except Exception as error:
            traceback.print_exc()
            yield _row(case, "all", f"{type(error).__name__}: {error}"[:300])


def _row(case: Case, what: str, gate: str = "", error: float | None = None, note: str = "") -> Row:
    size = "x".join(map(str, (*case.grid, case.channels)))
    return Row(KERNELS, case.name, size, case.batch, what, error=error, gate=gate, note=note)


def _judged(case: Case, what: str, error: float, most: float, repeats: bool = True) -> Row:
    wrong = [] if error < most else [f"{error:.2g} off, at most {most:.2g}"]
    wrong += [] if repeats else ["does not repeat itself bit for bit"]
    return _row(case, what, "; ".join(wrong), error)


def _off(result: Tensor, reference: Tensor) -> float:
    """Compute |result - reference| / |reference|, infinite if the result holds NaN."""
    error = float((result.double() - reference).norm() / reference.norm())
    return error if error == error else float("inf")


_empty = torch.empty


def _poisoned(*shape: Any, **options: Any) -> Tensor:
    """Stand in for torch.empty, and fill the tensor with NaN. Otherwise memory that a kernel fails to write could hold
    zeros by chance."""
    t = _empty(*shape, **options)
    return t.fill_(255) if t.dtype is torch.uint8 else t.fill_(torch.nan if t.is_floating_point() else -(2**40))


def _weights(x: Tensor, dest_slots: Tensor, windows: Any, budget: Any) -> tuple[Tensor, Tensor]:
    """Compute merge and unmerge weights for the destinations `dest_slots` in fp64."""
    split = torch.nn.functional.normalize(windows.split(x.double()), dim=-1)
    similarity = split @ split.transpose(-1, -2)
    A = similarity.gather(2, dest_slots[..., None].expand(*dest_slots.shape, similarity.shape[-1]))
    if budget.valid is not None:
        A = A.masked_fill(~budget.valid[..., None], -torch.inf)
    A = (micro.SCALE * A).softmax(2)
    if windows.valid is not None:
        A = A * windows.valid[:, None, :]
    return A / A.sum(-1, keepdim=True).clamp_min(1e-300), A.transpose(-1, -2)


def check(case: Case, kernels: Any, device: torch.device) -> Iterator[Row]:
    """Check all kernels on one case."""
    x, eps = case.tokens(device), _EPS[case.dtype]
    windows, budget = case.layout(device)
    if case.adaptive:
        adaptive = pack_module("toma_core.selection")
        budget = adaptive.allocate(budget, adaptive.spread(windows.split(x), windows), windows)

    with mock.patch.object(torch, "empty", _poisoned):
        plans = [kernels.weigh(x, None, windows, budget, micro.SCALE) for _ in range(3)]
        alone = None if case.adaptive else kernels.weigh(x[:1], None, windows, budget, micro.SCALE)
        dest_slots, M, back = plans[0]
        given = kernels.weigh(x, dest_slots, windows, budget, micro.SCALE)[1:]
        out, reduced = (case.noise(budget.total, device, seed) for seed in (1, 2))
        # Run each kernel twice: first by Triton's own launch, then by the launch that the pack has prepared.
        merged, spread, restored = (
            [call() for _ in range(2)]
            for call in (
                lambda: kernels.merge(x, M, windows, budget),
                lambda: kernels.unmerge(out, back, windows, budget),
                lambda: kernels.unmerge(out, back, windows, budget, reduced, x),
            )
        )
        packed = kernels.quantize(x)

    same = all(torch.equal(a, b) for plan in plans[1:] for a, b in zip(plan, plans[0], strict=True))
    same = same and (alone is None or all(torch.equal(a[:1], b) for a, b in zip(plans[0], alone, strict=True)))
    yield _row(case, "picks", micro.picks_problem(dest_slots, x, windows, budget))
    exact = M64, back64 = _weights(x, dest_slots, windows, budget)
    for what, weights in (("select and weigh", (M, back)), ("weigh", given)):
        error = max(float((a - b).abs().max()) for a, b in zip(weights, exact, strict=True))
        yield _judged(case, what, error, 10 * eps, same)

    M64, back64, x64, fresh = M.double(), back.double(), x.double(), out.double() - reduced.double()

    def joined(y: Tensor) -> Tensor:
        return windows.join(back64 @ budget.unpack(y))

    for what, results, reference in (
        ("merge", merged, budget.pack(M64 @ windows.split(x64))),
        ("unmerge", spread, joined(out.double())),
        ("restore", restored, x64 + joined(fresh)),
    ):
        yield _judged(case, what, _off(results[0], reference), 2 * eps, torch.equal(*results))
    if hasattr(packed, "codes"):
        theirs = pack_module("toma_core.quant4").quantize(x)
        most = 1.05 * _off(theirs.dequantize(), x64) + eps
        yield _judged(case, "four bits", _off(kernels.dequantize(packed), x64), most)

    yield from propagations(case, x, (windows, budget, *plans[0]), kernels)


def propagations(case: Case, cached: Tensor, plan: tuple[Any, ...], kernels: Any) -> Iterator[Row]:
    """Check `propagate` on cached values and keys, (B, N, C), with a regression on random features. Count the launches
    of `propagate`, with the regression and without."""
    core, module = pack_module("toma_core.merge"), pack_module("toma_core.latent_regression")
    device, (_, N, C) = cached.device, cached.shape
    features = replace(case, channels=_FEATURES, dtype=_F).noise(N, device, 3)
    features[..., -1] = 1
    fresh = case.noise(plan[1].total, device, 1)
    angles = torch.rand(1, N, 1, gcd(C // 2, _PAIRS), device=device) * 6
    R = torch.stack([angles.cos(), -angles.sin(), angles.sin(), angles.cos()], -1).unflatten(-1, (2, 2))
    with mock.patch.object(torch, "empty", _poisoned):
        ours = module.regress(features, core.MergePlan(*plan, kernels))
        rotation = module.Rotation.of(R, R[0, ours.plan.destinations], cached)
        results = [[ours.propagate(cached, fresh, each) for _ in range(2)] for each in (None, rotation)]
    exact = ours.plan.changed(lambda name, t: t if name == "dest_slots" else t.double())
    theirs = module.Regression(replace(exact, kernels=None), ours.fit.double(), ours.spread.double())
    without = launches(
        lambda: core.unmerge_residual(fresh, core.gather_destinations(cached, ours.plan), cached, ours.plan)
    )
    turns = (None, replace(rotation, dtype=torch.float64))
    for what, (first, again), each in zip(("propagate values", "propagate keys"), results, turns, strict=True):
        reference = theirs.propagate(cached.double(), fresh.double(), each)
        row = _judged(case, what, _off(first, reference), 2 * _EPS[case.dtype], torch.equal(first, again))
        count = launches(lambda each=each: ours.propagate(cached, fresh, each))  # type: ignore[misc]
        yield replace(row, note=f"{count} launches, {without} without the regression")


def launches(call: Callable[[], object]) -> int:
    """Count the launches in a call: PyTorch's operations, and Triton's kernels, which are not run."""
    launch = pack_module("toma_core.kernels.triton.launch").Launch
    with mock.patch.object(launch, "_launch") as launched, Meter() as meter:
        call()
    return meter.cost.launches + launched.call_count


def large(case: Case, kernels: Any, device: torch.device) -> Iterator[Row]:
    """Check the last window of the last image in tensors that need 64-bit addresses."""
    windows, budget = case.layout(device)
    x = case.noise(windows.tokens, device)
    out, reduced = (case.noise(budget.total, device, seed) for seed in (1, 2))
    _, M, back = kernels.weigh(x[:1], None, windows, budget, micro.SCALE)
    merged = kernels.merge(x, M, windows, budget)
    restored = kernels.unmerge(out, back, windows, budget, reduced, x)
    K, rows = budget.counts[-1], windows.counts[-1]
    first, source = budget.total - K, windows.source[-1][:rows]
    mine = M[0, -1, :K, :rows].double()
    yield _judged(case, "merge", _off(merged[-1, first:], mine @ x[-1, source].double()), 1e-2)
    fresh = out[-1, first:].double() - reduced[-1, first:].double()
    reference = x[-1, source].double() + back[0, -1, :rows, :K].double() @ fresh
    yield _judged(case, "restore", _off(restored[-1, source], reference), 1e-2)
