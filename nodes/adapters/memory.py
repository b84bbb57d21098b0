"""Keys and values that a run keeps of its blocks: whether there is room for them, and telling ComfyUI how much."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import comfy.model_management
import torch
from comfy.samplers import CFGGuider
from torch import Tensor

from ...toma_core import ToMAConfig
from ...toma_core.packed import packed_bytes
from .family import ModelHooks

# Bytes that they may take as they are, two activations of every block: Flux.1 at 1024 x 1024 has 2.9 GB of them. Where
# there are more, as in videos, they are packed. ComfyUI then loads more of the model piece by piece, which takes far
# less than what is saved: so they may take half of a card's memory (a little more: the 18.2 GB of Wan 14B at
# 1280 x 720 x 81 are to fit 32), and no more than a quarter as they are.
MOST = 6 << 30
_SHARE, _SHARE_AS_THEY_ARE = 0.55, 0.25


@dataclass(frozen=True)
class Kept:
    """What a run keeps so that merged blocks can look at all tokens: bytes, whether in four bits a number, and why
    nothing, for the report; 0 and empty where nothing is to be kept."""

    bytes: int = 0
    packs: bool = False
    without: str = ""


def kept_keys(
    hooks: ModelHooks,
    config: ToMAConfig,
    latent: Tensor,
    conditions: float,
    dtype: torch.dtype,
    device: torch.device,
    transformer_options: Mapping[str, Any],
    *,
    controlled: bool = False,
    references: Sequence[Tensor] = (),
) -> Kept:
    """What a run on latents of (B, C, ..., H, W) is to keep. conditions: how often it is evaluated in a step; dtype: of
    tokens; device: that the model runs on; the others: see `ModelHooks.keys_of`."""
    if not config.all_keys:
        return Kept()
    of_an_image = hooks.keys_of(latent, config, transformer_options, controlled=controlled, references=references)
    updates, keys = (round(n * len(latent) * conditions) for n in of_an_image)
    if not keys:
        return Kept(without="this model's attention takes no others")
    room = comfy.model_management.get_total_memory(device)
    if (needed := (updates + keys) * dtype.itemsize) <= min(MOST, room * _SHARE_AS_THEY_ARE):
        return Kept(needed)
    if (needed := updates * dtype.itemsize + packed_bytes(keys, dtype.itemsize)) <= room * _SHARE:
        return Kept(needed, packs=True)
    return Kept(without=f"they would take {needed / 1e9:.1f} GB, more than {room * _SHARE / 1e9:.1f}")


def conditions_of(guider: Any, sampler: Any = None) -> int:
    """How many conditions are evaluated in a step, at most: without guidance negative ones are not, unless the sampler
    asks for them all the same, as those of CFG++ do."""
    conds: Mapping[str, Sequence[Any] | None] = getattr(guider, "conds", {})
    name = getattr(getattr(sampler, "sampler_function", None), "__name__", "cfg_pp")
    usual = getattr(type(guider), "predict_noise", None) is CFGGuider.predict_noise and "cfg_pp" not in name
    usual = usual and not guider.model_options.get("disable_cfg1_optimization", False)
    if usual and math.isclose(guider.cfg, 1.0):
        return max(1, len(conds.get("positive") or ()))
    return max(1, sum(len(each or ()) for each in conds.values()))


# The schedules of ComfyUI's context windows whose windows lie elsewhere at each step.
_MOVING = ("looped_uniform", "standard_uniform")


def moves(guider: Any, latent: Tensor) -> bool:
    """Whether context windows over a latent lie elsewhere at each step: then what a full step keeps is of others."""
    handler = guider.model_options.get("context_handler")
    try:
        several = handler is not None and latent.shape[handler.dim] > handler.context_length
        return several and handler.context_schedule.name in _MOVING
    except (AttributeError, TypeError, IndexError):
        return False


def has_controls(guider: Any) -> bool:
    """Whether any condition has a ControlNet."""
    return any(cond.get("control") is not None for conds in guider.conds.values() for cond in conds or ())


def overlap_of(guider: Any, latent: Tensor) -> float:
    """How often a frame of the latent is evaluated for a condition: more than once where windows over them overlap."""
    handler = guider.model_options.get("context_handler")
    try:
        if handler is None or latent.shape[handler.dim] <= handler.context_length:
            return 1.0
        windows = handler.get_context_windows(guider.model_patcher.model, latent, guider.model_options)
        # ComfyUI may put a frame before those of a window.
        return sum(len(window.index_list) + 1 for window in windows) / latent.shape[handler.dim]
    except (AttributeError, TypeError, IndexError):
        return 1.0  # another pack's, who may do as they like: what is held is limited anyhow


def references_of(guider: Any) -> list[Tensor]:
    """The latents of reference images, of the condition that has most."""
    each = [c.get("reference_latents") or [] for conds in guider.conds.values() for c in conds or ()]
    return max(each, key=len, default=[])


class _Reserving:
    """In the place of a model's `memory_required`: so many bytes more. more: of each run that is about to begin."""

    def __init__(self, model: Any) -> None:
        self.required: Callable[..., Any] = model.memory_required
        self.before, self.more = vars(model).get("memory_required"), list[int]()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.required(*args, **kwargs) + sum(self.more)


@contextmanager
def reserved(model: Any, more: int) -> Iterator[None]:
    """While ComfyUI loads the model for a run, it counts so many bytes more for activations. What somebody else puts in
    the same place meanwhile stays there."""
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
