"""Plan the KV cache of a run from the memory that the model leaves free, and make ComfyUI reserve memory for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from comfy import model_management
from comfy.model_patcher import ModelPatcher
from comfy.sampler_helpers import estimate_memory, get_additional_models, get_additional_models_from_model_options
from torch import Tensor

from ...toma_core import Schedule, ToMAConfig
from ...toma_core.config import KVCache
from ...toma_core.host_memory import HostMemory
from ...toma_core.parked import CudaCopier
from ...toma_core.quant4 import int4_bytes
from ...toma_core.reasons import Message, Reason
from . import registry
from .compat import UnsupportedApiError, warn
from .compile_ops import compiled
from .conditions import area_size, crop
from .evaluated import Area, Parts, evaluated_parts, most_held
from .family import ModelHooks
from .main_memory import main_room, may_take

# Share of a device's memory that a KV cache in four bits may take if this pack cannot copy from the device to main
# memory.
_SHARE = 0.55
_FEWER_BLOCKS = (0.15, 0.3, 0.5)  # values of `KVCachePlan.skipped` to try if the cache of all blocks has no room
_LOADING = 1.1  # ComfyUI frees this many bytes for each byte of weights that it loads, see `load_models_gpu`
_MOVING = ("looped_uniform", "standard_uniform")  # schedules whose context windows move at each step


@dataclass(frozen=True)
class KVCachePlan:
    """The size and place of a run's KV cache."""

    bytes: int = 0  # size of the cache; 0 if there is none
    quantized: bool = False  # keys and values have four bits per element
    reason: Message | None = None  # why there is no cache
    keys: int = 0  # bytes of keys and values; the rest of `bytes` is updates, which lie on the card
    in_main: int = 0  # bytes of keys and values that do not fit on the card
    staging: int = 0  # bytes on the card for copies from and to main memory
    main_room: float = 0.0  # bytes that main memory has room for; 0 if everything lies on the card
    skipped: float = 0.0  # share of blocks, counted from the first, that stay unmerged because memory is short

    @property
    def on_card(self) -> int:
        """The bytes that the run needs on the card."""
        return self.bytes - self.in_main + (self.staging if self.in_main else 0)


def plan_kv_cache(
    config: ToMAConfig, guider: Any, latent: Tensor, sampler: Any, packed: Sequence[int], sigmas: Sequence[float] = ()
) -> KVCachePlan:
    """Plan the KV cache of a run on latents of (B, C, ..., H, W).

    Keys and values have full precision if they fit on the card beside the model's weights, otherwise four bits. Keys
    and values that do not fit lie in main memory. If main memory is short too, only the keys and values of some blocks
    are cached, or none.

    packed: the shape of all streams as packed by ComfyUI. sigmas: one per step, then the sigma at the run's end; if
    empty, every condition is counted.
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
    steps = evaluated_parts(guider, sampler, packed, sigmas[:-1])
    needed = partial(_numbers, hooks, guider, latent, steps, sigmas, windows)
    updates, keys, held = needed(config)
    if not keys:
        return KVCachePlan(reason=Reason.KV_MODEL_ATTENTION())
    itemsize, device = dtype_of(model).itemsize, model.load_device
    own = sum(hooks.model_cache_numel(cond, options["transformer_options"]) for cond in _conds(guider)[:held])
    left = memory_left(guider, packed) - own * len(latent) * itemsize
    copies = copier_of(device) is not None
    main = main_room() if copies and config.kv_cache is KVCache.ON else 0.0
    staging = 2 / max(sum(1 for _ in hooks.blocks(latent)), 2) if copies else 0.0  # two blocks, as a share of all
    if (updates + keys) * itemsize <= left:
        staged = round(keys * itemsize * staging)
        return KVCachePlan((updates + keys) * itemsize, keys=keys * itemsize, staging=staged, main_room=main)
    if not copies:
        left = max(left, model_management.get_total_memory(device) * _SHARE)
    complete = updates * itemsize + int4_bytes(keys, itemsize)
    fewer = [share for share in _FEWER_BLOCKS if copies and share > config.skip_first_blocks]
    for skipped in (0.0, *fewer):
        if skipped:
            updates, keys, _ = needed(replace(config, skip_first_blocks=skipped))
        plan = _four_bits(updates * itemsize, int4_bytes(keys, itemsize), left, staging, main, skipped)
        if plan.in_main <= main:
            return plan
    return KVCachePlan(reason=Reason.KV_TOO_LARGE(needed=complete / 1e9, limit=(max(left, 0.0) + main) / 1e9))


def _conds(guider: Any) -> list[dict[str, Any]]:
    return [cond for group in guider.conds.values() for cond in group or ()]


def _numbers(
    hooks: ModelHooks,
    guider: Any,
    latent: Tensor,
    steps: Sequence[Parts],
    sigmas: Sequence[float],
    windows: float,
    config: ToMAConfig,
) -> tuple[int, int, int]:
    """Return three numbers for the step at which a run's caches are largest: elements of updates, elements of keys and
    values, and conditions with cached entries. steps: see `evaluated_parts`. windows: see `windows_of`."""
    conds = _conds(guider)
    of_an_area = partial(
        hooks.kv_cache_numel,
        config=config,
        options=guider.model_options["transformer_options"],
        controlled=any(cond.get("control") is not None for cond in conds),
        references=max((cond.get("reference_latents") or [] for cond in conds), key=len, default=[]),
    )
    sizes: dict[Area, tuple[int, int]] = {}  # by area: elements of updates, and of keys and values

    def size(area: Area) -> int:
        if area not in sizes:
            outside = min(area_size(area or None, latent.shape[2:])) <= 0
            sizes[area] = (0, 0) if outside else of_an_area(crop(latent, area or None))
        return sum(sizes[area])

    schedule = Schedule(config, tuple(sigmas[:-1]), finishes=bool(sigmas) and sigmas[-1] == 0.0)
    held = most_held(steps, schedule, size) or [()]
    numbers = [of_an_area(latent) if not area else sizes[area] for area in held]
    updates, keys = (round(sum(parts) * len(latent) * windows) for parts in zip(*numbers, strict=True))
    return updates, keys, len(held)


def _four_bits(updates: int, keys: int, left: float, staging: float, main: float, skipped: float) -> KVCachePlan:
    """Return the plan of a cache in four bits, with as much of it on the card as fits into `left` bytes. updates, keys:
    bytes. staging: bytes for copies, as a share of `keys`. main, skipped: `main_room` and `skipped` of the plan."""
    staged = round(keys * staging)
    fits = updates + keys <= left
    in_main = 0 if fits else keys - round(min(max(left - updates - staged, 0.0), keys))
    return KVCachePlan(updates + keys, True, None, keys, in_main, staged, main, skipped)


def copier_of(device: torch.device) -> CudaCopier | None:
    """Return the copier between a device and main memory; None for unknown devices, for a CPU, and for a card that
    shares main memory with the computer."""
    if device.type != "cuda":  # ROCm calls itself "cuda", too
        return None
    properties = torch.cuda.get_device_properties(device) if torch.cuda.is_available() else None
    if getattr(properties, "is_integrated", False):
        return None
    return CudaCopier(model_management.pin_memory, model_management.unpin_memory)


def host_of(plan: KVCachePlan, device: torch.device) -> HostMemory | None:
    """Return the memory for a run's keys and values; None if they can only lie on the card."""
    copier = copier_of(device) if plan.main_room else None
    if copier is None:
        return None
    card_room = plan.keys - plan.in_main if plan.in_main else float("inf")
    return HostMemory(copier, plan.keys, card_room, plan.main_room, plan.bytes - plan.keys + plan.staging, may_take)


def measure_room(host: HostMemory, model: ModelPatcher, shape: Sequence[int], conds: Any) -> None:
    """Set the card's room for keys and values to the memory that is free after the model is loaded. If ComfyUI loads a
    model block by block while it runs, set the planned room at most, because ComfyUI then fills free memory with
    weights. shape, conds: arguments of ComfyUI's estimate of an evaluation's memory."""
    free = getattr(model, "get_free_memory", model_management.get_free_memory)(model.load_device)
    room = max(0.0, free - _inference_memory(model, shape, conds) - host.beside)
    by_block = getattr(model, "is_dynamic", lambda: False)()
    host.card_room = min(host.card_room, room) if by_block else room


def memory_left(guider: Any, shape: Sequence[int]) -> float:
    """Return how many bytes of the card a run on latents of this shape leaves free; negative if the run does not fit.
    This is the card's total memory minus the memory that ComfyUI frees before it loads the run's models, see
    `load_models_gpu`. The memory that is free now does not count, because a seed must give the same image whatever else
    runs."""
    model, options = guider.model_patcher, guider.model_options
    loaded, controls = get_additional_models(guider.conds, model.model_dtype())
    inference = _inference_memory(_AsRun(model, options), shape, guider.conds, controls)
    loaded += [*get_additional_models_from_model_options(options), *model.get_nested_additional_models()]
    # A guider may have a second model, for the negative prompt. Clones of a model share weights, so count them once.
    loaded += [model, *model.model_patches_models(), *(m for m in vars(guider).values() if isinstance(m, ModelPatcher))]
    here = {id(getattr(m, "model", m)): m for m in loaded if m.load_device == model.load_device}
    weights = sum(m.model_size() for m in here.values())
    return float(model_management.get_total_memory(model.load_device) - weights * _LOADING - inference)


def _inference_memory(model: Any, shape: Sequence[int], conds: Any, controls: float = 0.0) -> float:
    """Return the bytes that ComfyUI keeps free for an evaluation, in addition to the weights. If ComfyUI's estimate
    fails, as it may in a later version, log a warning and return infinity. controls: bytes for ControlNets."""
    try:
        activations, _ = estimate_memory(model, shape, conds)
    except Exception as error:
        problem = UnsupportedApiError(f"estimate_memory: {error or type(error).__name__}")
        warn(problem, "with a smaller KV cache, or with none")
        return float("inf")
    least = model_management.minimum_inference_memory()
    return max(activations + controls + model_management.extra_reserved_memory(), least)


def dtype_of(model: ModelPatcher) -> torch.dtype:
    """Return the dtype in which a run of the model computes, even before ComfyUI applies object patches."""
    return model.get_model_object("manual_cast_dtype") or model.model.get_dtype()


def windows_of(guider: Any, latent: Tensor) -> float:
    """Return how many times, on average, one evaluation computes a frame of the latent for a condition: more than once
    where context windows overlap. Return 0 if the windows move at each step: a step then finds other frames in the
    cache than its own, so the run gets no cache."""
    handler = guider.model_options.get("context_handler")
    try:
        if handler is None or latent.shape[handler.dim] <= handler.context_length:
            return 1.0
        if handler.context_schedule.name in _MOVING:
            return 0.0
        windows = handler.get_context_windows(guider.model_patcher.model, latent, guider.model_options)
        # ComfyUI may add a frame before the frames of a window.
        return sum(len(window.index_list) + 1 for window in windows) / latent.shape[handler.dim]
    except (AttributeError, TypeError, IndexError):
        return 1.0  # windows of another pack, of which nothing is known


class _AsRun:
    """Stands in for a model's patcher, with the options and the dtype of the run. In the patcher itself, ComfyUI's
    estimate of memory finds them only after object patches are applied. A copy of the patcher would detach the model
    when the copy is deleted."""

    def __init__(self, patcher: ModelPatcher, options: dict[str, Any]) -> None:
        self._patcher, self.model_options, self.model = patcher, options, copy(patcher.model)
        self.model.manual_cast_dtype = dtype_of(patcher)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._patcher, name)


class _Reserving:
    """Stands in for a model's `memory_required` and adds the bytes of each run that is about to begin."""

    def __init__(self, model: Any) -> None:
        self.required: Callable[..., Any] = model.memory_required
        self.before = vars(model).get("memory_required")
        self.more = list[int]()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.required(*args, **kwargs) + sum(self.more)


@contextmanager
def reserved(model: Any, more: int) -> Iterator[None]:
    """Make ComfyUI count `more` additional bytes for activations while it loads the model. If another node replaces
    `memory_required` in the meantime, the replacement stays."""
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
