"""Everything that is worth knowing on this machine, within a time limit: a table, and a few files in one folder.

    python -m benchmarks.suite [--gpu] [--minutes 8] [--only sdxl micro] [--dry-run] [--out FOLDER]

On a GPU (`make bench-gpu`, 8 minutes): the kernels' tests on the card, the four operations alone, whole sampling runs
of SDXL, Flux, Z-Image and Qwen-Image with and without ToMA, rivals, every attention that is there, torch.compile; then
the goals of the project, met or missed, and for a missed one the profile that says why. On a CPU (`make bench`, 15
minutes): what fits there. A section that fails or does not fit is named and the others go on; files are written after
each. Besides PyTorch it needs ComfyUI's folder (COMFYUI_PATH), einops, safetensors, transformers, psutil, PyYAML,
Pillow, and of what seldom is installed already comfy-kitchen, comfy-aimdo, torchsde and trampoline; matplotlib for
plots, pytest for tests if they are there. --dry-run goes the same way with tiny models in a minute, on any machine, and
tells no speed.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import os
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import attentions, bare, bench, breakeven, forward, fullsize, micro, sample, variants
from benchmarks.bench import Row
from benchmarks.fullsize import Shape
from benchmarks.goals import GOALS
from benchmarks.variants import Variant
from benchmarks.whole import WHOLE
from scripts.comfyui import ROOT

RATIO = 0.5
DRY = 16  # a dry run divides the sides of pictures by this


@dataclass
class Suite:
    """What sections share: settings, the models that are built, and the rows so far."""

    dry: bool
    device: torch.device
    dtype: torch.dtype
    deadline: float
    out: Path
    told: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    profiles: list[str] = field(default_factory=list)
    _built: tuple[Any, ...] = ()

    def left(self) -> float:
        """Seconds until the time limit."""
        return self.deadline - time.monotonic()

    def patcher(self, name: str, blocks: tuple[int, ...] | None = None) -> Any:
        """The model, built at its first use; one at a time."""
        key = (name, blocks)
        if not self._built or self._built[0] != key:
            self._built = ()
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            self._built = key, fullsize.patcher(name, self.dtype, self.device, tiny=self.dry, blocks=blocks)
        return self._built[1]

    def shape(self, name: str, side: int, batch: int = 1, width: int = 0, frames: int = 1) -> Shape:
        """A square picture, or one of this width, or so many frames of a video's latent; small ones in a dry run."""
        part = DRY if self.dry else 1
        return Shape(name, side // part, (width or side) // part, batch, self.dry, frames=frames)

    @property
    def more(self) -> dict[str, Any]:
        """Settings that make ToMA merge tiny models."""
        return variants.TINY if self.dry else {}

    def toma(self, name: str, **settings: Any) -> Variant:
        """ToMA at the suite's ratio, every step merged."""
        return variants.toma(name, ratio=RATIO, **settings, **self.more)

    def runs(
        self, name: str, side: int, steps: int, cfg: float, chosen: Sequence[Variant], limit: float, shares: bool = True
    ) -> None:
        """Whole sampling runs, at most `limit` seconds of timed ones."""
        steps = min(steps, 3) if self.dry else steps  # presets run the first and the last whole
        self.rows += sample.measure(
            self.patcher(name), self.shape(name, side), steps, cfg, chosen, self.repeats(9), self.device, shares, limit
        )

    def repeats(self, most: int) -> int:
        """How many turns at most."""
        return 1 if self.dry else most

    def balanced(self) -> Variant:
        """What the node does as it comes."""
        return variants.preset("balanced", ratio=RATIO, **self.more)

    def every_and_balanced(self) -> list[Variant]:
        """The two rows that the goals ask for."""
        return [self.toma("every step"), self.balanced()]


Section = Callable[[Suite], None]


def kernel_tests(suite: Suite) -> None:
    """The kernels' own tests on this device."""
    if importlib.util.find_spec("pytest") is None or importlib.util.find_spec("hypothesis") is None:
        suite.notes.append("tests: left out, pytest or hypothesis is not installed")
        return
    # Not with the settings in pyproject.toml: they ask for a pytest that a bare machine may not have.
    options = ["-q", "-c", os.devnull, "--rootdir", str(ROOT), "-p", "no:cacheprovider", "--import-mode", "importlib"]
    paths = ["tests/toma_core/kernels", "tests/toma_core/test_state.py"]
    if suite.dry:
        paths = ["tests/toma_core/kernels/triton/test_product.py", "-k", "refused"]
    elif importlib.util.find_spec("xdist"):
        paths += ["-n", "8"]
    log = suite.out / "tests.log"
    with log.open("w", encoding="utf-8") as out:
        command = [sys.executable, "-m", "pytest", *options, *paths]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        try:
            done = subprocess.run(command, cwd=ROOT, env=environ, stdout=out, stderr=out, timeout=150, check=False)
            code = done.returncode
        except subprocess.TimeoutExpired:
            code = -1
    last = next((line for line in reversed(log.read_text(encoding="utf-8").splitlines()) if line.strip()), "")
    verdict = {0: "passed", -1: "stopped after 150 s"}.get(code, "FAILED")
    suite.notes.append(f"tests of the kernels on {suite.told['device']}: {verdict} ({last.strip('= ')})")


def operations(suite: Suite) -> None:
    """Selection, weights, merge and unmerge alone."""
    limits = micro.Limits.measured(suite.dtype, suite.device)
    suite.told |= {"TFLOPs": round(limits.flops / 1e12, 3), "GBps": round(limits.bandwidth / 1e9, 1)}
    kernels = micro.kernels_here(suite.device)
    for grid in (micro.Grid(16, 16, 64),) if suite.dry else micro.GRIDS:
        suite.rows += micro.measure(grid, RATIO, 1, suite.dtype, suite.device, limits, suite.repeats(20), kernels)


def whole_runs(name: str, side: int, steps: int, cfg: float, limit: float) -> Section:
    """Whole sampling runs as the goals ask for them; with a cfg of 1 there is one image a batch."""
    return lambda suite: suite.runs(name, side, steps, cfg, suite.every_and_balanced(), limit)


def sdxl_steps(suite: Suite) -> None:
    """4 and 8 steps, step caches, and both; and 50 steps."""
    for steps, limit in ((4, 12), (8, 12), (50, 18)):
        chosen = sample.usual_variants(RATIO, **suite.more) if steps < 20 else suite.every_and_balanced()
        suite.runs("sdxl", 1024, steps, 7.0, chosen, limit, shares=False)


def sdxl_rivals(suite: Suite) -> None:
    """One evaluation of SDXL 1024: every granularity, and what users would take instead."""
    shape = suite.shape("sdxl", 1024, 2 if suite.device.type == "cuda" or suite.dry else 1)
    granular = forward.toma_variants([RATIO], forward.GRANULARITIES, suite.more)
    rivals = variants.unet_rivals(RATIO)
    stacked = (variants.stacked(rival, granular[-1]) for rival in rivals[1:])
    chosen = [*granular, suite.balanced(), *rivals, *stacked]
    suite.rows += forward.measure(
        suite.patcher("sdxl"), shape, chosen, suite.repeats(20), suite.device, check_kernels=True, limit=20
    )


def sdxl_sizes(suite: Suite) -> None:
    """One evaluation by size, batch and ratio."""
    for width, height, batch in ((832, 1216, 2), (1536, 1536, 2), (1024, 1024, 4), (512, 512, 2)):
        small = DRY if suite.dry else 1
        shape = Shape("sdxl", height // small, width // small, batch, suite.dry)
        # Every grid is merged. At 512 x 512 Auto leaves fast cards whole; this shows whether it is right.
        chosen = forward.toma_variants((0.25, 0.5, 0.75), ["stack"], {"min_tokens": 4, **suite.more})
        suite.rows += forward.measure(suite.patcher("sdxl"), shape, chosen, suite.repeats(9), suite.device, limit=4)


def compiled(suite: Suite) -> None:
    """torch.compile through ComfyUI's node: alone, and with ToMA in both orders."""
    backend = "eager" if suite.dry else "inductor"
    compiler, merged = variants.compiled(backend), suite.toma("stack")
    chosen = [merged, compiler, variants.stacked(merged, compiler), variants.stacked(compiler, merged)]
    shape = suite.shape("sdxl", 1024, 2)
    suite.rows += forward.measure(
        suite.patcher("sdxl"), shape, chosen, suite.repeats(15), suite.device, "torch.compile", limit=10
    )
    torch.compiler.reset()


def by_attention(name: str, batch: int) -> Section:
    """One evaluation at 1024 by each attention that ComfyUI offers here, alone and with ToMA."""

    def section(suite: Suite) -> None:
        what, where = (suite.patcher(name), suite.shape(name, 1024, batch)), (suite.dtype, suite.device)
        rows, notes = attentions.measure(*what, suite.toma("stack"), *where, suite.repeats(9), 12)
        suite.rows += rows
        suite.notes += [f"{name}: {note}" for note in notes]

    return section


def break_even(suite: Suite) -> None:
    """From how many tokens on merging pays: stacks of SDXL's blocks alone."""
    sides = (4,) if suite.dry else (8, 12, 16, 24, 32)
    stacks = ((64, 1),) if suite.dry else breakeven.STACKS
    for width, depth in stacks:
        suite.rows += breakeven.measure(
            width, depth, sides, RATIO, suite.repeats(7), suite.dtype, suite.device, batch=1
        )


def cpu_sdxl(suite: Suite) -> None:
    """Full-size SDXL on a CPU: ToMA, and every rival in the same table."""
    rivals = variants.unet_rivals(RATIO)
    stack = forward.toma_variants([RATIO], ["stack"], suite.more)[0]
    chosen = [stack, suite.balanced(), *rivals, *(variants.stacked(rival, stack) for rival in rivals[2:])]
    shape = suite.shape("sdxl", 1024)
    suite.rows += forward.measure(
        suite.patcher("sdxl"), shape, chosen, suite.repeats(5), suite.device, limit=suite.left() * 0.4
    )


def cpu_flux(suite: Suite) -> None:
    """Three full-width blocks of Flux on a CPU, none left whole."""
    whole = {"whole_first": 0, **suite.more}
    chosen = forward.toma_variants([RATIO], forward.GRANULARITIES, whole)
    blocks = (1, 2)
    suite.rows += forward.measure(
        suite.patcher("flux", blocks), suite.shape("flux", 1024), chosen, suite.repeats(5), suite.device,
        blocks=blocks, limit=suite.left() * 0.2,
    )  # fmt: skip


# At the sizes that they are made for, the most used first.
FAMILIES = (
    ("z_image", 1024),
    ("qwen_image", 1328),
    ("krea2", 1024),
    ("flux2", 1024),
    ("klein", 1024),
    ("sd3", 1024),
    ("chroma", 1024),
)


# Few blocks of random weights, with nothing whole before or after them; no output at all is 1 off.
_FAR = 0.8


def few_blocks(name: str, side: int, blocks: tuple[int, ...] = (), *, keys: bool = False, **shape: int) -> Section:
    """Two or three full-width blocks on a CPU, or so many, none left whole. keys: also with fewer keys alone,
    and a merged step of `balanced`, whose blocks look at all tokens, as they are and in four bits."""

    def section(suite: Suite) -> None:
        chosen, few = forward.toma_variants([RATIO], ["stack"], suite.more), blocks or WHOLE[name].few
        if keys:
            chosen.append(suite.toma(f"keys only, ratio {RATIO:g}", keys_only=True))
            looking = variants.preset("balanced", ratio=RATIO, min_tokens=4)
            chosen += [looking, replace(looking, name=f"{looking.name}, keys in four bits", packs=True)]
        suite.rows += forward.measure(
            suite.patcher(name, few), suite.shape(name, side, **shape), chosen, suite.repeats(5), suite.device,
            blocks=few, limit=40, farthest=_FAR,
        )  # fmt: skip

    return section


def cpu_runs(suite: Suite) -> None:
    """Whole runs of full-size SDXL at 512 x 512: 4 steps, step caches, and both."""
    chosen = sample.usual_variants(RATIO, **suite.more)
    suite.runs("sdxl", 512, 4, 1.0, chosen, suite.left() * 0.5)


# Name, what it needs at least in seconds, what it does. The most wanted come first.
GPU: tuple[tuple[str, float, Section], ...] = (
    ("tests", 60, kernel_tests),
    ("micro", 20, operations),
    ("sdxl-1024-cfg", 30, whole_runs("sdxl", 1024, 20, 7.0, 25)),
    ("sdxl-1024", 25, whole_runs("sdxl", 1024, 20, 1.0, 20)),
    ("sdxl-2048", 50, whole_runs("sdxl", 2048, 20, 7.0, 45)),
    ("flux-1024", 45, whole_runs("flux", 1024, 20, 1.0, 30)),
    ("flux-2048", 50, whole_runs("flux", 2048, 8, 1.0, 40)),
    ("z-image-1024", 30, whole_runs("z_image", 1024, 8, 1.0, 15)),
    ("qwen-1328", 50, whole_runs("qwen_image", 1328, 8, 1.0, 30)),
    ("attention-flux", 25, by_attention("flux", 1)),
    ("sdxl-rivals", 30, sdxl_rivals),
    ("attention-sdxl", 25, by_attention("sdxl", 2)),
    ("sdxl-steps", 50, sdxl_steps),
    ("break-even", 15, break_even),
    ("sdxl-sizes", 30, sdxl_sizes),
    ("compile", 150, compiled),
)
CPU: tuple[tuple[str, float, Section], ...] = (
    ("micro", 20, operations),
    ("sdxl", 120, cpu_sdxl),
    ("flux", 60, cpu_flux),
    *((f"blocks-{name}", 40, few_blocks(name, side)) for name, side in FAMILIES),
    ("steps", 200, cpu_runs),
    ("break-even", 60, break_even),
    # 9,360 tokens, and 32,760: minutes each. In the time that there is by itself they have no turn.
    ("video-480p-21-frames", 900, few_blocks("wan", 480, (1,), keys=True, width=832, frames=6)),
    ("video-480p-81-frames", 3600, few_blocks("wan", 480, (1,), width=832, frames=21)),
)


def goals(suite: Suite) -> str:
    """The goals as a table; those that are missed are profiled, as long as time is left."""
    lines = ["| goal | wanted | measured | |", "|---" * 4 + "|"]
    for goal in GOALS:
        wanted, measured, missed = goal.judged(suite.rows)
        lines.append(f"| {goal.name} | {wanted} | {measured} | {'missed' if missed else ''} |")
        row = goal.row(suite.rows)
        if missed and row is not None and row.model in ("sdxl", "flux") and suite.left() > 30:
            title = f"{goal.name}: {measured} for {wanted}"
            width, height = bench.size(row.size)
            shape = Shape(row.model, height, width, 2 if "CFG" in goal.name else 1, suite.dry)
            try:
                top = forward.profiled(suite.patcher(row.model), shape, suite.toma("every step"), suite.device).top
            except Exception as error:
                top = f"no profile: {type(error).__name__}: {error}"
            suite.profiles.append(f"{title}\n{top}\n")
    return "\n".join(lines) + "\n"


def save(suite: Suite, extra: str = "") -> None:
    """Write what there is: results.json, .csv, .md and .png, and profile.txt."""
    alone = [row for row in suite.rows if row.section.startswith("micro")]
    notes = "\n".join(f"- {note}" for note in suite.notes)
    page = "\n\n".join(part for part in (extra, micro.table(alone) if alone else "", notes) if part)
    whole = [row for row in suite.rows if not row.section.startswith("micro")]
    bench.write(suite.out / "results", suite.told, suite.rows, page, shown=whole)
    if suite.profiles:
        (suite.out / "profile.txt").write_text("\n".join(suite.profiles), encoding="utf-8")


def main() -> None:
    """Parse, go through the sections, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true", help="the sections for a GPU, whatever the machine has")
    parser.add_argument("--minutes", type=float, help="time limit (8 for a GPU, 15 for a CPU)")
    parser.add_argument("--only", nargs="*", default=[], help="sections whose name starts with one of these")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--dry-run", action="store_true", help="the same way with tiny models, to see that it runs")
    parser.add_argument("--out", type=Path, help="folder for the files (benchmarks/results/DEVICE)")
    args = parser.parse_args()
    begin = time.monotonic()

    bare.prepare()
    device = bench.device_here()
    gpu = args.gpu or device.type == "cuda"
    if args.gpu and device.type != "cuda" and not args.dry_run:
        raise SystemExit("there is no CUDA device here: leave out --gpu, or add --dry-run to see that it runs")
    dtype = torch.float32 if args.dry_run else getattr(torch, args.dtype)
    told = bench.conditions(dtype=str(dtype).removeprefix("torch."))
    if args.dry_run:
        told["models"] = "tiny: a dry run, no speed"
    name = "dry-run" if args.dry_run else re.sub(r"[^a-z0-9]+", "-", told["device"].lower()).strip("-")
    out = args.out or ROOT / "benchmarks" / "results" / name
    out.mkdir(parents=True, exist_ok=True)
    seconds = 60 * (args.minutes or (8 if gpu else 15))
    suite = Suite(args.dry_run, device, dtype, begin + seconds, out, told)
    for name, needs, section in GPU if gpu else CPU:
        if args.only and not name.startswith(tuple(args.only)):
            continue
        if not args.dry_run and suite.left() < needs:
            suite.notes.append(f"{name}: left out, {suite.left():.0f} s were left")
            continue
        start = time.monotonic()
        try:
            section(suite)
        except Exception as error:
            traceback.print_exc()
            suite.notes.append(f"{name}: FAILED, {type(error).__name__}: {error}")
        bench.say(f"{name}: {time.monotonic() - start:.0f} s, {suite.left():.0f} s left")
        save(suite)
    text = goals(suite) if gpu else ""
    save(suite, text)
    print((out / "results.md").read_text(encoding="utf-8"))
    print(f"{time.monotonic() - begin:.0f} s, files in {out}")
    found = [*bench.red(suite.rows), *(note for note in suite.notes if "FAILED" in note)]
    if found:
        raise SystemExit("\n".join(["not everything is green:", *found]))


if __name__ == "__main__":
    main()
