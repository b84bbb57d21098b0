"""Tools of all benchmarks: the conditions of a measurement, interleaved timing, and rows as tables and JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scripts.comfy_pack import pack_module

REFUSED = "refused"


def device_here() -> torch.device:
    """Return the device on which ComfyUI runs models."""
    import comfy.model_management

    return torch.device(comfy.model_management.get_torch_device())


def say(text: str) -> None:
    """Print a line to stderr, apart from the results."""
    print(text, file=sys.stderr, flush=True)


def conditions(**more: Any) -> dict[str, Any]:
    """Return the conditions of a measurement: versions, device, settings."""
    import comfy.ldm.modules.attention
    from comfyui_version import __version__ as comfyui

    cuda = torch.cuda.is_available()
    values: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if cuda else f"CPU, {_processor()}, {torch.get_num_threads()} threads",
        "attention": comfy.ldm.modules.attention.optimized_attention.__name__,
        "torch": torch.__version__,
        "comfyui": comfyui,
        "python": platform.python_version(),
        "load": f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown",
    }
    if cuda:
        import importlib.util

        card = torch.cuda.get_device_properties(0)
        rate = pack_module("toma_core.cost_model").card_of(torch.device("cuda", 0)).rate(torch.bfloat16)
        values["cuda"] = torch.version.cuda
        values["capability"] = f"{card.major}.{card.minor}, {card.multi_processor_count} processors"
        values["free GiB"] = round(torch.cuda.mem_get_info()[0] / 2**30, 1)
        values["rate of the cost model, TFLOPs"] = round(rate / 1e12, 1)
        values["triton"] = __import__("triton").__version__ if importlib.util.find_spec("triton") else "not installed"
    return {**values, "weights": "random", **more}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


@dataclass
class Timing:
    """The measurements of one case of `interleave`. Each list has one entry per turn of `interleave`."""

    seconds: list[float] = field(default_factory=list)
    output: Tensor | None = None
    peak: int = 0  # bytes of device memory, 0 if unknown
    handed: list[float] = field(default_factory=list)  # seconds until the host has launched all operations

    def quantile(self, share: float) -> float:
        return quantile(self.seconds, share)


def quantile(values: Sequence[float], share: float) -> float:
    """Return the quantile `share` (0 to 1) of the values, with linear interpolation."""
    return float(torch.tensor(values, dtype=torch.float64).quantile(share))


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all launched work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def interleave(
    cases: Mapping[str, Callable[[], Tensor]],
    repeats: int,
    device: torch.device,
    warmups: int = 1,
    limit: float = float("inf"),
) -> dict[str, Timing]:
    """Run several turns. Each turn times every case once, so a slower machine slows all cases equally. Warm-up turns
    are not counted.

    limit: seconds for all turns, including warm-up turns. A turn begins only if the previous turn took no longer than
    the time that is left. At least one turn is counted.
    """
    timings = {name: Timing() for name in cases}
    begin = last = time.monotonic()
    counted = 0
    for turn in range(repeats + warmups):
        now = time.monotonic()
        late, last = now - begin + (now - last) > limit, now
        if late and counted:
            break
        counts = turn >= warmups or (late and turn > 0)
        counted += counts
        for name, run in cases.items():
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            synchronize(device)
            start = time.perf_counter()
            output = run()
            handed = time.perf_counter() - start
            synchronize(device)
            seconds = time.perf_counter() - start
            timing = timings[name]
            timing.output = output.float().cpu()
            if device.type == "cuda":
                timing.peak = max(timing.peak, torch.cuda.max_memory_allocated(device))
            if counts:
                timing.seconds.append(seconds)
                timing.handed.append(handed)
    return timings


@dataclass
class Row:
    """One row of a result: a variant of a model at one size."""

    section: str
    model: str
    size: str
    batch: int
    variant: str
    tokens: str = ""
    p20: float = 0.0  # percentiles of the turns' seconds
    p50: float = 0.0
    p80: float = 0.0
    # Each turn times every variant once. Unpatched time / variant's time, median over turns. None if `gate` has text.
    speedup: float | None = None
    speedup_low: float | None = None
    speedup_high: float | None = None
    ceiling: float | None = None  # FLOPs of the unpatched model / FLOPs of the variant
    error: float | None = None  # relative error of the output against the unpatched model's
    host: float | None = None  # seconds until the host has launched all operations
    gpu: float | None = None  # seconds of the kernels, if profiled
    peak_mb: float | None = None
    shares: dict[str, float] = field(default_factory=dict)  # shares of a step's time, by part
    gate: str = ""  # why no speed-up is reported, empty if one is reported
    note: str = ""
    profile: str = ""  # the slowest operations, as text


def relative_error(output: Tensor, base: Tensor) -> float:
    """Return |output - base| / |base|."""
    return float((output - base).norm() / base.norm())


def compared(row: Row, timing: Timing, base: Timing, problems: Sequence[str] = ()) -> Row:
    """Return the row with its times and its speed-up over `base`. The speed-up is left out if there are `problems`, or
    if the output has a wrong shape or is not finite."""
    found = list(problems)
    assert timing.output is not None and base.output is not None
    if timing.output.shape != base.output.shape:
        found.append(f"output of {tuple(timing.output.shape)} for {tuple(base.output.shape)}")
    elif not torch.isfinite(timing.output).all():
        found.append("the output is not finite")
    else:
        row.error = relative_error(timing.output, base.output)
    row.p20, row.p50, row.p80 = (timing.quantile(share) for share in (0.2, 0.5, 0.8))
    row.peak_mb = timing.peak / 2**20 or None
    row.gate = "; ".join(found)
    if not found:
        ratios = [b / t for b, t in zip(base.seconds, timing.seconds, strict=True)]
        row.speedup = statistics.median(ratios)
        row.speedup_low, row.speedup_high = quantile(ratios, 0.2), quantile(ratios, 0.8)
    return row


_SHOWN = ("section", "model", "size", "batch", "variant", "tokens")


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def times(factor: float | None) -> str:
    """Return a factor as text, empty for None."""
    return "" if factor is None else f"{factor:.2f}x"


def table(rows: Sequence[Row]) -> str:
    """Format the rows as a Markdown table."""
    head = [*_SHOWN, "p50 s", "p20-p80", "host ms", "GPU ms", "speed-up", "FLOP ceiling", "error", "MB", "note"]
    lines = []
    for row in rows:
        speedup = REFUSED if row.gate else times(row.speedup)
        if row.speedup_low is not None and row.speedup_high is not None and row.variant != "unpatched":
            speedup += f" ({row.speedup_low:.2f}-{row.speedup_high:.2f})"
        cells = [str(getattr(row, name)) for name in _SHOWN]
        alone = ("" if seconds is None else f"{seconds * 1e3:.4g}" for seconds in (row.host, row.gpu))
        cells += [f"{row.p50:.4g}", f"{row.p20:.4g}-{row.p80:.4g}", *alone, speedup, times(row.ceiling)]
        cells.append("" if row.error is None else f"{row.error:.4f}")
        cells.append("" if row.peak_mb is None else f"{row.peak_mb:.0f}")
        shares = ", ".join(f"{part} {share:.1%}" for part, share in row.shares.items())
        cells.append(joined(row.gate, shares, row.note))
        lines.append(cells)
    return markdown(head, lines) + "\n"


def joined(*notes: str) -> str:
    """Return the notes that are not empty as one text."""
    return "; ".join(filter(None, notes))


def red(rows: Sequence[Row]) -> list[str]:
    """List the rows that report no speed-up, with the reasons."""
    return [f"{row.section}, {row.model} {row.size}, {row.variant}: {row.gate}" for row in rows if row.gate]


def write(
    path: Path,
    conditions: dict[str, Any],
    rows: Sequence[Row],
    text: str = "",
    shown: Sequence[Row] | None = None,
    notes: Sequence[str] = (),
) -> None:
    """Write PATH.json and PATH.md. text: text of PATH.md above its table. shown: rows of the table, None for all rows.
    notes: sentences to store in PATH.json."""
    shown = rows if shown is None else shown
    path.parent.mkdir(parents=True, exist_ok=True)
    result = {"conditions": conditions, "rows": [asdict(row) for row in rows], "notes": list(notes)}
    part = path.with_suffix(".part")  # written first, so that an interrupted write does not damage PATH.json
    part.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    part.replace(path.with_suffix(".json"))
    shown_conditions = ", ".join(f"{key}: {value}" for key, value in conditions.items())
    page = "\n\n".join(each for each in (shown_conditions, text, table(shown) if shown else "") if each)
    path.with_suffix(".md").write_text(page.rstrip() + "\n", encoding="utf-8")


def command_line(about: str | None, name: str, repeats: int) -> argparse.ArgumentParser:
    """Return a parser with the options --repeats and --out. about: docstring of the
    benchmark's module."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--out", type=Path, help=f"write FOLDER/{name}.json and .md")
    return parser


def finish(rows: Sequence[Row], conditions: dict[str, Any], path: Path | None) -> None:
    """Print the rows, and write them if there is a path. Exit with an error if a row reports no speed-up."""
    print(table(rows))
    if path:
        write(path, conditions, rows)
    if found := red(rows):
        raise SystemExit("\n".join(["speed-ups were refused:", *found]))
