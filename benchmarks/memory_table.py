"""Write the tables of docs/settings.md on the KV cache for each model and card: where the cache lies, and whether the
cache pays.

    python -m benchmarks.memory_table

The models have their real size, but no weights. The pack plans their caches and ComfyUI estimates their memory, as on
an NVIDIA card with PyTorch's attention. The time of a step is computed, not measured: from its FLOPs, and from the
bytes that cross the bus at the same time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any
from unittest import mock

import torch

from benchmarks import bench
from benchmarks.performance import filled
from scripts.comfy_pack import pack_module
from scripts.comfyui import ROOT
from testbed import stand_ins
from testbed.fullsize import Shape, patcher

PAGE = ROOT / "docs" / "settings.md"
TABLE, ADVICE = "memory", "advice"
CARDS_GIB = (8, 12, 16, 24, 32)
MAIN_GIB = {8: 32, 12: 32, 16: 32, 24: 64, 32: 64}  # main memory of a computer with a card of this size
STEPS = {"z_image": 8, "ltx_av": 8, "h3": 8, "qwen_image21": 25}  # steps of a usual run, 20 for models not listed here
# Operations per second of a card in bf16, and bytes per second in each direction of PCIe 4.0 x16.
RATE, BUS = 100e12, 25e9
WORTHWHILE = 1.15  # speed-up from which the cache is advised
FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    title: str  # the model and the run, for the reader
    shape: Shape  # the model and the size of its latents
    weights: torch.dtype  # dtype of the weights; fp8 stands for int8 too. All models compute in bf16.
    cfg: float = 1.0  # guidance scale: a step evaluates one condition at scale 1, two at a higher scale
    merged: int | None = None  # merged steps, if the sampler's noise makes more steps full than the schedule


CASES = (
    Case("Z-Image, bf16, 1024 x 1024", Shape("z_image"), BF16),
    Case("Flux.1, fp8, 1024 x 1024", Shape("flux"), FP8),
    Case("Flux.1, bf16, 1024 x 1024", Shape("flux"), BF16),
    Case("Qwen-Image, fp8, 1328 x 1328", Shape("qwen_image", 1328, 1328), FP8),
    Case("the same with guidance", Shape("qwen_image", 1328, 1328), FP8, 4.0),
    Case("Qwen-Image 2.1, int8, 1024 x 1024", Shape("qwen_image21"), FP8),
    Case("the same with one reference", Shape("qwen_image21", references=1), FP8),
    Case("the same with two references and guidance", Shape("qwen_image21", references=2), FP8, 4.0),
    Case("Qwen-Image 2.1, int8, 2048 x 2048", Shape("qwen_image21", 2048, 2048), FP8),
    Case("Wan 14B, fp8, 832 x 480 x 81", Shape("wan", 480, 832, frames=21), FP8),
    Case("the same with guidance", Shape("wan", 480, 832, frames=21), FP8, 5.0),
    Case("LTX-2.3, fp8, 640 x 352 x 121", Shape("ltx_av", 352, 640, frames=16), FP8),
    Case("LTX-2.3, fp8, 1280 x 704 x 121", Shape("ltx_av", 704, 1280, frames=16), FP8),
    # LTX-2.5 is as large as LTX-2.3, but its sampler `euler_ancestral` adds noise.
    Case("LTX-2.5, fp8, 1280 x 704 x 121", Shape("ltx_av", 704, 1280, frames=16), FP8, merged=3),
    Case("MiniMax H3, int8, 864 x 480 x 73", Shape("h3", 480, 864, frames=22), FP8),
    Case("MiniMax H3, int8, 1344 x 768 x 73", Shape("h3", 768, 1344, frames=22), FP8),
    Case("the same, 5 seconds: x 124", Shape("h3", 768, 1344, frames=37), FP8),
)


@dataclass(frozen=True)
class Choice:
    """The result of a run on one card. Sizes are in bytes."""

    kind: str  # form of the KV cache: "full", "4-bit" or "none"
    on_card: int  # keys and values on the card
    in_main: int  # keys and values in main memory
    skipped: float  # share of blocks, counted from the first, that are not merged because memory is short
    pushed_out: float  # additional weights that ComfyUI offloads because of the cache
    merged_steps: int  # how many of the run's steps are merged
    less_work: float  # FLOPs of the unmerged run divided by FLOPs of this run
    faster: float  # computed time of the unmerged run divided by time of this run

    @property
    def advice(self) -> str:
        """Return "off" if the run is hardly faster, "smaller" if the card has room for the cache of all blocks only at
        a smaller picture, and otherwise "use"."""
        if self.faster < WORTHWHILE:
            return "off"
        return "smaller" if self.kind == "none" or self.skipped else "use"


def built(case: Case) -> Any:
    """Return the model of a case without weights, for the NVIDIA card that `card` simulates."""
    model = patcher(case.shape.model, case.weights, torch.device("meta"))
    model.load_device = torch.device("cuda")
    if case.weights != BF16:
        model.set_model_compute_dtype(BF16)
    return model


@contextmanager
def card(gib: int) -> Iterator[None]:
    """Make ComfyUI see an NVIDIA card with this memory, in a computer with the main memory of `MAIN_GIB`."""
    import comfy.model_management as management

    memory = pack_module("nodes.adapters.kv_memory")
    with ExitStack() as stack:
        for name, value in (("get_total_memory", gib << 30), ("pytorch_attention_flash_attention", True)):
            stack.enter_context(mock.patch.object(management, name, lambda *_, answer=value, **__: answer))
        room = memory.MAIN_SHARE * (MAIN_GIB[gib] << 30)
        stack.enter_context(mock.patch.object(memory, "main_room", lambda: room))
        yield


def choose(model: Any, case: Case, gib: int) -> Choice:
    """Return the result of a run of `balanced` on a card with this memory. model: see `built`."""
    from comfy import model_management
    from comfy.sampler_helpers import convert_cond, estimate_memory
    from comfy.samplers import CFGGuider, sampler_object

    run, settings = pack_module("nodes.adapters.patch_model"), pack_module("toma_core").UserSettings("balanced")
    merged = run.apply_toma(model, settings)
    guider, noise = CFGGuider(merged), torch.empty(1, *case.shape.latent, device="meta")
    guider.conds = {name: convert_cond(_conditioning(case.shape)) for name in ("positive", "negative")}
    guider.set_cfg(case.cfg)
    # ComfyUI packs a latent of several streams into one tensor of this shape.
    packed = (1, 1, sum(map(prod, case.shape.streams))) if len(case.shape.streams) > 1 else noise.shape
    with card(gib):
        config, plan = run.run_config(run.attachment_of(merged), guider, noise, sampler_object("euler"), packed)
        _, least = estimate_memory(model, packed, guider.conds)
        smallest, reserve = model_management.minimum_inference_memory(), model_management.extra_reserved_memory()
    without, with_cache = (
        max(0.0, model.model_size() - max(0.0, (gib << 30) - max(smallest, least + more + reserve)))
        for more in (0, plan.on_card)
    )
    kind = "none" if not plan.bytes else "4-bit" if plan.quantized else "full"
    on_card = plan.keys - plan.in_main
    counted = _counted(model, case, config, bool(plan.bytes), plan.in_main, without, with_cache)
    return Choice(kind, on_card, plan.in_main, plan.skipped, with_cache - without, *counted)


def _counted(
    model: Any, case: Case, config: Any, cached: bool, in_main: int, left_off: float, left_off_merged: float
) -> tuple[int, float, float]:
    """Return three numbers: number of merged steps, unmerged work / merged work, and unmerged time / merged time.
    left_off, left_off_merged: bytes of weights off the card, without ToMA and with ToMA."""
    registry, core = pack_module("nodes.adapters.registry"), pack_module("toma_core")
    hooks, steps = registry.find(model.model.diffusion_model), STEPS.get(case.shape.model, 20)
    latent = torch.empty(1, *case.shape.latent, device="meta")
    schedule = core.Schedule(config, tuple(float(steps - n) for n in range(steps)), finishes=True)
    planned = sum(schedule.decide(float(steps - n), n).mode.merges for n in range(steps))
    merges = planned if case.merged is None else case.merged
    skipped = {
        hook.name
        for group in hooks.groups
        for n, hook in enumerate(group.hooks)
        if hooks.skipped_by_settings(group, n, config)
    }
    facts, conditions = list(hooks.blocks(latent)), 1 if case.cfg == 1.0 else 2
    full = conditions * (hooks.flops_beside_blocks(latent) + sum(fact.flops() for fact in facts))
    saved = conditions * sum(f.flops() - f.flops(config.ratio, cached) for f in facts if f.name not in skipped)
    own = max(full / RATE, left_off / BUS)
    refreshed = max(full / RATE, left_off_merged / BUS, in_main / BUS)
    merged = max((full - saved) / RATE, (left_off_merged + in_main) / BUS)
    times = steps * own / ((steps - merges) * refreshed + merges * merged)
    return merges, steps * full / (steps * full - merges * saved), times


def _conditioning(shape: Shape) -> list[Any]:
    """Return CONDITIONING with reference images of the picture's size."""
    [[text, options]] = shape.conditioning(1)
    if shape.references:
        options["reference_latents"] = [torch.empty(1, *shape.latent, device="meta")] * shape.references
    return [[text, options]]


def cell(choice: Choice) -> str:
    """Return the form of the cache, and the GB of keys and values: on the card + in main memory."""
    if choice.kind == "none":
        return "none"
    fewer = f", of {100 - 100 * choice.skipped:.0f} %" if choice.skipped else ""
    return f"{choice.kind} {choice.on_card / 1e9:.1f} + {choice.in_main / 1e9:.1f}{fewer}"


@functools.cache
def chosen() -> tuple[tuple[Case, tuple[Choice, ...]], ...]:
    """Return for each case the results on each of `CARDS_GIB`. Consecutive cases of one model share the built model."""
    found, key, model = list[tuple[Case, tuple[Choice, ...]]](), None, None
    for case in CASES:
        if key != (key := (case.shape.model, case.weights)):
            model = built(case)
        found.append((case, tuple(choose(model, case, gib) for gib in CARDS_GIB)))
    return tuple(found)


def advised(choice: Choice) -> str:
    """Return the advice, the merged steps, the share of the work that is saved, and the speed-up."""
    return f"{choice.advice}: {choice.merged_steps}, {100 - 100 / choice.less_work:.0f} %, {choice.faster:.2f}x"


def tabulated(shown: Callable[[Choice], str]) -> str:
    """Return a table in Markdown, with a cell for each case and card."""
    rows = ([case.title, *map(shown, choices)] for case, choices in chosen())
    return bench.markdown(["", *(f"{gib} GB" for gib in CARDS_GIB)], rows)


table = functools.partial(tabulated, cell)  # where the cache lies
advice = functools.partial(tabulated, advised)  # whether the cache pays


def main() -> None:
    """Compute both tables and write them into the page."""
    stand_ins.prepare(own_attention=False)
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), {TABLE: table, ADVICE: advice}), encoding="utf-8")
    bench.say(f"{TABLE}, {ADVICE}: written to {PAGE}")


if __name__ == "__main__":
    main()
