"""Tables of FLOPs, bytes and launches of complete models, counted on the meta device. `performance` writes the
tables."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks import bench, cost, variants
from scripts.comfy_pack import pack_module
from testbed.full_model import EDITORS, TITLES
from testbed.fullsize import Shape
from testbed.meter import Cost

RATIOS = (0.25, 0.5, 0.75)
RUNS = (4, 8, 20, 50)
SIDES = (512, 1024, 2048, 4096)
ALL_BLOCKS = {"skip_first_blocks": 0}

Rows = Iterator[Sequence[str]]
TABLES: dict[str, Callable[[], str]] = {}  # functions that return a table, by the table's name


def tabulated(*head: str) -> Callable[[Callable[[], Rows]], Callable[[], str]]:
    """Return a decorator that adds a table to `TABLES`, with this head and the rows that the decorated function
    yields."""

    def decorator(rows: Callable[[], Rows]) -> Callable[[], str]:
        TABLES[rows.__name__] = lambda: bench.markdown(head, rows())
        return TABLES[rows.__name__]

    return decorator


@functools.lru_cache
def by_toma(**settings: Any) -> variants.Variant:
    return variants.toma("", **{"ratio": 0.5, **settings})


@functools.lru_cache
def by_preset(name: str, ratio: float = 0.5) -> variants.Variant:
    return variants.preset(name, ratio=ratio)


# Cache the counts, because several tables use the same ones.
count = functools.lru_cache(cost.count)


@tabulated("model", "part", "TFLOP", "GB", "launches", "of FLOPs", "fewer FLOPs at 0.5")
def parts() -> Rows:
    """Tabulate the work of one evaluation by part of the model."""
    for model, modules in (
        ("sdxl", {"CrossAttention": "attention with its projections", "FeedForward": "feed-forward"}),
        ("flux", {"DoubleStreamBlock": "19 double blocks", "SingleStreamBlock": "38 single blocks"}),
    ):
        unmerged = cost.count(Shape(model), modules=modules)
        merged = cost.count(Shape(model), by_toma(), modules=modules)
        for name, part in unmerged.parts.items():
            share = f"{part.flops / unmerged.flops:.0%}"
            yield [model, name, *figures(part), share, times_of(part, merged.parts[name])]
        rest = unmerged.flops - sum(part.flops for part in unmerged.parts.values())
        name = "convolutions and the rest" if model == "sdxl" else "the rest"
        yield [model, name, f"{rest / 1e12:.2f}", "", "", f"{rest / unmerged.flops:.0%}", ""]
        yield [model, "all", *figures(unmerged), "100%", times_of(unmerged, merged)]


def figures(counted: Cost) -> list[str]:
    return [f"{counted.flops / 1e12:.2f}", f"{counted.bytes / 1e9:.1f}", str(counted.launches)]


def work_of(counted: Cost) -> list[str]:
    return [f"{counted.flops / 1e12:.0f}", f"{counted.products['attention'] / counted.flops:.0%}"]


def times_of(base: Cost, merged: Cost) -> str:
    return f"{base.flops / merged.flops:.2f}x"


@tabulated("model", "side, px", "TFLOP", *(f"ratio {r:g}" for r in RATIOS))
def ceilings() -> Rows:
    """Tabulate the highest possible speed-up (unmerged FLOPs / merged FLOPs) by picture size and ratio."""
    for model, name, settings in (
        ("sdxl", "SDXL", {}),
        ("flux", "Flux, first 5 + 5 blocks skipped", {}),
        ("flux", "Flux, all blocks", ALL_BLOCKS),
    ):
        for side in SIDES:
            shape = Shape(model, side, side)
            base = count(shape)
            merged = [count(shape, by_toma(ratio=ratio, **settings)) for ratio in RATIOS]
            yield [name, f"{side}", f"{base.flops / 1e12:.1f}", *(times_of(base, m) for m in merged)]


# Videos with sound, at the sizes of ComfyUI's templates. 121 frames of LTX are 16 latent frames. 73 frames of H3 are 22
# latent frames.
_SOUND = {
    "ltx_av": {
        "640 x 352 x 121": Shape("ltx_av", 352, 640, frames=16),
        "1280 x 704 x 121": Shape("ltx_av", 704, 1280, frames=16),
    },
    "h3": {"864 x 480 x 73": Shape("h3", 480, 864, frames=22), "1344 x 768 x 73": Shape("h3", 768, 1344, frames=22)},
}


def sizes_of(model: str) -> list[tuple[str, Shape]]:
    """Return the sizes at which a model is counted, as (name, shape)."""
    if model == "wan":  # 81 frames are 21 frames of the latent
        sizes = ((832, 480), (1280, 720))
        return [(f"{w} x {h} x 81", Shape(model, height=h, width=w, frames=21)) for w, h in sizes]
    if model in _SOUND:
        return list(_SOUND[model].items())
    sides = (1328 if model == "qwen_image" else 1024, 2048)
    return [(f"{side}", Shape(model, side, side)) for side in sides]


@tabulated(
    *("model", "side, px", "image + text", "TFLOP", "in attention", "all blocks, 0.5", "0.75"),
    *("merged step of balanced, 0.5", "0.75", "launches", "added by Triton", "by PyTorch"),
)
def families() -> Rows:
    """Tabulate the FLOPs that merging saves in transformers: if all blocks merge, and in a merged step of
    `balanced`."""
    for model in TITLES:
        for size, shape in sizes_of(model) if model != "sdxl" else ():
            base = count(shape)
            every = [count(shape, by_toma(ratio=ratio, **ALL_BLOCKS), kernels=True) for ratio in (0.5, 0.75)]
            # Count the second step, because the first step of `balanced` is full.
            balanced = [count(shape, by_preset("balanced", ratio), kernels=True, step=1) for ratio in (0.5, 0.75)]
            plain = count(shape, by_toma(**ALL_BLOCKS))
            tokens = f"{shape.tokens} + {shape.spec.text[0]}"
            fewer = (times_of(base, merged) for merged in (*every, *balanced))
            added = (f"{merged.launches / base.launches - 1:+.1%}" for merged in (every[0], plain))
            yield [TITLES[model], size, tokens, *work_of(base), *fewer, f"{base.launches}", *added]


@tabulated("model", "references", "TFLOP", "not merged, 0.5", "0.75", "merged, 0.5", "0.75", "launches added then")
def editing() -> Rows:
    """Tabulate the FLOPs that merging saves with reference images, once with unmerged and once with merged
    references."""
    for model in EDITORS:
        for references in (1, 2):
            shape = Shape(model, references=references)
            base = count(shape)
            merged = [
                count(shape, by_toma(ratio=ratio, merge_references=too, **ALL_BLOCKS), kernels=True)
                for too in (False, True)
                for ratio in (0.5, 0.75)
            ]
            fewer = (times_of(base, each) for each in merged)
            added = f"{merged[2].launches / base.launches - 1:+.1%}"
            yield [TITLES[model], f"{references}", f"{base.flops / 1e12:.0f}", *fewer, added]


@tabulated("Wan 14B", "tokens", "TFLOP", "in attention", "presets, 0.5", "0.75", "fewer tokens, 0.5", "0.75")
def videos() -> Rows:
    """Tabulate the cost of videos by number of frames, and the FLOPs that a merged step saves. In the merged step
    destinations attend to all tokens, as in presets, or only to each other."""
    for width, height, frames in ((832, 480, 1), (832, 480, 5), (832, 480, 21), (1280, 720, 21)):
        shape = Shape("wan", height=height, width=width, frames=frames)
        base = count(shape)
        merged = [attending(shape, ratio) for ratio in (0.5, 0.75)]
        merged += [count(shape, by_toma(ratio=ratio, **ALL_BLOCKS), kernels=True) for ratio in (0.5, 0.75)]
        size, tokens = f"{width} x {height} x {4 * frames - 3}", f"{frames * (height // 16) * (width // 16)}"
        yield [size, tokens, *work_of(base), *(times_of(base, each) for each in merged)]


@tabulated("run", "merged steps", "TFLOP", "balanced, 0.5", "0.75")
def templates() -> Rows:
    """Tabulate the FLOPs that merging saves in complete runs of ComfyUI's templates for videos with sound: LTX-2.3 by
    stage and in total, H3 at two sizes."""
    half, full = _SOUND["ltx_av"].values()
    small, large = _SOUND["h3"].values()
    graphs: dict[str, list[tuple[Shape, int]]] = {
        "LTX-2.3, 8 steps at 640 x 352": [(half, 8)],
        "LTX-2.3, then 3 at 1280 x 704": [(full, 3)],
        "LTX-2.3, both": [(half, 8), (full, 3)],
        **{f"H3, {n} steps at 864 x 480 x 73": [(small, n)] for n in (4, 8)},
        **{f"H3, {n} steps at 1344 x 768 x 73": [(large, n)] for n in (4, 8)},
    }
    for name, stages in graphs.items():
        unmerged = sum(count(shape).flops * steps for shape, steps in stages)
        numbers = [len(merged_steps(shape.model, "balanced", steps)) for shape, steps in stages]
        saved = [
            sum((count(s).flops - attending(s, ratio).flops) * n for (s, _), n in zip(stages, numbers, strict=True))
            for ratio in (0.5, 0.75)
        ]
        of = ", ".join(f"{n} of {steps}" for n, (_, steps) in zip(numbers, stages, strict=True))
        yield [name, of, f"{unmerged / 1e12:.0f}", *(f"{100 * each / unmerged:.0f} %" for each in saved)]


def attending(shape: Shape, ratio: float) -> Cost:
    """Return the cost of a merged step of `balanced`, in which destinations attend to all tokens."""
    return count(shape, variants.preset("balanced", ratio=ratio, min_tokens=4), kernels=True, step=1)


def settings_of(model: str, preset: str) -> Any:
    core = pack_module("toma_core")
    return core.UserSettings(preset).resolved(core.ModelKind.UNET if model == "sdxl" else core.ModelKind.TRANSFORMER)


def merged_steps(model: str, preset: str, steps: int) -> list[int]:
    """Return the indices of the steps that a preset merges in a run of `steps` steps."""
    sigmas = tuple(float(steps - step) for step in range(steps))
    schedule = pack_module("toma_core").Schedule(settings_of(model, preset), sigmas, finishes=True)
    return [step for step, sigma in enumerate(sigmas) if schedule.decide(sigma).merged_ratio]
