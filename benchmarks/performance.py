"""Write the tables of docs/performance.md and results/counts.md: `python -m benchmarks.performance [TABLE ...]`.

FLOPs, bytes and launches in the tables are counted on the meta device. Measured speed-ups come from the committed
results of `benchmarks.suite`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks import bench, cost, counted
from benchmarks.counted import TABLES, Rows, by_preset, by_toma, count, merged_steps, tabulated
from scripts.comfy_pack import pack_module
from scripts.comfyui import ROOT
from testbed import stand_ins
from testbed.full_model import TITLES
from testbed.fullsize import Shape

RESULTS = ROOT / "benchmarks" / "results"
PAGE, COUNTS = ROOT / "docs" / "performance.md", RESULTS / "counts.md"


@tabulated(
    *("model", "merged around each", "by", "launches added", "host time added"),
    *("bytes of merging", "fewer bytes in all"),
)
def overhead() -> Rows:
    """Tabulate the cost that merging adds to an evaluation that reuses its plans."""
    host = json.loads((RESULTS / "hosttime" / "hosttime.json").read_text(encoding="utf-8"))["rows"]
    for model, name in (("sdxl", "SDXL"), ("flux", "Flux")):
        base = count(Shape(model))
        for granularity in ("block", "stack") if model == "flux" else ("module", "block", "stack"):
            # With Triton each merge and each unmerge is one launch, so the number of launches is the number of calls.
            fused = count(Shape(model), by_toma(granularity=granularity), kernels=True).parts
            for kernels, by in ((True, "Triton"), (False, "PyTorch")):
                merged = count(Shape(model), by_toma(granularity=granularity), kernels=kernels)
                added = [merged.parts[part] for part in ("merge", "unmerge")]
                calls = (("merge", "merge"), ("unmerge", "restore"))  # parts, and their names in `benchmarks.hosttime`
                adds = [host[by][call] * fused[part].launches for part, call in calls]
                launches = f"{merged.launches - base.launches:+d} ({merged.launches / base.launches - 1:+.1%})"
                host_time = f"+{sum(adds):.0f} ({sum(adds) / base.launches:+.0%})"
                merging = f"{sum(part.bytes for part in added) / merged.bytes:.1%}"
                yield [name, granularity, by, launches, host_time, merging, f"{base.bytes / merged.bytes:.2f}x"]


@tabulated("model", "side, px", "of FLOPs", "of FLOPs at 0.5", "free attention", "on top of ToMA", "with ToMA in all")
def attention() -> Rows:
    """Tabulate how much a faster attention can save in the unmerged and in the merged model."""
    for model, name in (("sdxl", "SDXL"), ("flux", "Flux")):
        for side in (1024, 2048):
            shape = Shape(model, side, side)
            costs = [count(shape), count(shape, by_toma())]
            shares = [each.products["attention"] / each.flops for each in costs]
            free = (f"{1 / (1 - share):.2f}x" for share in shares)
            both = f"{costs[0].flops / costs[1].flops / (1 - shares[1]):.2f}x"
            yield [name, f"{side}", *(f"{share:.0%}" for share in shares), *free, both]


@tabulated(
    *("model", "size", "batch", "TFLOP", "GB", "launches", "of FLOPs in QK^T and AV"),
    *("TFLOP at 0.5", "GB at 0.5", "launches at 0.5"),
)
def growth() -> Rows:
    """Tabulate the cost of an evaluation of SDXL and of Flux, unmerged and merged, by picture size and batch."""
    for model in ("sdxl", "flux"):
        shapes = [Shape(model, side, side) for side in counted.SIDES]
        shapes += [Shape(model, batch=batch) for batch in (2, 4, 8)]
        for shape in shapes:
            base, merged = count(shape), count(shape, by_toma())
            attention = base.products["attention"] / base.flops
            numbers = *counted.figures(base), f"{attention:.0%}", *counted.figures(merged)
            yield [model, shape.size, str(shape.batch), *numbers]


_SETTINGS = (
    ("quality", "quality", 0.5),
    ("balanced", "balanced", 0.5),
    ("balanced at 0.6", "balanced", 0.6),
    ("balanced at 0.75", "balanced", 0.75),
    ("paper", "paper", 0.5),
)


@tabulated("model", "side, px", "setting", "a merged step", *(f"{n} steps" for n in counted.RUNS))
def runs() -> Rows:
    """Tabulate the FLOPs that merging saves in a run, by number of steps. SDXL and Flux have a row for each of
    `_SETTINGS`, other models only for `balanced`."""
    for model in TITLES:
        for size, shape in counted.sizes_of(model):
            unmerged = count(shape).flops
            for name, preset, ratio in _SETTINGS:
                if name != "balanced" and model not in ("sdxl", "flux"):
                    continue
                step = merged_steps(model, preset, cost.STEPS)[0]
                share = count(shape, by_preset(preset, ratio), step=step).flops / unmerged
                merged = ((len(merged_steps(model, preset, steps)), steps) for steps in counted.RUNS)
                saved = (f"{100 * (1 - share) * number / steps:.0f} % ({number})" for number, steps in merged)
                yield [TITLES[model], size, name, f"{100 * (1 - share):.0f} %", *saved]


@tabulated("model", "by", "launches of all plans", "of an evaluation", "selection interval", "a step")
def planning() -> Rows:
    """Tabulate the cost of the balanced preset's plans, and the number of steps that share a plan."""
    for model, name in (("sdxl", "SDXL"), ("flux", "Flux")):
        every = counted.settings_of(model, "balanced").selection_interval
        # Count a merged step. Where plans are made from predictions, a full step makes no plans.
        step = merged_steps(model, "balanced", cost.STEPS)[0]
        count(Shape(model), by_preset("balanced"), plan=True, step=step)  # makes the windows that the counts reuse
        for kernels, by in ((True, "Triton"), (False, "PyTorch")):
            made = count(Shape(model), by_preset("balanced"), kernels=kernels, plan=True, step=step)
            plan = made.parts["plan"]
            share = f"{plan.launches / made.launches:.1%}"
            yield [name, by, f"{plan.launches}", share, f"{every}", f"{plan.launches / every:.0f}"]


# Short name of a card -> name in the driver, compute capability, number of multiprocessors, and boost clock in Hz.
CARDS = {
    "B200": ("NVIDIA B200", (10, 0), 148, 1.965e9),
    "H100": ("NVIDIA H100 80GB HBM3", (9, 0), 132, 1.98e9),
    "A100": ("NVIDIA A100-SXM4-80GB", (8, 0), 108, 1.41e9),
    "RTX 4090": ("NVIDIA GeForce RTX 4090", (8, 9), 128, 2.52e9),
    "RTX 3060": ("NVIDIA GeForce RTX 3060", (8, 6), 28, 1.777e9),
}


@tabulated("blocks of", "grid", *CARDS)
def auto() -> Rows:
    """Tabulate Auto's decisions for blocks on common cards, in half precision."""
    cost_model = pack_module("toma_core.cost_model")
    names = ("unet", "flux", "chroma", "lumina", "krea", "qwen", "sd3")
    of = {name: pack_module(f"nodes.adapters.families.{name}") for name in names}
    unet, flux, sd3 = of["unet"].COST, of["flux"], of["sd3"].COST
    for name, side, width, block, *around in (
        ("SD1.5 512, finest", 64, 320, unet, cost_model.Granularity.BLOCK),
        ("SDXL 512, finest", 32, 640, unet),
        ("SDXL 512, coarser", 16, 1280, unet),
        ("SDXL 1024, finest", 64, 640, unet),
        ("SDXL 1024, coarser", 32, 1280, unet),
        ("Flux 512, double", 32, 3072, flux.DOUBLE),
        ("Flux 512, single", 32, 3072, flux.SINGLE),
        ("Flux 1024, double", 64, 3072, flux.DOUBLE),
        ("Flux.2 dev 512, single", 32, 6144, flux.FLUX2_SINGLE),
        ("Klein 9B 512, double", 32, 4096, flux.FLUX2_DOUBLE),
        ("Chroma 512, single", 32, 3072, of["chroma"].SINGLE),
        ("Z-Image 512", 32, 3840, of["lumina"].Z_IMAGE),
        ("Lumina 2 512", 32, 2304, of["lumina"].LUMINA),
        ("Krea 2 512", 32, 6144, of["krea"].COST),
        ("Qwen-Image 512", 32, 3072, of["qwen"].COST),
        ("SD3.5 large 512", 32, 2432, sd3),
        ("SD3.5 large 1024", 64, 2432, sd3),
    ):
        kind = around[0] if around else cost_model.Granularity.STACK
        said = []
        for card in (cost_model.Card(*card) for card in CARDS.values()):
            share = block.flops(side**2, 1, width) / card.rate(torch.float16) / block.launching(kind)
            unmerged = cost_model.too_little(side**2, 1, width, torch.float16, card, block, kind)
            said.append(f"{share:.{0 if share >= 10 else 2}f}, {'not merged' if unmerged else 'merged'}")
        yield [name, f"{side}x{side}x{width}", *said]


def measured() -> str:
    """Tabulate the measured speed-ups of all committed results beside the highest speed-ups that FLOPs allow."""
    results = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*/results.json"))]
    rows = []
    for result in results:
        for row in result["rows"]:
            if row["variant"] != "unpatched" and not row["section"].startswith(("micro", "kernels")):
                size = f"{row['size']}, batch {row['batch']}"
                figures = bench.times(row["speedup"]) or bench.REFUSED, bench.times(row["ceiling"])
                device = result["conditions"]["device"]
                rows.append([device, row["section"], row["model"], size, row["variant"], *figures])
    head = ["device", "what", "model", "size", "variant", "measured", "ceiling by FLOPs"]
    lines = [bench.markdown(head, rows)] if results else ["No run of `make bench` is committed."]
    if not any("cuda" in result["conditions"] for result in results):
        lines.append("On a GPU: not measured yet.")
    return "\n\n".join(lines)


TABLES["measured"] = measured
# The tables of docs/performance.md. The other tables are in benchmarks/results/counts.md.
ON_PAGE = ("auto", "measured")


def page_of(name: str) -> Path:
    """Return the page that shows the table of this name."""
    return PAGE if name in ON_PAGE else COUNTS


def filled(text: str, tables: dict[str, Callable[[], str]]) -> str:
    """Return the page with these tables between their markers. Raises KeyError if a table has no markers."""
    for name, make in tables.items():
        before, marker, after = text.partition(f"<!-- {name} -->\n")
        if not marker:
            raise KeyError(f"no page has the markers of the table {name}")
        end = after.index("<!-- end -->")
        text = f"{before}{marker}\n{make()}\n\n{after[end:]}"
    return text


def main() -> None:
    """Parse the command line, make the tables, and write them into their pages."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.performance", description=__doc__)
    parser.add_argument("only", nargs="*", metavar="TABLE", help=f"{', '.join(TABLES)}; all if none is named")
    chosen = parser.parse_args().only or TABLES
    stand_ins.prepare(own_attention=False)
    for name in chosen:
        page = page_of(name)
        page.write_text(filled(page.read_text(encoding="utf-8"), {name: TABLES[name]}), encoding="utf-8")
        bench.say(f"{name}: written to {page}")


if __name__ == "__main__":
    main()
