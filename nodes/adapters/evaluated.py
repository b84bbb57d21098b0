"""Predict, before a run begins, which conditions each step evaluates, and which of them the caches will hold. A
guider's `predict_noise` decides which conditions are evaluated. To find out which, call `predict_noise` on zeros, with
a stand-in for the model. Functions of other nodes are left out of that call, because they may hold state."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from copy import copy
from itertools import permutations
from types import CodeType
from typing import Any

import torch
from comfy import samplers
from comfy.patcher_extension import WrappersMP
from comfy.samplers import CFGGuider
from torch import Tensor

from ...toma_core import Schedule, StepMode
from .conditions import Contents, is_active, patches_of

Area = tuple[int, ...]  # area of a latent: sizes, then starts; () for the entire latent
# Areas of the entries that one evaluation caches, by condition, area, patches and number of the call.
Parts = dict[Hashable, Area]
Call = tuple[Sequence[Any], Hashable]  # groups of conditions that are evaluated at once, and the patches of that call

# Methods of a guider that prepare what its `predict_noise` reads.
_PREPARING = ("__call__", "outer_predict_noise", "outer_sample", "inner_sample")
# Prefixes of the names of options that hold functions of other nodes, or that choose devices.
_FOREIGN = ("sampler_", "model_function_wrapper", "context_handler", "denoise_mask_function", "multigpu_")


def evaluated_parts(guider: Any, sampler: Any, shape: Sequence[int], sigmas: Sequence[float]) -> list[Parts]:
    """Return for each step of a run the cache entries that the step would write if it were a refresh. shape: the
    latent's shape as packed by ComfyUI. sigmas: one per step; if empty, return one step with every condition."""
    contents = Contents(guider.conds)
    model = _Unloaded(guider.model_patcher)
    conds = _prepared(guider.conds, model, shape)
    steps = []
    for sigma in sigmas or (None,):
        parts: Parts = {}
        counts: Counter[Hashable] = Counter()
        for groups, patches in _calls(guider, sampler, conds, model, shape, sigma):
            for cond in (cond for group in groups for cond in group or ()):
                if sigma is None or is_active(cond, sigma):
                    key = contents.of(cond["uuid"]), tuple(cond.get("area") or ()), patches
                    counts[cond["uuid"], key] += 1
                    parts[key, counts[cond["uuid"], key]] = key[1]
        steps.append(parts)
    return steps


def most_held(steps: Sequence[Parts], schedule: Schedule, size: Callable[[Area], int]) -> list[Area]:
    """Return the areas of a run's cached entries at the time when the caches are largest. size: size of an entry, from
    the entry's area."""
    held: dict[Hashable, tuple[int, Area]] = {}  # step of the last refresh, and area
    most = [*max(steps, key=lambda parts: sum(map(size, parts.values()))).values()]
    for step, (parts, sigma) in enumerate(zip(steps, schedule.sigmas, strict=False)):
        mode = schedule.decide(sigma, step).mode
        fresh = all(part in held and step - held[part][0] < schedule.cache_steps for part in parts)
        if mode is StepMode.REFRESH or (mode is StepMode.MERGED_CACHED and not fresh):
            held = {part: line for part, line in held.items() if step - line[0] < schedule.cache_steps}
            held.update({part: (step, area) for part, area in parts.items()})
            most = max(most, [area for _, area in held.values()], key=lambda areas: sum(map(size, areas)))
    return most


class _Unloaded:
    """Stands in for a model that is not loaded yet: its attributes can be read, but it cannot be evaluated."""

    def __init__(self, patcher: Any) -> None:
        self._model = patcher.model
        self.model_sampling = patcher.get_model_object("model_sampling")

    def __getattr__(self, name: str) -> Any:
        if name in ("apply_model", "_apply_model", "diffusion_model"):
            raise AttributeError(f"{name}: the model is not loaded yet")
        return getattr(self._model, name)


def _prepared(conds: Mapping[str, Any], model: Any, shape: Sequence[int]) -> dict[str, list[Any]]:
    """Return copies of all conditions with the areas and noise levels that ComfyUI finds for them when sampling begins.
    If that fails, return the conditions unchanged."""
    prepared = {name: [dict(cond) for cond in group or ()] for name, group in conds.items()}
    try:
        for group in prepared.values():
            samplers.resolve_areas_and_cond_masks_multidim(group, tuple(shape[2:]), torch.device("cpu"))
            samplers.calculate_start_end_timesteps(model, group)
        # If a condition of one group has an area, ComfyUI evaluates this area for the other groups too.
        for group, other in permutations(prepared.values(), 2):
            for cond in group:
                samplers.create_cond_with_same_area_if_none(other, cond)
    except Exception as error:
        logging.debug("ToMA: areas and noise levels of conditions are unknown before sampling: %r", error)
        return dict(conds)
    return prepared


def _calls(
    guider: Any, sampler: Any, conds: Mapping[str, Any], model: Any, shape: Sequence[int], sigma: float | None
) -> Iterator[Call]:
    """Yield the calls that a guider makes at a noise level, then the calls that functions of other nodes add."""
    options = guider.model_options
    sampler_name = getattr(getattr(sampler, "sampler_function", None), "__name__", "cfg_pp")
    unguided_too = bool(options.get("disable_cfg1_optimization")) or "cfg_pp" in sampler_name
    if getattr(type(guider), "predict_noise", None) is CFGGuider.predict_noise:
        alone = not unguided_too and math.isclose(guider.cfg, 1.0)
        yield [conds.get(name) for name in ("positive", "negative")[: 1 if alone else 2]], ()
    elif any(getattr(type(guider), name, None) is not getattr(CFGGuider, name) for name in _PREPARING):
        yield list(conds.values()), ()  # all conditions: this guider may prepare `predict_noise` in its own way
    else:
        sigma = float(model.model_sampling.sigma_max) if sigma is None else sigma
        yield from _asked(guider, conds, model, shape, sigma, unguided_too) or [(list(conds.values()), ())]
    for name in ("sampler_pre_cfg_function", "sampler_post_cfg_function"):
        for n, function in enumerate(options.get(name) or ()):
            code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
            if _evaluates(code):
                yield [conds.get("positive")], (name, n)


def _asked(
    guider: Any, conds: Mapping[str, Any], model: Any, shape: Sequence[int], sigma: float, unguided_too: bool
) -> list[Call]:
    """Return the calls that a guider's own `predict_noise` makes; none if `predict_noise` fails on zeros."""
    calls = list[Call]()

    def noted(executor: Any, model: Any, conds: Sequence[Any], x: Tensor, timestep: Any, options: Any) -> list[Tensor]:
        calls.append((conds, patches_of(options["transformer_options"])))
        return [torch.zeros_like(x) for _ in conds]

    try:
        asked = copy(guider)
        for name, value in vars(guider).items():
            if type(value) in (dict, list, set):  # copied, because `predict_noise` may write into it
                setattr(asked, name, copy(value))
        options = {key: value for key, value in guider.model_options.items() if not key.startswith(_FOREIGN)}
        own = {"wrappers": {WrappersMP.CALC_COND_BATCH: {"toma": [noted]}}, "sample_sigmas": torch.tensor([sigma, 0.0])}
        options["transformer_options"] = {**options["transformer_options"], **own}
        options["disable_cfg1_optimization"] = unguided_too
        asked.conds, asked.inner_model, asked.model_options = dict(conds), model, options
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            asked.predict_noise(torch.zeros(tuple(shape)), torch.full((shape[0],), sigma), options, 0)
    except Exception as error:
        logging.debug("ToMA: what %s evaluates is unknown before sampling: %r", type(guider).__name__, error)
        return []
    return calls


def _evaluates(code: Any) -> bool:
    """Judge by the names in a function's code whether the function evaluates the model, as in perturbed guidance."""
    names = {"calc_cond_batch", "_calc_cond_batch", "sampling_function"}
    known = isinstance(code, CodeType)
    return known and (not names.isdisjoint(code.co_names) or any(map(_evaluates, code.co_consts)))
