"""The KV cache of a run: whether the card has room for it beside the model, and how ComfyUI reserves that room."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from comfy import model_management
from comfy.model_patcher import ModelPatcher
from comfy.sampler_helpers import estimate_memory, get_additional_models, get_additional_models_from_model_options
from torch import Tensor

from ...toma_core import Schedule, ToMAConfig
from ...toma_core.quant4 import int4_bytes
from ...toma_core.reasons import Message, Reason
from . import registry
from .compat import UnsupportedApiError, warn
from .compile_ops import compiled
from .conditions import area_size, crop
from .evaluated import Area, evaluated_parts, most_held

# The share of a card's memory that the KV cache may take in four bits where that pushes weights out. ComfyUI then loads
# these again in every step, which takes far less time than is saved. 18.2 GB (Wan 14B, 1280 x 720 x 81) fit 32 GB.
_SHARE = 0.55
# ComfyUI frees this much memory for each byte of weights that it loads, see `load_models_gpu`.
_LOADING = 1.1
# Schedules of context windows that lie elsewhere at each step.
_MOVING = ("looped_uniform", "standard_uniform")


@dataclass(frozen=True)
class KVCachePlan:
    """What a run caches so that merged blocks attend to all tokens."""

    bytes: int = 0  # size of the cache; 0 without
    quantized: bool = False  # keys and values have four bits a number
    reason: Message | None = None  # why there is no cache


def plan_kv_cache(
    config: ToMAConfig, guider: Any, latent: Tensor, sampler: Any, packed: Sequence[int], sigmas: Sequence[float] = ()
) -> KVCachePlan:
    """Decide what a run on latents of (B, C, ..., H, W) caches: keys and values at full precision where they fit beside
    the model's weights; in four bits where they do not; nothing where four bits would take more than `_SHARE` of the
    card.

    packed: the shape of all streams as ComfyUI packs them. sigmas: of the steps, and the one at which the run ends;
    without any, all conditions count.
    """
    model, options = guider.model_patcher, guider.model_options
    hooks = registry.find(model.get_model_object("diffusion_model"))
    if not config.uses_cache:
        return KVCachePlan(reason=Reason.KV_NO_FULL_STEPS())
    if hooks is None or (options.get("torch_compile_kwargs") and not compiled(options)):
        return KVCachePlan(reason=Reason.KV_COMPILE_BACKEND())
    windows = windows_of(guider, latent)
    if not windows:
        return KVCachePlan(reason=Reason.KV_CONTEXT_WINDOWS())
    conds = [cond for group in guider.conds.values() for cond in group or ()]
    of_an_area = partial(
        hooks.kv_cache_numel,
        config=config,
        options=options["transformer_options"],
        controlled=any(cond.get("control") is not None for cond in conds),
        references=max((cond.get("reference_latents") or [] for cond in conds), key=len, default=[]),
    )
    sizes: dict[Area, tuple[int, int]] = {}  # numbers of updates, and of keys and values

    def size(area: Area) -> int:
        if area not in sizes:
            outside = min(area_size(area or None, latent.shape[2:])) <= 0
            sizes[area] = (0, 0) if outside else of_an_area(crop(latent, area or None))
        return sum(sizes[area])

    steps = evaluated_parts(guider, sampler, packed, sigmas[:-1])
    schedule = Schedule(config, tuple(sigmas[:-1]), finishes=bool(sigmas) and sigmas[-1] == 0.0)
    held = most_held(steps, schedule, size) or [()]
    numbers = [of_an_area(latent) if not area else sizes[area] for area in held]
    updates, keys = (round(sum(parts) * len(latent) * windows) for parts in zip(*numbers, strict=True))
    if not keys:
        return KVCachePlan(reason=Reason.KV_MODEL_ATTENTION())
    itemsize, left = dtype_of(model).itemsize, memory_left(guider, packed)
    own = sum(hooks.model_cache_numel(cond, options["transformer_options"]) for cond in conds[: len(held)])
    left -= own * len(latent) * itemsize
    if (needed := (updates + keys) * itemsize) <= left:
        return KVCachePlan(needed)
    most = max(left, model_management.get_total_memory(model.load_device) * _SHARE)
    if (needed := updates * itemsize + int4_bytes(keys, itemsize)) <= most:
        return KVCachePlan(needed, quantized=True)
    return KVCachePlan(reason=Reason.KV_TOO_LARGE(needed=needed / 1e9, limit=most / 1e9))


def memory_left(guider: Any, shape: Sequence[int]) -> float:
    """Return how many bytes of the card a run on latents of this shape leaves free, negative if it does not fit: all
    but what ComfyUI frees before it loads the run's models, see `load_models_gpu`.

    Counts with the dtype of the run, which ComfyUI's estimate sees only once object patches are applied, and from the
    size of the card, not from its free memory: a seed must give the same image whatever else runs.
    """
    model, options = guider.model_patcher, guider.model_options
    as_run = _AsRun(model, options)
    try:
        activations, _ = estimate_memory(as_run, shape, guider.conds)
    except Exception as error:
        # A later ComfyUI may estimate in another way. Without an estimate four bits fit most cards.
        warn(UnsupportedApiError(f"estimate_memory: {error or type(error).__name__}"), "with a smaller KV cache")
        return 0.0
    loaded, controls = get_additional_models(guider.conds, model.model_dtype())
    loaded += [*get_additional_models_from_model_options(options), *model.get_nested_additional_models()]
    # A guider may have a model of its own for the negative prompt. Clones share their weights.
    loaded += [model, *model.model_patches_models(), *(m for m in vars(guider).values() if isinstance(m, ModelPatcher))]
    here = {id(getattr(m, "model", m)): m for m in loaded if m.load_device == model.load_device}
    weights = sum(m.model_size() for m in here.values())
    reserved = max(
        model_management.minimum_inference_memory(),
        activations + controls + model_management.extra_reserved_memory(),
    )
    return float(model_management.get_total_memory(model.load_device) - weights * _LOADING - reserved)


def dtype_of(model: ModelPatcher) -> torch.dtype:
    """Return the dtype that a run of the model computes in, before ComfyUI applies its object patches, too."""
    dtype: torch.dtype = model.get_model_object("manual_cast_dtype") or model.model.get_dtype()
    return dtype


def windows_of(guider: Any, latent: Tensor) -> float:
    """Return how often a frame of the latent is evaluated for a condition: more than once where context windows
    overlap; 0 where they lie elsewhere at each step, so that caches of a full step would be of other frames."""
    handler = guider.model_options.get("context_handler")
    try:
        if handler is None or latent.shape[handler.dim] <= handler.context_length:
            return 1.0
        if handler.context_schedule.name in _MOVING:
            return 0.0
        windows = handler.get_context_windows(guider.model_patcher.model, latent, guider.model_options)
        # ComfyUI may put a frame before those of a window.
        return sum(len(window.index_list) + 1 for window in windows) / latent.shape[handler.dim]
    except (AttributeError, TypeError, IndexError):
        return 1.0  # windows of another pack: the size of the cache is limited anyway


class _AsRun:
    """Stands in for a model's patcher, with the dtype and the options of the run. It is no copy of the patcher: that
    would detach the model when it is deleted."""

    def __init__(self, patcher: ModelPatcher, options: dict[str, Any]) -> None:
        self._patcher, self.model_options, self.model = patcher, options, copy(patcher.model)
        self.model.manual_cast_dtype = dtype_of(patcher)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._patcher, name)


class _Reserving:
    """Stands in for a model's `memory_required` and adds the bytes of each run that is about to begin."""

    def __init__(self, model: Any) -> None:
        self.required: Callable[..., Any] = model.memory_required
        self.before, self.more = vars(model).get("memory_required"), list[int]()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.required(*args, **kwargs) + sum(self.more)


@contextmanager
def reserved(model: Any, more: int) -> Iterator[None]:
    """Have ComfyUI count `more` bytes for activations while it loads the model. A replacement by another node meanwhile
    is kept."""
    ours = vars(model).get("memory_required")
    if not isinstance(ours, _Reserving):
        ours = model.memory_required = _Reserving(model)
    ours.more.append(more)
    try:
        yield
    finally:
        ours.more.remove(more)
        if not ours.more and vars(model).get("memory_required") is ours:
            if ours.before is None:
                del model.memory_required
            else:
                model.memory_required = ours.before
