"""Plan a run's KV cache from the memory that the model leaves free, and make ComfyUI reserve memory for the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, update_wrapper
from pathlib import Path
from typing import Any

import psutil
import torch
from comfy import model_management
from comfy.model_patcher import ModelPatcher
from comfy.sampler_helpers import estimate_memory, get_additional_models, get_additional_models_from_model_options
from torch import Tensor

from ...toma_core import Schedule, ToMAConfig
from ...toma_core.config import KVCache
from ...toma_core.host_memory import CudaCopier, HostMemory
from ...toma_core.quant4 import int4_bytes
from ...toma_core.reasons import Message, Reason
from . import registry
from .compat import UnsupportedApiError, require_api, warn, warned
from .compile_ops import compiled
from .conditions import area_size, crop
from .evaluated import Area, evaluated_parts, most_held

_CARD_SHARE = 0.55  # of a device's memory for a KV cache in four bits, where this pack cannot copy to main memory
MAIN_SHARE = 0.35  # of main memory for keys and values; ComfyUI needs the remainder for weights and text encoders
_LAST = 1e9  # bytes of main memory to leave free; ComfyUI itself leaves about 2 GB free when it pins weights
# Files with the memory limit and the usage of a container on Linux, for versions 2 and 1 of control groups.
_CGROUPS = Path("/sys/fs/cgroup")
_FILES = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))
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
    """Plan the KV cache of a run on latents of (B, C, ..., H, W). Keys and values have full precision if they fit on
    the card beside the model's weights, otherwise four bits. Keys and values that do not fit even so lie in main
    memory. If main memory is short too, only some blocks are merged, or there is no cache. packed: the shape of all
    streams as packed by ComfyUI. sigmas: one per step, then the sigma at the run's end; if empty, assume a step with
    every condition."""
    model, options = guider.model_patcher, guider.model_options
    hooks = registry.find(model.get_model_object("diffusion_model"))
    if hooks is None or (options.get("torch_compile_kwargs") and not compiled(options)):
        return KVCachePlan(reason=Reason.KV_COMPILE_BACKEND())
    windows = windows_of(guider, latent)
    if not windows:
        return KVCachePlan(reason=Reason.KV_CONTEXT_WINDOWS())
    steps = evaluated_parts(guider, sampler, packed, sigmas[:-1])
    conds = [cond for group in guider.conds.values() for cond in group or ()]
    controlled = any(cond.get("control") is not None for cond in conds)
    references = max((cond.get("reference_latents") or [] for cond in conds), key=len, default=[])
    patches = options["transformer_options"]

    @cache
    def per_image(config: ToMAConfig, area: Area) -> tuple[int, int]:
        if min(area_size(area or None, latent.shape[2:])) <= 0:
            return 0, 0  # the area lies outside of the latent
        return hooks.kv_cache_numel(crop(latent, area or None), config, patches, controlled, references)

    def needed(config: ToMAConfig) -> tuple[int, int, int]:
        """Return the largest cache's counts: elements of updates, elements of keys and values, and conditions."""
        schedule = Schedule(config, tuple(sigmas[:-1]), finishes=bool(sigmas) and sigmas[-1] == 0.0)
        held = most_held(steps, schedule, lambda area: sum(per_image(config, area))) or [()]
        numbers = zip(*(per_image(config, area) for area in held), strict=True)
        updates, keys = (round(sum(each) * len(latent) * windows) for each in numbers)
        return updates, keys, len(held)

    updates, keys, held = needed(config)
    if not keys:
        return KVCachePlan()  # the settings skip all blocks
    itemsize, device = dtype_of(model).itemsize, model.load_device
    own = sum(hooks.model_cache_numel(cond, patches) for cond in conds[:held])
    left = memory_left(guider, packed) - own * len(latent) * itemsize
    copies = copier_of(device) is not None
    main = main_room() if copies and config.kv_cache is KVCache.ON else 0.0
    staging = 2 / max(sum(1 for _ in hooks.blocks(latent)), 2) if copies else 0.0  # two blocks, as a share of all
    full = (updates + keys) * itemsize
    if full <= left:
        return KVCachePlan(full, keys=keys * itemsize, staging=round(keys * itemsize * staging), main_room=main)
    if not copies:
        left = max(left, model_management.get_total_memory(device) * _CARD_SHARE)
    complete = updates * itemsize + int4_bytes(keys, itemsize)
    fewer = [share for share in _FEWER_BLOCKS if copies and share > config.skip_first_blocks]
    for skipped in (0.0, *fewer):
        if skipped:
            updates, keys, _ = needed(replace(config, skip_first_blocks=skipped))
        plan = _four_bits(updates * itemsize, int4_bytes(keys, itemsize), left, staging, main, skipped)
        if plan.in_main <= main:
            return plan
    return KVCachePlan(reason=Reason.KV_TOO_LARGE(needed=complete / 1e9, limit=(max(left, 0.0) + main) / 1e9))


def _four_bits(updates: int, keys: int, left: float, staging: float, main: float, skipped: float) -> KVCachePlan:
    """Return the plan of a cache in four bits, with as much of it on the card as fits into `left` bytes. updates, keys:
    bytes. staging: bytes for copies, as a share of `keys`. main, skipped: `main_room` and `skipped` of the plan."""
    staged = round(keys * staging)
    fits = updates + keys <= left
    in_main = 0 if fits else keys - round(min(max(left - updates - staged, 0.0), keys))
    return KVCachePlan(updates + keys, True, None, keys, in_main, staged, main, skipped)


def copier_of(device: torch.device) -> CudaCopier | None:
    """Return the copier between a device and main memory; None for a CPU, unknown devices and integrated GPUs."""
    if device.type != "cuda":  # ROCm calls itself "cuda", too
        return None
    properties = torch.cuda.get_device_properties(device) if torch.cuda.is_available() else None
    if getattr(properties, "is_integrated", False):
        return None
    return CudaCopier(model_management.pin_memory, model_management.unpin_memory)


def host_of(plan: KVCachePlan, device: torch.device) -> HostMemory | None:
    """Return the `HostMemory` for a run's keys and values; None if they can lie only on the card."""
    if not plan.main_room or (copier := copier_of(device)) is None:
        return None
    card_room = plan.keys - plan.in_main if plan.in_main else float("inf")
    return HostMemory(copier, plan.keys, card_room, plan.main_room, plan.bytes - plan.keys + plan.staging, may_take)


def measure_room(host: HostMemory, model: ModelPatcher, shape: Sequence[int], conds: Any) -> None:
    """Set the card's room for keys and values to the memory that is free after the model is loaded. If ComfyUI loads
    the model block by block during the run, set no more than the planned room, because ComfyUI then fills free memory
    with weights. shape, conds: arguments of ComfyUI's estimate of an evaluation's memory."""
    free = getattr(model, "get_free_memory", model_management.get_free_memory)(model.load_device)
    room = max(0.0, free - _inference_memory(model, shape, conds) - host.beside)
    by_block = getattr(model, "is_dynamic", lambda: False)()
    host.card_room = min(host.card_room, room) if by_block else room


def main_room() -> float:
    """Return how many bytes of main memory keys and values may take. The number depends on total memory, not on free
    memory, so that a seed gives the same picture in every run."""
    return min(total for total, _ in _memories()) * MAIN_SHARE


def may_take(size: int) -> bool:
    """Return whether `size` bytes of main memory may be taken now. Let ComfyUI first unpin weights of idle models."""
    with warned(), require_api("ensure_pin_budget"):
        # ComfyUI before 0.26 has no `ensure_pin_budget`.
        getattr(model_management, "ensure_pin_budget", lambda _: None)(size)
    return min(available for _, available in _memories()) - _LAST >= size


def _memories() -> list[tuple[float, float]]:
    """Return total and available bytes of the computer, and of the container if its memory is limited."""
    computer = psutil.virtual_memory()
    found = [(computer.total, computer.available)]
    for limit, used in _FILES:
        try:
            total, taken = (float((_CGROUPS / name).read_text()) for name in (limit, used))
            lines = (_CGROUPS / limit).with_name("memory.stat").read_text().splitlines()
        except (OSError, ValueError):  # the files do not exist, or the limit is "max"
            continue
        stat = dict(line.split() for line in lines)
        # Count cached files as available, as psutil does, because Linux drops them when memory is needed.
        files = float(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
        found.append((total, total - taken + files))
        break  # the computer may have the files of both versions
    return found


def memory_left(guider: Any, shape: Sequence[int]) -> float:
    """Return how many bytes of the card a run on latents of this shape leaves free; negative if the run does not fit.
    The number is the card's total memory minus what ComfyUI frees before it loads the run's models, see
    `load_models_gpu`. It does not depend on memory that is free now: a seed must give the same image whatever else
    runs."""
    model, options = guider.model_patcher, guider.model_options
    loaded, controls = get_additional_models(guider.conds, model.model_dtype())
    usual = model.model.manual_cast_dtype
    model.model.manual_cast_dtype = dtype_of(model)  # as in the run: ComfyUI applies object patches later
    try:
        inference = _inference_memory(model, shape, guider.conds, controls)
    finally:
        model.model.manual_cast_dtype = usual
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
    used = activations + controls + model_management.extra_reserved_memory()
    return max(used, model_management.minimum_inference_memory())


def dtype_of(model: ModelPatcher) -> torch.dtype:
    """Return the dtype in which a run of the model computes, even before ComfyUI applies object patches."""
    return model.get_model_object("manual_cast_dtype") or model.model.get_dtype()


def windows_of(guider: Any, latent: Tensor) -> float:
    """Return how many times, on average, one evaluation computes a frame of the latent for a condition: more than once
    where context windows overlap. Return 0 if windows move at each step: a cache of other frames is of no use."""
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


class _Reserving:
    """Stands in for a model's `memory_required`, and adds the bytes of all open `reserved` blocks."""

    def __init__(self, model: Any) -> None:
        self.required: Callable[..., Any] = model.memory_required
        update_wrapper(self, self.required, updated=())  # ComfyUI passes only arguments that the signature names
        self.before = vars(model).get("memory_required")
        self.more = list[int]()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.required(*args, **kwargs) + sum(self.more)


@contextmanager
def reserved(model: Any, more: int) -> Iterator[None]:
    """Make ComfyUI count `more` additional bytes for activations if it loads the model in the `with` block. If another
    node replaces `memory_required` in the block, the replacement stays."""
    ours = vars(model).get("memory_required")
    if not isinstance(ours, _Reserving):
        ours = model.memory_required = _Reserving(model)
    ours.more.append(more)
    try:
        yield
    finally:
        ours.more.remove(more)
        if not ours.more and vars(model).get("memory_required") is ours:
            del model.memory_required
            if ours.before is not None:
                model.memory_required = ours.before
