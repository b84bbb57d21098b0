"""The variants that are compared: ToMA with several settings, its rivals, and ToMA together with a rival. A variant
patches a clone of a `ModelPatcher`, as a node does."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from scripts.comfy_pack import pack_module
from testbed import stand_ins
from testbed.selectors import selected_by

Patch = Callable[[Any], Any]


@dataclass(frozen=True)
class Variant:
    """One way to run a model: a name, and a patch of the model."""

    name: str
    patch: Patch
    note: str = ""  # remark for readers of the row
    unchanged: bool = False  # whether the output must equal the unpatched model's output
    # Whether the KV cache has four bits in single evaluations. In complete runs the pack chooses the form of the cache.
    packs: bool = False
    in_host_memory: bool = False  # whether the KV cache lies in main memory, not on the card


# Settings that merge all grids and blocks of small models, which have small grids and few blocks.
TINY: dict[str, Any] = {"min_tokens": 4, "skip_first_blocks": 0}

UNPATCHED = Variant("unpatched", lambda model: model, unchanged=True)


# Settings that merge every step, whatever the defaults are.
EVERY_STEP: dict[str, Any] = {"start_percent": 0.0, "end_percent": 1.0, "full_step_interval": 0}


def toma(name: str, *, selector: str = "", **settings: Any) -> Variant:
    """Return ToMA with these settings of `ToMAConfig`. By default every step and every block is merged, except the
    blocks of Flux that the released method does not merge. selector: the rule of `testbed.selectors` that selects
    destinations, "" for ToMA's own selection."""

    def patch(model: Any) -> Any:
        hooks = pack_module("nodes.adapters.registry").require(model.get_model_object("diffusion_model"))
        own = hooks.own_presets.get("paper", {})
        config = pack_module("toma_core").ToMAConfig(**{**EVERY_STEP, **own, **settings})
        return pack_module("nodes.adapters.patch_model").apply_toma(model, config)

    return Variant(f"ToMA {name}", selected_by(patch, selector) if selector else patch)


def preset(name: str, *, selector: str = "", **settings: Any) -> Variant:
    """Return ToMA with a preset. `settings` replace some of the preset's settings. selector: see `toma`."""

    def patch(model: Any) -> Any:
        chosen = pack_module("toma_core").UserSettings(name, settings)
        return pack_module("nodes.adapters.patch_model").apply_toma(model, chosen)

    return Variant(f"ToMA preset {name}", selected_by(patch, selector) if selector else patch)


def chain(*patches: Patch) -> Patch:
    """Return a patch that applies `patches` in this order."""

    def patch(model: Any) -> Any:
        for each in patches:
            model = each(model)
        return model

    return patch


def stacked(*variants: Variant) -> Variant:
    """Return a variant that applies `variants` in this order."""
    notes = "; ".join(v.note for v in variants if v.note)
    return Variant(" + ".join(v.name for v in variants), chain(*(v.patch for v in variants)), notes)


def core_node(module: str, node: str, *args: Any) -> Patch:
    """Return a patch that runs one of ComfyUI's own nodes, whether it has ComfyUI's API V1 or V3."""

    def patch(model: Any) -> Any:
        stand_ins.use_stand_ins()
        cls = getattr(importlib.import_module(f"comfy_extras.{module}"), node)
        if not hasattr(cls, "execute"):
            return getattr(cls(), cls.FUNCTION)(model, *args)[0]
        done = cls.execute(model, *args)
        return done[0] if isinstance(done, tuple) else done.args[0]

    return patch


def tome_node(ratio: float) -> Variant:
    """Apply ComfyUI's own ToMe node."""
    patch = core_node("nodes_tomesd", "TomePatchModel", ratio)
    return Variant("ComfyUI's ToMe node", patch, "merges where a UNet has attention at full resolution", True)


def tome(ratio: float) -> Variant:
    """Apply ToMe's bipartite matching around self-attention at every resolution with attention. Queries, keys and
    values are merged."""

    def patch(model: Any) -> Any:
        stand_ins.use_stand_ins()
        matching = importlib.import_module("comfy_extras.nodes_tomesd").bipartite_soft_matching_random2d
        held: dict[str, Any] = {}

        def merge(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
            height, width = options["activations_shape"][-2:]
            merged, held["unmerge"] = matching(q, width, height, 2, 2, int(q.shape[1] * ratio))
            reduced = merged(q)
            return reduced, reduced if k is q else merged(k), reduced if v is q else merged(v)

        model = model.clone()
        model.set_model_attn1_patch(merge)
        model.set_model_attn1_output_patch(lambda out, _: held.pop("unmerge")(out))
        return model

    return Variant(f"ToMe matching at SDXL's levels, ratio {ratio:g}", patch, "around self-attention, as ToMe does")


def todo(rows: int = 2, columns: int = 2) -> Variant:
    """Apply ToDo (Smith et al. 2024), in which self-attention uses keys and values from every Nth row and column of
    tokens."""

    def patch(model: Any) -> Any:
        from comfy.ldm.flux.model import Flux

        flux = isinstance(model.get_model_object("diffusion_model"), Flux)
        return (_todo_flux if flux else _todo_unet)(model.clone(), rows, columns)

    return Variant(f"ToDo-style keys and values, 1/{rows * columns}", patch)


def _thinned(x: Tensor, grid: tuple[int, int], rows: int, columns: int) -> Tensor:
    """Subsample tokens: (..., H * W, C) -> (..., H * W / (rows * columns), C)."""
    return x.unflatten(-2, grid)[..., ::rows, ::columns, :].flatten(-3, -2)


def _todo_unet(model: Any, rows: int, columns: int) -> Any:
    def patch(n: Tensor, context: Tensor, value: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        grid = tuple(options["activations_shape"][-2:])
        return n, _thinned(context, grid, rows, columns), _thinned(value, grid, rows, columns)

    model.set_model_attn1_patch(patch)
    return model


def _todo_flux(model: Any, rows: int, columns: int) -> Any:
    """Apply ToDo inside the attention, after the rotation of keys."""
    from comfy.patcher_extension import WrappersMP

    class Held:
        grid = (0, 0)

    def note(executor: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        Held.grid = pack_module("nodes.adapters.family").token_grid(x, executor.class_obj.diffusion_model.patch_size)
        return executor(x, *args, **kwargs)

    def attention(func: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        text = k.shape[2] - Held.grid[0] * Held.grid[1]

        def fewer(x: Tensor) -> Tensor:
            return torch.cat([x[:, :, :text], _thinned(x[:, :, text:], Held.grid, rows, columns)], 2)

        out: Tensor = func(q, fewer(k), fewer(v), *args, **kwargs)
        return out

    model.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "todo", note)
    model.model_options["transformer_options"]["optimized_attention_override"] = attention
    return model


def hypertile() -> Variant:
    """Apply ComfyUI's own HyperTile node with tiles of 256 pixels at two resolutions. Each call uses one of two
    tilings, chosen at random."""
    patch = core_node("nodes_hypertile", "HyperTile", 256, 2, 1, False)
    return Variant("HyperTile 256, depth 1", patch, "tiles queries, not keys and values")


def step_cache(name: str, threshold: float = 0.2) -> Variant:
    """Apply ComfyUI's own `EasyCache` or `LazyCache` at its default range of steps."""

    def on_copies(model: Any) -> Any:
        """Make the model copy its latent. When EasyCache skips a step, it adds to the latent in place. In fp32 this
        would change the sampler's own tensor."""
        from comfy.patcher_extension import WrappersMP

        def forward(executor: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
            return executor(x.clone(), *args, **kwargs)

        model = model.clone()
        model.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "on_copies", forward)
        return model

    patch = chain(on_copies, core_node("nodes_easycache", f"{name}Node", threshold, 0.15, 0.95, False))
    return Variant(name, patch, "how many steps it skips depends on the weights")


def block_cache(threshold: float) -> Variant:
    """Apply First Block Cache to Flux. If the residual of the first double block has hardly changed since the last full
    evaluation, the later blocks reuse their cached residuals. threshold: relative mean change of the first block's
    residual."""

    def patch(model: Any) -> Any:
        from comfy.patcher_extension import WrappersMP

        network = model.get_model_object("diffusion_model")
        held: dict[str, Any] = {}

        def begin(executor: Any, *args: Any, **kwargs: Any) -> Any:
            held.clear()
            return executor(*args, **kwargs)

        def double(index: int, args: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
            if index:
                return args if held["skips"] else extra["original_block"](args)
            given = args["img"].clone()  # a copy, because blocks write into this tensor
            out: dict[str, Any] = extra["original_block"](args)
            change, before = out["img"] - given, held.get("change")
            held["skips"] = (
                before is not None and float((change - before).abs().mean() / before.abs().mean()) < threshold
            )
            if not held["skips"]:
                held["change"], held["middle"] = change, torch.cat((out["txt"], out["img"]), 1)
            return out

        def single(index: int, args: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
            end = len(network.single_blocks) - 1
            if not held["skips"]:
                out: dict[str, Any] = extra["original_block"](args)
                if index == end:
                    held["update"] = out["img"] - held.pop("middle")
                return out
            return {"img": args["img"] + held["update"]} if index == end else args

        model = model.clone()
        model.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, "block_cache", begin)
        for index in range(len(network.double_blocks)):
            model.set_model_patch_replace(partial(double, index), "dit", "double_block", index)
        for index in range(len(network.single_blocks)):
            model.set_model_patch_replace(partial(single, index), "dit", "single_block", index)
        return model

    return Variant(f"block cache {threshold:g}", patch)


def compiled(backend: str = "inductor") -> Variant:
    """Apply ComfyUI's own TorchCompileModel node."""
    patch = core_node("nodes_torch_compile", "TorchCompileModel", backend)
    return Variant("torch.compile", patch, "first run compiles")


def unet_rivals(ratio: float) -> list[Variant]:
    """Return the rivals that save work within an evaluation of a UNet, unlike step caches."""
    return [tome_node(ratio), tome(ratio), todo(), hypertile()]
