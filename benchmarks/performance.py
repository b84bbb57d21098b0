"""Write the tables of docs/performance.md and results/counts.md: `python -m benchmarks.performance [TABLE ...]`.

FLOPs, bytes and launches in the tables are counted on the meta device. Measured speed-ups come from the committed
results of `benchmarks.suite`.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import bench, cost
from benchmarks.counted import (
    RUNS,
    by_preset,
    by_toma,
    ceilings,
    count,
    editing,
    families,
    figures,
    markdown,
    merged_steps,
    parts,
    settings_of,
    sizes_of,
    templates,
    videos,
)
from scripts.comfy_pack import pack_module
from scripts.comfyui import ROOT
from testbed import stand_ins
from testbed.full_model import TITLES
from testbed.fullsize import Shape

RESULTS = ROOT / "benchmarks" / "results"
PAGE, COUNTS = ROOT / "docs" / "performance.md", RESULTS / "counts.md"
# Parts of a step -> their names in `benchmarks.hosttime`.
_CALLS = {"merge": "merge", "unmerge": "restore"}


def overhead() -> str:
    """Tabulate the cost that merging adds to an evaluation that reuses its plans."""
    host = json.loads((RESULTS / "hosttime" / "hosttime.json").read_text(encoding="utf-8"))["rows"]

    def rows() -> Iterator[list[str]]:
        for model, name in (("sdxl", "SDXL"), ("flux", "Flux")):
            base = count(Shape(model))
            for granularity in ("block", "stack") if model == "flux" else ("module", "block", "stack"):
                # With Triton each merge and each unmerge is one launch, so launches count the calls.
                fused = count(Shape(model), by_toma(granularity=granularity), kernels=True).parts
                for kernels, by in ((True, "Triton"), (False, "PyTorch")):
                    merged = count(Shape(model), by_toma(granularity=granularity), kernels=kernels)
                    added = [merged.parts[part] for part in ("merge", "unmerge")]
                    adds = [host[by][name] * fused[part].launches for part, name in _CALLS.items()]
                    yield [
                        name,
                        granularity,
                        by,
                        f"{merged.launches - base.launches:+d} ({merged.launches / base.launches - 1:+.1%})",
                        f"+{sum(adds):.0f} ({sum(adds) / base.launches:+.0%})",
                        f"{sum(part.bytes for part in added) / merged.bytes:.1%}",
                        f"{base.bytes / merged.bytes:.2f}x",
                    ]

    head = [
        "model",
        "merged around each",
        "by",
        "launches added",
        "host time added",
        "bytes of merging",
        "fewer bytes in all",
    ]
    return markdown(head, rows())


def attention() -> str:
    """Tabulate how much a faster attention can save in the unmerged and in the merged model."""

    def rows() -> Iterator[list[str]]:
        for model, name in (("sdxl", "SDXL"), ("flux", "Flux")):
            for side in (1024, 2048):
                shape = Shape(model, side, side)
                costs = [count(shape), count(shape, by_toma())]
                shares = [each.products["attention"] / each.flops for each in costs]
                free = (f"{1 / (1 - share):.2f}x" for share in shares)
                both = f"{costs[0].flops / costs[1].flops / (1 - shares[1]):.2f}x"
                yield [name, f"{side}", *(f"{share:.0%}" for share in shares), *free, both]

    head = ["model", "side, px", "of FLOPs", "of FLOPs at 0.5", "free attention", "on top of ToMA", "with ToMA in all"]
    return markdown(head, rows())


def growth() -> str:
    """Tabulate the cost of an evaluation of SDXL and of Flux, unmerged and merged, by picture size and batch."""

    def rows() -> Iterator[list[str]]:
        for model in ("sdxl", "flux"):
            shapes = [Shape(model, side, side) for side in (512, 1024, 2048, 4096)]
            shapes += [Shape(model, batch=batch) for batch in (2, 4, 8)]
            for shape in shapes:
                base, merged = count(shape), count(shape, by_toma())
                attention = base.products["attention"] / base.flops
                yield [model, shape.size, str(shape.batch), *figures(base), f"{attention:.0%}", *figures(merged)]

    head = ["model", "size", "batch", "TFLOP", "GB", "launches", "of FLOPs in QK^T and AV", "TFLOP at 0.5"]
    return markdown([*head, "GB at 0.5", "launches at 0.5"], rows())


_SETTINGS = (
    ("quality", "quality", 0.5),
    ("balanced", "balanced", 0.5),
    ("balanced at 0.6", "balanced", 0.6),
    ("balanced at 0.75", "balanced", 0.75),
    ("paper", "paper", 0.5),
)


def runs() -> str:
    """Tabulate the FLOPs that merging saves in runs of different numbers of steps: with all `_SETTINGS` on SDXL and
    Flux, with `balanced` on the other models."""

    def rows() -> Iterator[list[str]]:
        for model in TITLES:
            for size, shape in sizes_of(model):
                unmerged = count(shape).flops
                for name, preset, ratio in _SETTINGS:
                    if name != "balanced" and model not in ("sdxl", "flux"):
                        continue
                    step = merged_steps(model, preset, cost.STEPS)[0]
                    share = count(shape, by_preset(preset, ratio), step=step).flops / unmerged
                    merged = ((len(merged_steps(model, preset, steps)), steps) for steps in RUNS)
                    saved = (f"{100 * (1 - share) * number / steps:.0f} % ({number})" for number, steps in merged)
                    yield [TITLES[model], size, name, f"{100 * (1 - share):.0f} %", *saved]

    return markdown(["model", "side, px", "setting", "a merged step", *(f"{n} steps" for n in RUNS)], rows())


def planning() -> str:
    """Tabulate the cost of the balanced preset's plans, and the number of steps that share a plan."""

    def rows() -> Iterator[list[str]]:
        for model, name in (("sdxl", "SDXL"), ("flux", "Flux")):
            every = settings_of(model, "balanced").selection_interval
            # Count a merged step, because a full step makes no plans if plans are made from its prediction.
            step = merged_steps(model, "balanced", cost.STEPS)[0]
            count(Shape(model), by_preset("balanced"), plan=True, step=step)  # makes the windows that the counts reuse
            for kernels, by in ((True, "Triton"), (False, "PyTorch")):
                made = count(Shape(model), by_preset("balanced"), kernels=kernels, plan=True, step=step)
                plan = made.parts["plan"]
                yield [
                    name,
                    by,
                    str(plan.launches),
                    f"{plan.launches / made.launches:.1%}",
                    str(every),
                    f"{plan.launches / every:.0f}",
                ]

    head = ["model", "by", "launches of all plans", "of an evaluation", "selection interval", "a step"]
    return markdown(head, rows())


# Cards with compute capability, multiprocessors and boost clock in Hz, as reported by their drivers.
CARDS = (
    ("NVIDIA B200", (10, 0), 148, 1.965e9),
    ("NVIDIA H100 80GB HBM3", (9, 0), 132, 1.98e9),
    ("NVIDIA A100-SXM4-80GB", (8, 0), 108, 1.41e9),
    ("NVIDIA GeForce RTX 4090", (8, 9), 128, 2.52e9),
    ("NVIDIA GeForce RTX 3060", (8, 6), 28, 1.777e9),
)

_JUDGED = ("unet", "flux", "chroma", "lumina", "krea", "qwen", "sd3")


def auto() -> str:
    """Tabulate Auto's decisions for blocks on common cards, in half precision."""
    cost_model = pack_module("toma_core.cost_model")
    cards = [cost_model.Card(*card) for card in CARDS]
    of = {name: pack_module(f"nodes.adapters.families.{name}") for name in _JUDGED}
    unet, flux, sd3 = of["unet"].COST, of["flux"], of["sd3"].COST
    stack, alone = cost_model.Granularity.STACK, cost_model.Granularity.BLOCK

    def rows() -> Iterator[list[str]]:
        for name, side, width, block, *around in (
            ("SD1.5 512, finest", 64, 320, unet, alone),
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
            kind = around[0] if around else stack
            yield [name, f"{side}x{side}x{width}", *(said(card, side**2, width, block, kind) for card in cards)]

    def said(card: Any, tokens: int, width: int, block: Any, around: Any) -> str:
        share = cost_model.computing(tokens, 1, width, torch.float16, card, block) / block.launching(around)
        unmerged = cost_model.too_little(tokens, 1, width, torch.float16, card, block, around)
        return f"{share:.{0 if share >= 10 else 2}f}, {'not merged' if unmerged else 'merged'}"

    short = [
        name.removeprefix("NVIDIA ").removeprefix("GeForce ").split(" 80GB")[0].split("-")[0] for name, *_ in CARDS
    ]
    return markdown(["blocks of", "grid", *short], rows())


def measured() -> str:
    """Tabulate the measured speed-ups of all committed results, with the highest speed-ups possible by FLOPs."""
    results = []
    for path in sorted(RESULTS.glob("*/results.json")):
        results.append(json.loads(path.read_text(encoding="utf-8")))

    def rows() -> Iterator[list[str]]:
        for result in results:
            conditions = result["conditions"]
            for row in result["rows"]:
                if row["variant"] == "unpatched" or row["section"].startswith(("micro", "kernels")):
                    continue
                speed = bench.REFUSED if row["speedup"] is None else f"{row['speedup']:.2f}x"
                ceiling = "" if row["ceiling"] is None else f"{row['ceiling']:.2f}x"
                size = f"{row['size']}, batch {row['batch']}"
                yield [conditions["device"], row["section"], row["model"], size, row["variant"], speed, ceiling]

    head = ["device", "what", "model", "size", "variant", "measured", "ceiling by FLOPs"]
    lines = [markdown(head, rows())] if results else ["No run of `make bench` is committed."]
    if not any("cuda" in result["conditions"] for result in results):
        lines.append("On a GPU: not measured yet.")
    return "\n\n".join(lines)


TABLES: dict[str, Callable[[], str]] = {
    "parts": parts,
    "ceilings": ceilings,
    "families": families,
    "editing": editing,
    "videos": videos,
    "templates": templates,
    "overhead": overhead,
    "attention": attention,
    "growth": growth,
    "runs": runs,
    "planning": planning,
    "auto": auto,
    "measured": measured,
}
# The tables of docs/performance.md; the others are in benchmarks/results/counts.md.
ON_PAGE = ("auto", "measured")


def page_of(name: str) -> Path:
    """Return the page that shows the table of this name."""
    return PAGE if name in ON_PAGE else COUNTS


def filled(text: str, tables: dict[str, Callable[[], str]]) -> str:
    """Return the page with these tables between their markers. Raises KeyError if a table has no markers."""
    for name, make in tables.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(\n<!-- end -->)", re.DOTALL)
        found = pattern.search(text)
        if found is None:
            raise KeyError(f"no page has the markers of the table {name}")
        text = f"{text[: found.end(1)]}\n{make()}\n{text[found.start(2) :]}"
    return text


def main(only: Sequence[str] | None = None) -> None:
    """Make all tables, or those named in `only`, and write them into their pages."""
    stand_ins.prepare(own_attention=False)
    for name in TABLES if only is None else only:
        page = page_of(name)
        page.write_text(filled(page.read_text(encoding="utf-8"), {name: TABLES[name]}), encoding="utf-8")
        bench.say(f"{name}: written to {page}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.performance", description=__doc__)
    parser.add_argument("only", nargs="*", metavar="TABLE", help=f"{', '.join(TABLES)}; all if none is named")
    main(only=parser.parse_args().only or None)
