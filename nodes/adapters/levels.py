"""The noise level of an evaluation as a number of Python.

Samplers hold it in a tensor, and to read that is to wait until the device has done all the work before it. A host that
never waits is a step ahead and launches for free. So the levels of a sampler that is known to evaluate the model once a
step, at the levels of its schedule, are taken from the schedule; all others are read.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from inspect import signature
from types import FunctionType
from typing import Any

import torch
from comfy.k_diffusion import sampling as k_diffusion
from comfy.patcher_extension import WrappersMP
from comfy.samplers import KSAMPLER, CFGGuider
from torch import Tensor
from torch.utils import _contextlib

# Of ComfyUI's samplers, held by tests/nodes/adapters/test_levels.py.
ONCE_A_STEP = (
    *("sample_euler", "sample_euler_cfg_pp", "sample_euler_ancestral", "sample_euler_ancestral_cfg_pp"),
    *("sample_lms", "sample_ddpm", "sample_lcm", "sample_ipndm", "sample_ipndm_v", "sample_deis"),
    *("sample_dpmpp_2m", "sample_dpmpp_2m_cfg_pp", "sample_dpmpp_2m_sde", "sample_dpmpp_2m_sde_gpu"),
    *("sample_dpmpp_2m_sde_heun", "sample_dpmpp_2m_sde_heun_gpu", "sample_dpmpp_3m_sde", "sample_dpmpp_3m_sde_gpu"),
    *("sample_res_multistep", "sample_res_multistep_cfg_pp", "sample_res_multistep_ancestral"),
    *("sample_res_multistep_ancestral_cfg_pp", "sample_gradient_estimation", "sample_gradient_estimation_cfg_pp"),
    *("sample_er_sde", "sample_sa_solver"),
)
# Options that change what a step does, not how often or where it evaluates. Of all others only the default is known.
_HARMLESS = {
    *("eta", "s_noise", "s_noise_end", "noise_sampler", "noise_scaler", "noise_clip_std", "solver_type", "order"),
    *("max_order", "deis_mode", "ge_gamma", "cfg_pp", "max_stage", "tau_func", "predictor_order", "corrector_order"),
    "simple_order_2",
}


class Levels:
    """The levels of one run. `next` is called once before each of the sampler's evaluations."""

    def __init__(self, sigmas: Sequence[float] = (), sampler: Any = None, guider: Any = None) -> None:
        """sigmas: the schedule, the last of which is where it ends. sampler, guider: ComfyUI's objects."""
        self._scheduled = tuple(sigmas[:-1]) if _keeps_to_schedule(sampler) and _is_counted(guider) else ()
        self._sampler = sampler
        self._evaluation = -1
        self._given: Tensor | None = None
        self._taken: dict[int, Tensor] = {}

    def next(self, timestep: Tensor) -> None:
        """The sampler evaluates the model anew, at this level."""
        self._evaluation += 1
        self._given = timestep

    def of(self, timestep: Tensor) -> tuple[float, int | None]:
        """The level at which the model is evaluated, and its place in the schedule where that is known. timestep: (B,),
        what the model is told. Guidance may ask at a level of its own: that is another tensor, and is read."""
        if timestep is not self._given or not 0 <= self._evaluation < len(self._scheduled):
            return float(timestep.detach().flatten()[0]), None
        self._taken[self._evaluation] = timestep.detach().flatten()[:1]
        return self._scheduled[self._evaluation], self._evaluation

    def check(self) -> None:
        """At the end of a run, when there is nothing left to wait for: were the levels those of the schedule?"""
        if not self._taken:
            return
        scheduled = torch.tensor([self._scheduled[n] for n in self._taken])
        told = torch.cat(list(self._taken.values())).float().cpu()
        if not torch.allclose(told, scheduled, rtol=1e-3):  # the stochastic ones begin a little below pure noise
            # Only said: what is done must not depend on what ran before.
            logging.warning(
                "ToMA: the sampler %s left its schedule, which it was not known to do: some steps were merged by the "
                "settings of their neighbours. Please report it.",
                self._sampler.sampler_function.__name__.removeprefix("sample_"),
            )


def _keeps_to_schedule(sampler: Any) -> bool:
    """Whether a sampler evaluates once a step, at the levels of its schedule: one of ComfyUI's own, as ComfyUI has it,
    with options that do not change that."""
    if type(sampler) is not KSAMPLER:
        return False
    function, options = sampler.sampler_function, sampler.extra_options or {}
    name = getattr(function, "__name__", "")
    if name not in ONCE_A_STEP or vars(k_diffusion).get(name) is not function or not _is_theirs(function):
        return False
    known = signature(function).parameters
    return all(o in _HARMLESS or (o in known and _equal(value, known[o].default)) for o, value in options.items())


def _equal(a: Any, b: Any) -> bool:
    return a is b or (isinstance(a, (int, float, str)) and a == b)


def _is_theirs(function: Any) -> bool:
    """Whether a function of k_diffusion is the one that ComfyUI wrote, not one that somebody has put in its place."""
    files = {k_diffusion.__file__, _contextlib.__file__}  # `torch.no_grad` wraps in a function of its own
    while isinstance(function, FunctionType) and function.__code__.co_filename in files:
        if not hasattr(function, "__wrapped__"):
            return function.__code__.co_filename == k_diffusion.__file__
        function = function.__wrapped__
    return False


def _is_counted(guider: Any) -> bool:
    """Whether every evaluation of the sampler comes by our wrapper, which is the first one."""
    names = "__call__", "outer_predict_noise"
    if not isinstance(guider, CFGGuider) or any(getattr(type(guider), n) is not getattr(CFGGuider, n) for n in names):
        return False
    return not guider.model_options["transformer_options"].get("wrappers", {}).get(WrappersMP.SAMPLER_SAMPLE)
