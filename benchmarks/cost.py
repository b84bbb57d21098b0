"""Count the cost of one evaluation of a model in a variant: FLOPs, bytes and launched operations.

Models are built on PyTorch's meta device, whose tensors have shapes but no values. So counting a complete Flux at 4096
x 4096 pixels takes only a second. Attention counts as one fused operation, as on a GPU. `python -m benchmarks.cost
NAME` prints how many operations the blocks of a small model in `testbed.models` launch. `toma_core.cost_model.Block`
has these numbers.
"""

from __future__ import annotations

import atexit
import functools
from collections.abc import Mapping
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.parts import marked
from benchmarks.variants import UNPATCHED, Variant
from scripts.comfy_pack import pack_module
from testbed import fullsize
from testbed.fullsize import Shape
from testbed.meter import META, Cost, Meter

# A counted evaluation belongs to a run of this many steps. This is the longest run whose second step presets merge.
STEPS = 12


@functools.lru_cache(maxsize=4)
def on_meta(name: str, blocks: tuple[int, ...] | None = None) -> Any:
    """Return a `ModelPatcher` around a complete model in bf16, on the meta device."""
    return fullsize.patcher(name, torch.bfloat16, META, blocks=blocks)


# Free the models before the interpreter exits. Freeing them uses parts of ComfyUI that no longer exist during the exit.
atexit.register(on_meta.cache_clear)


class Fused:
    """A stand-in for `TritonKernels`, which need a GPU. It returns tensors of the right shapes, and counts every launch
    as one operation that reads its operands and writes its result. FLOPs of a launch are not counted."""

    name = "triton"

    def __init__(self, meter: Meter) -> None:
        self.meter = meter

    def _launched(self, name: str, results: tuple[Tensor, ...], *read: Tensor | None) -> None:
        self.meter.count(f"toma.{name}", 0.0, sum(t.nbytes for t in (*results, *read) if t is not None))

    def quantize(self, x: Tensor) -> Any:
        module = pack_module("toma_core.quant4")
        codes = x.new_empty(*x.shape[:-1], x.shape[-1] // 2, dtype=torch.uint8)
        low, step = (x.new_empty(*x.shape[:-1], x.shape[-1] // module.group_of(x.shape[-1])) for _ in range(2))
        self._launched("pack", (codes, low, step), x)
        return module.Int4Tensor(codes, low, step)

    def dequantize(self, packed: Any) -> Tensor:
        out = packed.low.new_empty(packed.shape)
        self._launched("unpack", (out,), packed.codes, packed.low, packed.step)
        return out

    def weigh(
        self, x: Tensor, slots: Tensor | None, windows: Any, budget: Any, scale: float, priority: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        name = "select_weigh" if slots is None else "weigh"
        if slots is None:
            slots = x.new_empty(len(x), len(windows.counts), budget.slots, dtype=torch.int64)
        plan = slots, *_weights(x, slots, windows)
        self._launched(name, plan, x, windows.source, windows.valid, budget.valid)
        return plan

    def merge(self, x: Tensor, weights: Tensor, windows: Any, budget: Any) -> Tensor:
        merged = x.new_empty(len(x), budget.total, x.shape[2])
        self._launched("merge", (merged,), x, weights, windows.source, budget.valid, budget.expand)
        return merged

    def unmerge(self, y: Tensor, weights: Tensor, windows: Any, budget: Any, *others: Tensor | None) -> Tensor:
        out, layout = y.new_empty(len(y), windows.tokens, y.shape[2]), (windows.source, windows.valid, budget.expand)
        self._launched("propagate" if len(others) > 2 else "unmerge", (out,), y, weights, *layout, *others)
        return out

    def change(self, fresh: Tensor, cached: Tensor, destinations: Tensor, R: Tensor | None) -> Tensor:
        made = fresh.new_empty(fresh.shape)
        # The kernel reads only the destinations of `cached`. They have the size of `made`, so count `made` instead.
        self._launched("change", (made,), fresh, made, destinations, R)
        return made


def _weights(x: Tensor, dest_slots: Tensor, windows: Any) -> tuple[Tensor, Tensor]:
    batch, count, K = dest_slots.shape
    room = pack_module("toma_core.kernels.layout").room
    return room(x, batch, count, K, windows.slots), room(x, batch, count, windows.slots, K)


def count(
    shape: Shape,
    variant: Variant = UNPATCHED,
    *,
    kernels: bool = False,
    plan: bool = False,
    step: int = 0,
    regression: bool = False,
    blocks: tuple[int, ...] | None = None,
    modules: Mapping[str, str] = MappingProxyType({}),
) -> Cost:
    """Count the cost of one evaluation of a full-width model.

    kernels: True for ToMA's Triton kernels (see `Fused`), False for plain PyTorch.
    plan: True if the evaluation makes its plans, False if it uses existing plans.
    step: the evaluation's index in a run of `STEPS` steps.
    regression: whether changes of cached tensors are regressed on the latent.
    blocks: number of blocks of each kind, all blocks if None.
    modules: class name of a module -> part under which its work is counted.
    """
    patched = variant.patch(on_meta(shape.model, blocks))
    model, meter = patched.model.diffusion_model, Meter()
    given = shape.inputs(META)
    x, t, context = (given.pop(name) for name in ("x", "t", "c_crossattn"))
    x, context = x.to(torch.bfloat16), context.to(torch.bfloat16)
    latents = x
    if shapes := given.pop("latent_shapes", None):
        from comfy.utils import unpack_latents

        latents = unpack_latents(x, shapes)
        x = latents[0]
    if shape.model == "h3":
        t = torch.full(t.shape, 0.7)  # H3 reads sigma from t, so t needs a value
    references = [latent.to(torch.bfloat16) for latent in given.pop("ref_latents", ())]
    given |= {"y": given["y"].to(torch.bfloat16)} if "y" in given else {}
    given |= {"ref_latents": references} if references else {}
    options = {**patched.model_options["transformer_options"], "optimized_attention_override": meter.attention}
    patching = pack_module("nodes.adapters.patch_model")
    attachment = patching.attachment_of(patched)
    config = None if attachment is None else patching.config_for(attachment.settings, patched)
    pictures = (x,) if config is not None and config.uses_cache else ()

    hooks, run = pack_module("nodes.adapters.model_hooks"), None
    find = pack_module("nodes.adapters.registry").find
    if attachment is not None:
        run = _run(config, Fused(meter) if kernels else None)

    def forward(step: int) -> None:
        evaluation = None
        if run is not None:
            decision = run.schedule.decide(run.schedule.sigmas[step])
            change = pack_module("toma_core.latent_regression").LatentChange(x, x) if regression else None
            # `pictures` stands for the prediction of the previous step.
            evaluation = pack_module("toma_core").Evaluation(run, decision, pictures=pictures, change=change)
            origin = pack_module("toma_core.coverage").Origin(step, step, None, ())
            run.coverage.begin({}, origin, run.schedule.cache_steps)
            if evaluation.refreshes:
                run.coverage.refresh()
        chosen = () if evaluation is None else find(model).select(x, evaluation, options, None, references)
        with torch.no_grad(), hooks.installed(chosen):
            model(latents, t, context=context, **given, transformer_options=dict(options))

    # First run steps that are not counted. They fill caches and do the work of a model's first call. If `plan` is
    # false, also run the step that is counted later, so that its plans exist by then.
    for before in range(1 if run is None else step if plan else step + 1):
        with meter:
            forward(before)
    meter.cost = Cost()
    with ExitStack() as stack:
        if shape.model == "ernie":  # ERNIE's blocks get no options, so no override reaches their attention
            attention = functools.partial(meter.attention, None)
            stack.enter_context(mock.patch("comfy.ldm.ernie.model.optimized_attention", attention))
        for module in model.modules():
            if part := modules.get(type(module).__name__):
                stack.enter_context(meter.around(module, part))
        stack.enter_context(marked(meter.within))
        stack.enter_context(meter)
        forward(step)
    return meter.cost


def _run(config: Any, kernels: Fused | None) -> Any:
    core, trial = pack_module("toma_core"), pack_module("toma_core.kernels.dispatch")
    schedule = core.Schedule(config, tuple(float(STEPS - step) for step in range(STEPS)))
    return core.RunState(schedule, dispatch=trial.Dispatch(trial.Choice(kernels)))


def main() -> None:
    """Print how many operations one block of each kind launches, in bf16."""
    import argparse

    from scripts.comfy_pack import load_pack, use_comfyui
    from testbed import models

    use_comfyui()
    load_pack()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cost")
    parser.add_argument("name", choices=sorted(models.TRANSFORMERS))
    model, found = models.TRANSFORMERS[parser.parse_args().name](dtype=torch.bfloat16), dict[str, Meter]()
    model.model.to(torch.bfloat16)
    for group in pack_module("nodes.adapters.registry").require(model.model.diffusion_model).groups:
        meter = found[group.kind] = Meter()
        group.blocks[1].register_forward_pre_hook(lambda *_, meter=meter: meter.__enter__() and None)
        group.blocks[1].register_forward_hook(lambda *_, meter=meter: meter.__exit__(None, None, None))
    models.sample(model, 20, 28, steps=1, cfg=1.0)
    print({kind: meter.cost.launches for kind, meter in found.items()})


if __name__ == "__main__":
    main()
