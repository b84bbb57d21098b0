"""What users would take instead of merging, as patches of a model: step skipping, caches, tiles, fewer keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.variants import core_node

Patch = Callable[[Any], Any]


def easy_cache(threshold: float) -> Patch:
    """ComfyUI's own EasyCache: skips evaluations of the model while its input changes little."""
    return core_node("nodes_easycache", "EasyCacheNode", threshold, 0.15, 0.95, False)


def lazy_cache(threshold: float) -> Patch:
    """ComfyUI's own LazyCache: the same around the guided prediction."""
    return core_node("nodes_easycache", "LazyCacheNode", threshold, 0.15, 0.95, False)


def hyper_tile(tile: int, depth: int) -> Patch:
    """ComfyUI's own HyperTile (UNets only). One choice of tiles, so that nothing is drawn at random."""
    return core_node("nodes_hypertile", "HyperTile", tile, 1, depth, False)


def half_the_evaluations(model: Any) -> Any:
    """Skip every second evaluation and use the velocity of the one before: the plainest rival at half the cost."""
    from comfy.patcher_extension import WrappersMP

    class Held:
        index = 0
        result: Any = None

    def start(executor: Any, *args: Any, **kwargs: Any) -> Any:
        Held.index, Held.result = 0, None
        return executor(*args, **kwargs)

    def skip(executor: Any, x: Tensor, timestep: Tensor, *args: Any) -> Any:
        sigma = timestep.view(-1, *[1] * (x.ndim - 1))
        if Held.index % 2 == 0:
            Held.result = (x - executor(x, timestep, *args)) / sigma
        Held.index += 1
        return x - sigma * Held.result

    model = model.clone()
    model.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, "skip", start)
    model.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, "skip", skip)
    return model


def todo(rows: int, columns: int) -> Patch:
    """ToDo (Smith et al. 2024): keys and values of self-attention from every so many rows and columns of tokens."""

    def patch(model: Any) -> Any:
        from comfy.ldm.flux.model import Flux

        flux = isinstance(model.get_model_object("diffusion_model"), Flux)
        return (_todo_flux if flux else _todo_unet)(model.clone(), rows, columns)

    return patch


def _thinned(x: Tensor, grid: tuple[int, int], rows: int, columns: int) -> Tensor:
    """(..., H * W, C) -> (..., H * W / (rows * columns), C)"""
    return x.unflatten(-2, grid)[..., ::rows, ::columns, :].flatten(-3, -2)


def _todo_unet(model: Any, rows: int, columns: int) -> Any:
    def patch(n: Tensor, context: Tensor, value: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        grid = tuple(options["activations_shape"][-2:])
        return n, _thinned(context, grid, rows, columns), _thinned(value, grid, rows, columns)

    model.set_model_attn1_patch(patch)
    return model


def _todo_flux(model: Any, rows: int, columns: int) -> Any:
    """Inside the attention itself, where keys have their positions already."""
    from comfy.patcher_extension import WrappersMP

    from scripts.comfy_pack import pack_module

    class Held:
        grid = (0, 0)

    def note(executor: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        Held.grid = pack_module("nodes.adapters.flux").token_grid(x, executor.class_obj.diffusion_model.patch_size)
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
