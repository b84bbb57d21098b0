"""Write the table of docs/settings.md with the form of the KV cache for each model and card.

    python -m benchmarks.memory_table

The pack itself decides and ComfyUI itself estimates the memory, for models at their real sizes without weights, as on
an NVIDIA card with PyTorch's attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any
from unittest import mock

import torch

from benchmarks import bench, stand_ins
from benchmarks.counted import markdown
from benchmarks.fullsize import Shape, patcher
from benchmarks.performance import filled
from scripts.comfy_pack import pack_module
from scripts.comfyui import ROOT

PAGE = ROOT / "docs" / "settings.md"
TABLE = "memory"
CARDS_GIB = (8, 12, 16, 24, 32)
FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        title: the model and the run, for the reader.
        shape: the model and the size of its latents.
        weights: dtype of the weights, that of fp8 for int8 too; all compute in bf16.
        cfg: scale of guidance; 1 evaluates one condition in a step, more evaluate two.
    """

    title: str
    shape: Shape
    weights: torch.dtype
    cfg: float = 1.0


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
    Case("MiniMax H3, int8, 864 x 480 x 73", Shape("h3", 480, 864, frames=22), FP8),
    Case("MiniMax H3, int8, 1344 x 768 x 73", Shape("h3", 768, 1344, frames=22), FP8),
    Case("the same, 5 seconds: x 124", Shape("h3", 768, 1344, frames=37), FP8),
)


@dataclass(frozen=True)
class Choice:
    """What a run does on one card, in bytes.

    Attributes:
        kind: form of the KV cache: "full", "4-bit" or "none".
        cache: size of the KV cache.
        left_off: weights that ComfyUI offloads without ToMA.
        pushed_out: further weights that it offloads because of the KV cache.
    """

    kind: str
    cache: int
    left_off: float
    pushed_out: float


def built(case: Case) -> Any:
    """Return the case's model without weights, on a card that `card` describes."""
    model = patcher(case.shape.model, case.weights, torch.device("meta"))
    model.load_device = torch.device("cuda")
    if case.weights != BF16:
        model.set_model_compute_dtype(BF16)
    return model


@contextmanager
def card(total: float) -> Iterator[None]:
    """Make ComfyUI see an NVIDIA card with this many bytes."""
    import comfy.model_management as management

    with ExitStack() as stack:
        for name, value in (("get_total_memory", total), ("pytorch_attention_flash_attention", True)):
            stack.enter_context(mock.patch.object(management, name, lambda *_, answer=value, **__: answer))
        yield


def choose(model: Any, case: Case, total: float) -> Choice:
    """Return what a run of `balanced` does on a card with this many bytes. model: see `built`."""
    from comfy import model_management
    from comfy.sampler_helpers import convert_cond, estimate_memory
    from comfy.samplers import CFGGuider, sampler_object

    run, settings = pack_module("nodes.adapters.patch_model"), pack_module("toma_core").Settings("balanced")
    merged = run.apply_toma(model, settings)
    guider, noise = CFGGuider(merged), torch.empty(1, *case.shape.latent, device="meta")
    guider.conds = {name: convert_cond(_conditioning(case.shape)) for name in ("positive", "negative")}
    guider.set_cfg(case.cfg)
    # As ComfyUI packs several streams.
    packed = (1, 1, sum(map(prod, case.shape.streams))) if len(case.shape.streams) > 1 else noise.shape
    with card(total):
        _, cache_plan = run.run_config(run.attachment_of(merged), guider, noise, sampler_object("euler"), packed)
        _, least = estimate_memory(model, packed, guider.conds)
        smallest, reserve = model_management.minimum_inference_memory(), model_management.extra_reserved_memory()
    without, with_cache = (
        max(0.0, model.model_size() - max(0.0, total - max(smallest, least + more + reserve)))
        for more in (0, cache_plan.bytes)
    )
    kind = "none" if not cache_plan.bytes else "4-bit" if cache_plan.quantized else "full"
    return Choice(kind, cache_plan.bytes, without, with_cache - without)


def _conditioning(shape: Shape) -> list[Any]:
    """Return CONDITIONING with reference images of the picture's size."""
    [[text, options]] = shape.conditioning(1)
    if shape.references:
        options["reference_latents"] = [torch.empty(1, *shape.latent, device="meta")] * shape.references
    return [[text, options]]


def cell(choice: Choice) -> str:
    """Return the form of the cache, and in brackets GB of offloaded weights: without ToMA + because of the cache."""
    off, more = (f"{n / 1e9:.1f}" for n in (choice.left_off, choice.pushed_out))
    if (off, more) == ("0.0", "0.0"):
        return choice.kind
    return f"{choice.kind} ({off})" if more == "0.0" else f"{choice.kind} ({off} + {more})"


def table(cases: Sequence[Case] = CASES) -> str:
    """Return the table in Markdown."""
    return markdown(["", *(f"{gib} GB" for gib in CARDS_GIB)], rows(cases))


def rows(cases: Sequence[Case]) -> Iterator[list[str]]:
    """Yield a row for each case; models are built once for consecutive cases."""
    key = model = None
    for case in cases:
        if key != (key := (case.shape.model, case.weights)):
            model = built(case)
        yield [case.title, *(cell(choose(model, case, gib * 2**30)) for gib in CARDS_GIB)]


def main() -> None:
    """Count and write."""
    stand_ins.prepare(own_attention=False)
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), {TABLE: table}), encoding="utf-8")
    bench.say(f"{TABLE}: written to {PAGE}")


if __name__ == "__main__":
    main()
