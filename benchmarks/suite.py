"""Run all benchmarks of this machine within a time limit, and write a table and a few files into one folder.

    python -m benchmarks.suite [--gpu] [--minutes 12] [--only sdxl micro] [--dry-run] [--out FOLDER]

On a GPU (`make bench-gpu`, 12 minutes), the most important sections come first: every kernel against fp64; runs of SDXL
with guidance, and its rivals; single operations; the time of the host's launches; runs of Flux.1, Z-Image, Qwen-Image
and SDXL 2048; larger sizes if --minutes allows them; torch.compile. On a CPU (`make bench`, 15 minutes), sections that
need more time than is left are skipped. Each section is a separate process with a time limit, so that a failing,
hanging or device-breaking section does not affect the others. Files are written after every result. --dry-run runs all
sections with tiny models in a minute, on any machine, and reports no speed. `benchmarks/gpu/visit.sh` runs the suite on
a machine without network.

Besides PyTorch the suite needs ComfyUI's folder (COMFYUI_PATH), einops, safetensors, transformers, psutil, PyYAML,
Pillow and the packages of `make gpu-kit`.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path

import torch

from benchmarks import bench
from benchmarks.results import NAME, Results
from benchmarks.sections import CPU, GPU, Section, Suite
from scripts.comfyui import ROOT
from testbed import stand_ins

# In a dry run time limits are multiplied by this factor, because the machine may be slow and busy.
_DRY = 20


def go_through(sections: list[Section], results: Results, deadline: float, options: list[str], dry: bool) -> Results:
    """Run each section in a separate process until its limit or the deadline (a value of `time.time`), and return the
    results."""
    environ = {**os.environ, **({"TRITON_INTERPRET": "1"} if dry else {})}
    results.save()
    for number, section in enumerate(sections, 1):
        begin = time.time()
        left = deadline - begin
        later = sum(other.limit for other in sections[number:] if section.extra and not other.extra)
        if left < section.needs + later and not dry:
            results.note(f"{section.name}: left out, {left:.0f} s were left")
            continue
        limit = min(section.limit * (_DRY if dry else 1), left)
        task = ["--section", section.name, "--until", f"{begin + limit:.1f}", "--out", str(results.folder)]
        failed = _run([sys.executable, "-m", "benchmarks.suite", *options, *task], environ, limit)
        results = Results.read(results.folder)
        if failed:
            results.note(f"{section.name}: FAILED, {failed}")
        bench.say(f"{section.name}: {time.time() - begin:.0f} s, {deadline - time.time():.0f} s left")
    return results


def _run(command: list[str], environ: dict[str, str], limit: float) -> str:
    """Run a command, and kill it and its children after `limit` seconds. Return the error, empty if there is none."""
    process = subprocess.Popen(command, cwd=ROOT, env=environ)
    try:
        code = process.wait(limit)
    except subprocess.TimeoutExpired:
        return f"stopped after {limit:.0f} s"
    finally:
        if os.name == "posix":
            with suppress(ProcessLookupError):  # also kills its children, because a section leads a process group
                os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.wait()
    return "" if code == 0 else f"its process ended with {code}"


def run_section(section: Section, suite: Suite) -> None:
    """Run one section in this process and note its failures."""
    try:
        section.run(suite)
    except Exception as error:
        traceback.print_exc()
        suite.results.note(f"{section.name}: FAILED, {type(error).__name__}: {error}")
    suite.results.save()


def main() -> None:
    """Parse the command line, run the sections, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true", help="the sections for a GPU, whatever the machine has")
    parser.add_argument("--minutes", type=float, help="time limit (12 for a GPU, 15 for a CPU)")
    parser.add_argument("--only", nargs="*", default=[], help="sections whose name starts with one of these")
    parser.add_argument("--dry-run", action="store_true", help="the same way with tiny models, to see that it runs")
    parser.add_argument("--out", type=Path, help="folder for the files (benchmarks/results/DEVICE)")
    # Options for the child processes: one section, its deadline in seconds since 1970. Results go to --out.
    parser.add_argument("--section", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    begin = time.time()

    stand_ins.prepare()
    device = bench.device_here()
    gpu = args.gpu or device.type == "cuda"
    table = GPU if gpu else CPU
    if args.gpu and device.type != "cuda" and not args.dry_run:
        raise SystemExit("there is no CUDA device here: leave out --gpu, or add --dry-run to see that it runs")
    dtype = torch.float32 if args.dry_run else torch.bfloat16
    if args.section:
        if os.name == "posix":
            os.setpgid(0, 0)
        suite = Suite(args.dry_run, device, dtype, args.until, Results.read(args.out))
        run_section(next(s for s in table if s.name == args.section), suite)
        return

    chosen = [s for s in table if not args.only or s.name.startswith(tuple(args.only))]
    if not chosen:
        raise SystemExit(f"no section begins so: there are {', '.join(s.name for s in table)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # `_run` then kills the section
    conditions = bench.conditions(dtype=str(dtype).removeprefix("torch."))
    if args.dry_run:
        conditions["models"] = "tiny: a dry run, no speed"
    name = "dry-run" if args.dry_run else re.sub(r"[^a-z0-9]+", "-", conditions["device"].lower()).strip("-")
    results = Results(args.out or ROOT / "benchmarks" / "results" / name, conditions)
    options = [*["--gpu"] * gpu, *["--dry-run"] * args.dry_run]
    deadline = begin + 60 * (args.minutes or (12 if gpu else 15))
    results = go_through(chosen, results, deadline, options, args.dry_run)
    results.save()
    print((results.folder / f"{NAME}.md").read_text(encoding="utf-8"))
    print(f"{time.time() - begin:.0f} s, files in {results.folder}")
    if found := results.wrong():
        raise SystemExit("\n".join(["not everything is green:", *found]))


if __name__ == "__main__":
    main()
