"""The noise level of an evaluation as a number of Python.

Samplers hold it in a tensor, and to read that is to wait until the device has done all the work before it. A host that
never waits is a step ahead and launches for free. So the levels of a sampler that evaluates the model once a step, at
the levels of its schedule, are taken from the schedule; other samplers' are read.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from comfy.k_diffusion import sampling as k_diffusion
from torch import Tensor

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
# Options with which a sampler leaves its schedule.
_CHURN = ("s_churn",)

# Samplers found at other levels than those of their schedule: read from then on.
_strayed: set[str] = set()


class Levels:
    """The levels of one run. `next` is called once before each of the sampler's evaluations."""

    def __init__(self, sigmas: Sequence[float] = (), sampler: Any = None) -> None:
        """sigmas: the schedule, the last of which is where it ends. sampler: ComfyUI's sampler object."""
        self.sampler = _name(sampler)
        self._scheduled = tuple(sigmas[:-1]) if self.sampler and self.sampler not in _strayed else ()
        self._evaluation = -1
        self._taken: dict[int, Tensor] = {}

    def next(self) -> None:
        """The sampler evaluates the model anew."""
        self._evaluation += 1

    def of(self, timestep: Tensor) -> float:
        """The level of this evaluation. timestep: (B,), what the model is told."""
        if not 0 <= self._evaluation < len(self._scheduled):
            return float(timestep.flatten()[0])
        self._taken[self._evaluation] = timestep.flatten()[:1]
        return self._scheduled[self._evaluation]

    def check(self) -> None:
        """At the end of a run, when there is nothing left to wait for: were the levels those of the schedule?"""
        if not self._taken:
            return
        scheduled = torch.tensor([self._scheduled[n] for n in self._taken])
        told = torch.cat(list(self._taken.values())).float().cpu()
        if not torch.allclose(told, scheduled, rtol=1e-3):  # the stochastic ones begin a little below pure noise
            _strayed.add(self.sampler)
            logging.warning(
                "ToMA: the sampler %s left its schedule: some steps were merged by the settings of their neighbours. "
                "From now on its noise levels are read.",
                self.sampler.removeprefix("sample_"),
            )


def _name(sampler: Any) -> str:
    """The name of a sampler that evaluates once a step at the levels of its schedule, else an empty string."""
    function, options = getattr(sampler, "sampler_function", None), getattr(sampler, "extra_options", None) or {}
    name = getattr(function, "__name__", "")
    known = name in ONCE_A_STEP and getattr(k_diffusion, name, None) is function
    return name if known and not any(options.get(option) for option in _CHURN) else ""
