"""Time each of the method's four operations alone: selection, weights, merge, unmerge.

Every shape is timed in plain PyTorch, and with the Triton kernels if they run here. Calls cycle through more copies of
their operands than the device's cache can hold. On a GPU, calls are replayed from a CUDA graph, so that only GPU time
is measured. Rows named `host` time the call as a model makes it. The limit of a call is the least time in which the
device can read and write the operands once and multiply them. This limit is computed from the speeds of a large copy
and of a large matrix product, measured at the start. A speed-up is not reported if results differ from fp32 PyTorch by
more than rounding, or if the selected destinations are worse than those of the search in fp64.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks import bench
from benchmarks.bench import Row, Timing
from scripts.comfy_pack import pack_module
from testbed.selectors import facility_location

SCALE = 300.0
# Calls in one CUDA graph: enough that the launch of the graph hardly counts.
_REPLAYED = 60
# Bytes of tokens that calls cycle through: several times the last-level cache of any card.
_ROTATED = 300_000_000
# Selected destinations are compared with those that the search selects in fp64. Their objective must exceed `_WORTH`
# times the fp64 objective. The destinations may differ, by ties in half precision, in less than the share `_APART` of
# windows.
_WORTH, _APART = 0.9999, 0.1


@dataclass(frozen=True)
class Grid:
    """Tokens at one resolution: rows, columns, channels."""

    height: int
    width: int
    channels: int

    @classmethod
    def parse(cls, text: str) -> Grid:
        """Parse rows, columns and channels from 64x64x640."""
        return cls(*map(int, text.split("x")))

    def __str__(self) -> str:
        return f"{self.height}x{self.width}x{self.channels}"

    def tokens(self, batch: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return smooth features with noise, similar to a picture: (B, N, C)."""
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(batch, self.channels, self.height, self.width, generator=generator)
        x = torch.nn.functional.avg_pool2d(x, 3, 1, 1) + 0.1 * x
        return x.flatten(2).transpose(1, 2).contiguous().to(device, dtype)


# SDXL at 1024x1024 in both resolutions, SDXL at 832x1216 in the finer one, and Flux at 1024x1024.
GRIDS = tuple(map(Grid.parse, ("64x64x640", "32x32x1280", "52x76x640", "64x64x3072")))


@dataclass(frozen=True)
class Limits:
    """Measured limits of the device: FLOP/s of a large matrix product, bytes/s of a large copy."""

    flops: float
    bandwidth: float

    @classmethod
    def measured(cls, dtype: torch.dtype, device: torch.device) -> Limits:
        """Measure both limits, each as the best of a few tries."""
        side, copied = (8192, 2**30) if device.type == "cuda" else (1024, 2**26)
        a = torch.randn(side, side, device=device).to(dtype)
        row = torch.empty(copied, dtype=torch.uint8, device=device).fill_(1)
        other = torch.empty_like(row)

        def copy() -> Tensor:
            return other.copy_(row)[:1]

        turns = bench.interleave({"product": lambda: (a @ a)[:1, :1], "copy": copy}, 7, device)
        product, moved = (min(turns[name].seconds) for name in ("product", "copy"))
        return cls(2 * side**3 / product, 2 * copied / moved)

    def seconds(self, flops: float, moved: float) -> float:
        """Return the least time for a number of FLOPs and bytes."""
        return max(flops / self.flops, moved / self.bandwidth)


@dataclass(frozen=True)
class Operands:
    """The operands of a call. x: tokens, (B, N, C). out, reduced: destinations, (B, D, C)."""

    x: Tensor
    plan: Any
    out: Tensor
    reduced: Tensor


@dataclass(frozen=True)
class Job:
    """One operation to time. flops, moved: the least FLOPs and bytes that it needs. reference: the result in fp32
    PyTorch, a function that judges the result, or None if the result is not checked."""

    part: str
    name: str
    call: Callable[[Operands], Any]
    flops: float
    moved: float
    reference: Tensor | Callable[[Tensor], str] | None = None


def picks_problem(picks: Tensor, x: Tensor, windows: Any, budget: Any) -> str:
    """Compare `picks` (B, W, K) with the destinations that the search selects in fp64. Return the problem as text,
    empty if there is none."""
    selection = pack_module("toma_core.selection")
    similarity = selection.cosine_similarity(windows.split(x.double()))
    best = selection.select(similarity, windows, budget)
    valid = None if windows.valid is None else windows.valid.repeat(len(x), 1)
    flat = similarity.flatten(0, 1)
    value, most = (facility_location(flat, p.flatten(0, 1), valid) for p in (picks, best))
    worth, apart = float((value / most).min()), float((picks != best).any(-1).double().mean())
    good = worth > _WORTH and apart < _APART
    return "" if good else f"picks: worth {worth:.5f} of the best, {apart:.1%} of windows have others"


def operands(
    grid: Grid, ratio: float, batch: int, dtype: torch.dtype, device: torch.device
) -> tuple[list[Operands], Any, Any]:
    """Return more copies of the operands than a cache can hold, the windows, and the budget."""
    core = pack_module("toma_core.merge")
    layout, selection = pack_module("toma_core.windows"), pack_module("toma_core.selection")
    x = grid.tokens(batch, dtype, device)
    windows = layout.make_windows(grid.height, grid.width, 8)
    windows, budget = windows.to(device), layout.make_budget(windows.counts, ratio).to(device)
    similarity = selection.cosine_similarity(windows.split(x))
    picks = selection.select(similarity, windows, budget)
    copies = []
    for n in range(min(_REPLAYED, max(2, -(-_ROTATED // x.nbytes)))):
        # Rotating the channels leaves the similarity and the selected destinations unchanged.
        mine = x.roll(n, -1)
        plan = core.weigh(windows.split(mine), picks.clone(), windows, budget, SCALE, dtype)
        assert plan.destinations.numel(), "made now, and kept: not while a call is timed"
        merged = core.merge(mine, plan)
        copies.append(Operands(mine, plan, merged.sin(), merged))
    return copies, windows, budget


def jobs(first: Operands, windows: Any, budget: Any, kernels: Any) -> list[Job]:
    """Return every operation in plain PyTorch, and in Triton if there are kernels. first: the operands whose results
    are checked."""
    core = pack_module("toma_core.merge")
    selection = pack_module("toma_core.selection")
    x, plan = first.x, first.plan
    exact = core.weigh(windows.split(x), plan.dest_slots, windows, budget, SCALE, torch.float32)
    (batch, N, C), D, element = x.shape, plan.num_destinations, x.element_size()
    W, S, K = len(windows.counts), windows.slots, budget.slots
    tokens, reduced = batch * N * C * element, batch * D * C * element
    weights = batch * W * S * K * element
    gram, product = 2.0 * batch * W * S * S * C, 2.0 * batch * W * S * K * C
    greedy = 3.0 * batch * W * K * S * S
    merged = core.merge(x.float(), exact)
    fp32 = first.out.float(), first.reduced.float(), x.float()
    restored = core.unmerge_residual(*fp32, exact)
    unmerging = 2 * (tokens + reduced) + weights

    def weigh(o: Operands) -> Any:
        return core.weigh(windows.split(o.x), o.plan.dest_slots, windows, budget, SCALE, x.dtype)

    def judged(picks: Tensor) -> str:
        return picks_problem(picks, x, windows, budget)

    made = [
        Job("selection", "PyTorch", lambda o: selection.select(
            selection.cosine_similarity(windows.split(o.x)), windows, budget), gram + greedy, tokens, judged),
        Job("weights", "PyTorch", lambda o: weigh(o).merge_weights, gram, tokens + 2 * weights, exact.merge_weights),
        Job("merge", "PyTorch", lambda o: core.merge(o.x, o.plan), product, tokens + reduced + weights, merged),
        Job("unmerge", "PyTorch", lambda o: core.unmerge_residual(o.out, o.reduced, o.x, o.plan), product, unmerging,
            restored),
    ]  # fmt: skip
    if kernels is not None:
        at = windows, budget
        made += [
            Job("selection and weights", "Triton", lambda o: kernels.weigh(o.x, None, *at, SCALE)[0], gram + greedy,
                tokens + 2 * weights, judged),
            Job("weights", "Triton", lambda o: kernels.weigh(o.x, o.plan.dest_slots, *at, SCALE)[1], gram,
                tokens + 2 * weights, exact.merge_weights),
            Job("merge", "Triton", lambda o: kernels.merge(o.x, o.plan.merge_weights, *at), product,
                tokens + reduced + weights, merged),
            Job("unmerge", "Triton",
                lambda o: kernels.unmerge(o.out, o.plan.unmerge_weights, *at, o.reduced, o.x),
                product, unmerging, restored),
            Job("four bits", "Triton", lambda o: kernels.quantize(o.x), 0.0, 1.3 * tokens),
        ]  # fmt: skip
    return made


def _in_turn(call: Callable[[Operands], Any], copies: Sequence[Operands]) -> Callable[[], Any]:
    """Wrap the call so that it uses the next copy of the operands each time."""
    turns = itertools.cycle(copies)
    return lambda: call(next(turns))


def _replayed(call: Callable[[], Any], device: torch.device) -> Callable[[], Tensor]:
    """Capture repeated calls in a CUDA graph, and return a function that replays the graph."""
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_REPLAYED):
            call()
    stub = torch.zeros(1)

    def replay() -> Tensor:
        graph.replay()
        return stub

    return replay


def measure(
    grid: Grid, ratio: float, batch: int, dtype: torch.dtype, device: torch.device, limits: Limits, repeats: int,
    kernels: Any = None, limit: float = float("inf"),
) -> list[Row]:  # fmt: skip
    """Time all jobs of one shape. On a GPU each job is timed twice: replayed from a CUDA graph, and called by the host.
    limit: seconds, see `bench.interleave`."""
    with torch.no_grad():
        copies, windows, budget = operands(grid, ratio, batch, dtype, device)
        todo = jobs(copies[0], windows, budget, kernels)
        stub = torch.zeros(1)
        cases: dict[str, Callable[[], Tensor]] = {}
        outputs = {number: job.call(copies[0]) for number, job in enumerate(todo)}
        for number, job in enumerate(todo):
            call = _in_turn(job.call, copies)
            cases[f"{number} host"] = lambda call=call: (call(), stub)[1]  # type: ignore[misc]
            if device.type == "cuda":
                try:
                    cases[f"{number} replayed"] = _replayed(call, device)
                except RuntimeError as error:
                    bench.say(f"{job.part}, {job.name}: no CUDA graph: {error}")
        timings = bench.interleave(cases, repeats, device, warmups=2, limit=limit)
    slowest = {job.part: timings[f"{n} host"] for n, job in enumerate(todo) if job.name == "PyTorch"}
    rows = []
    for key, timing in timings.items():
        number, how = int(key.split()[0]), key.split()[1]
        job = todo[number]
        if how == "replayed":
            timing = Timing([s / _REPLAYED for s in timing.seconds])
        least = limits.seconds(job.flops, job.moved)
        name = f"{job.name}, {how}" if device.type == "cuda" else job.name
        row = Row(f"micro: {job.part}", str(grid), f"ratio {ratio:g}", batch, name, note=f"limit {least * 1e6:.3g} us")
        row.p20, row.p50, row.p80 = (timing.quantile(share) for share in (0.2, 0.5, 0.8))
        row.ceiling = row.p50 / least
        row.gate = _off(outputs[number], job.reference, dtype)
        base = slowest.get(job.part)
        if not row.gate and base is not None and how == "host":
            row.speedup = base.quantile(0.5) / row.p50
        rows.append(row)
    return rows


def _off(result: Any, reference: Tensor | Callable[[Tensor], str] | None, dtype: torch.dtype) -> str:
    """Return the error against the reference as text, empty if it does not exceed the rounding of the dtype."""
    if reference is None:
        return ""
    if not isinstance(reference, Tensor):
        return reference(result)
    error = float((result.float() - reference).abs().max() / reference.abs().max())
    return "" if error < 8 * torch.finfo(dtype).eps else f"{error:.2g} off from fp32"


def table(rows: Sequence[Row]) -> str:
    """Format the rows as a Markdown table, in microseconds."""
    head = ["operation", "tokens", "batch", "by", "p50 us", "p20-p80", "times the limit", "over PyTorch"]
    lines = []
    for row in rows:
        over = bench.REFUSED if row.gate else bench.times(row.speedup)
        spread = f"{row.p20 * 1e6:.4g}-{row.p80 * 1e6:.4g}"
        cells = [row.section.removeprefix("micro: "), row.model, str(row.batch), row.variant, f"{row.p50 * 1e6:.4g}"]
        lines.append([*cells, spread, f"{row.ceiling or 0:.3g}", f"{over} {row.gate}".strip()])
    return bench.markdown(head, lines) + "\n"


def kernels_here(device: torch.device) -> Any | None:
    """Return the Triton kernels if a GPU can run them."""
    if device.type != "cuda":
        return None
    try:
        return pack_module("toma_core.kernels.triton").TritonKernels()
    except Exception as error:
        bench.say(f"no Triton kernels: {type(error).__name__}: {error}")
        return None
