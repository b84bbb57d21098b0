"""Find the noise level of an evaluation as a Python number.

Samplers hold the noise level in a tensor. Reading a tensor makes the host wait for the device. Without waiting, the
host launches kernels a step ahead of the device. So noise levels are taken from the schedule if the sampler is known to
evaluate once a step, at the sigmas of the schedule. For all other samplers, noise levels are read from the tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from types import FunctionType
from typing import Any, NamedTuple

from comfy.k_diffusion import sampling as k_diffusion
from comfy.patcher_extension import WrappersMP
from comfy.samplers import KSAMPLER, CFGGuider
from torch import Tensor
from torch.utils import _contextlib

from ...toma_core.schedule import step_at
from .compat import with_argument

# Samplers of `ONCE_A_STEP` that draw new noise. Runs with a KV cache measure this noise in each step. Measuring delays
# nothing: these samplers wait for the device in each step anyway, to test whether it is the last step.
_DRAWS_NOISE = (
    *("euler_ancestral", "euler_ancestral_cfg_pp", "lcm", "ddpm", "er_sde", "sa_solver", "res_multistep_ancestral"),
    *("res_multistep_ancestral_cfg_pp", "dpmpp_2m_sde", "dpmpp_2m_sde_gpu", "dpmpp_2m_sde_heun"),
    *("dpmpp_2m_sde_heun_gpu", "dpmpp_3m_sde", "dpmpp_3m_sde_gpu"),
)
# ComfyUI's samplers that evaluate once a step, at the sigmas of the schedule; test_sigmas.py checks them.
ONCE_A_STEP = (
    *_DRAWS_NOISE,
    *("euler", "euler_cfg_pp", "lms", "ipndm", "ipndm_v", "deis", "dpmpp_2m", "dpmpp_2m_cfg_pp", "res_multistep"),
    *("res_multistep_cfg_pp", "gradient_estimation", "gradient_estimation_cfg_pp"),
)
# Samplers that amplify the errors of merging. With them, the error of merging is two to seventeen times that with
# Euler's method (benchmarks/results/fidelity/tables.md), so runs with a KV cache merge no step with these samplers.
_ENLARGES = (
    *("lms", "ipndm_v", "res_multistep_ancestral", "res_multistep_ancestral_cfg_pp", "res_multistep_cfg_pp"),
    *("dpmpp_2m_cfg_pp", "dpmpp_2s_ancestral_cfg_pp", "gradient_estimation_cfg_pp"),
)
# Options that may have any value: they change neither how often nor at which sigmas a sampler evaluates. All other
# options must have their default.
_PASSIVE = {
    *("eta", "s_noise", "s_noise_end", "noise_sampler", "noise_scaler", "noise_clip_std", "solver_type", "order"),
    *("max_order", "deis_mode", "ge_gamma", "cfg_pp", "max_stage", "tau_func", "predictor_order", "corrector_order"),
    "simple_order_2",
}


class SigmaStep(NamedTuple):
    """The position of a sampler in its schedule when it evaluates the model."""

    sigma: float  # the sampler's noise level
    step: int | None  # 0-based, None without a schedule
    model_sigma: float  # the noise level that the model gets; nodes such as Detail Daemon change it
    unreported: int = 0  # how often the noise level has changed while the sampler reported no steps


class SigmaTracker:
    """Track the noise levels and steps of one run. If a sampler is known to evaluate once a step, the step comes from
    the order of evaluations. Otherwise the step comes from the sampler's reports to its callback or, without reports,
    from the noise levels passed to the model. Steps never go backwards."""

    def __init__(self, sigmas: Sequence[float] = (), sampler: Any = None, guider: Any = None) -> None:
        """sigmas: the schedule, and the noise level at which it ends. sampler, guider: ComfyUI's objects."""
        self._sigmas = tuple(sigmas[:-1])
        self._name = _name_of(sampler)
        self._keeps = _keeps_to_schedule(sampler) and _is_counted(guider)
        self.enlarges = enlarges(sampler)
        self.evaluation = -1  # index of the evaluation in progress, from 0
        self._given: Tensor | None = None
        self._at: SigmaStep | None = None
        self._last_given: float | None = None  # noise level of the model in the previous evaluation
        self._step = self._unreported = 0
        self._repeated = 0  # evaluations at the noise level of the previous evaluation
        self._kept = True  # whether all noise levels so far are in the schedule
        self._reported = -1  # the last step that was reported; -1 before the first report
        # Whether another pack wraps a sampler that evaluates once a step; such packs change only the model's sigmas.
        self._wraps = list(map(_keeps_to_schedule, _wrapped_by(sampler))) == [True]
        # Counts of evaluations since the last report, and between the last two reports.
        self._since, self._each = 0, int(self._wraps)
        self._reports = bool(self._sigmas)

    def measures_noise(self, kv_cache: bool) -> bool:
        """Return whether the new noise of each step has to be measured. kv_cache: whether the run has a KV cache."""
        return not self._keeps or (kv_cache and self._name in _DRAWS_NOISE)

    def next(self, timestep: Tensor) -> None:
        self.evaluation += 1
        self._since += 1
        self._given, self._at = timestep, None

    def listening(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of OUTER_SAMPLE with a callback that also calls `reported`."""
        callback = args[5] if len(args) > 5 else kwargs.get("callback")

        def reported(step: int, *rest: Any, **named: Any) -> Any:
            self.reported(step)
            return None if callback is None else callback(step, *rest, **named)

        return with_argument(args, kwargs, 5, "callback", reported)

    def reported(self, step: int) -> None:
        """Record a step that the sampler reports, as samplers do after a step's first evaluation."""
        if step != self._reported + 1 or not self._since:
            self._reports = False  # do not rely on reports that skip or repeat steps, as of samplers that run in rounds
        elif self._reported >= 0 or self._since > 1:
            self._each = self._since
        self._reported, self._since = step, 0

    def of(self, timestep: Tensor) -> SigmaStep:
        """Return the position of the sampler in its schedule. timestep: noise level of the model call, (B,). Some
        guidance passes another tensor than the sampler's own: then the value is read from it."""
        mine = timestep is self._given
        if mine and self._keeps and self.evaluation < len(self._sigmas):
            sigma = self._sigmas[self.evaluation]
            return SigmaStep(sigma, self.evaluation, sigma)
        if mine and self._at is not None:
            return self._at
        given = float(timestep.detach().flatten()[0])
        if self.evaluation < 0 or self._keeps or not self._sigmas:
            return SigmaStep(given, None, given)
        if not mine and self._at is not None:
            return self._at._replace(model_sigma=given)
        self._repeated += given == self._last_given
        self._step = max(self._step, self._step_of(given))
        by_sigma = not self._reports or (self._reported < 0 and self._since > 1)
        # Keep sigma between the noise levels of its step and the next: another node may have changed the model's level.
        ends = (*self._sigmas, 0.0)[self._step : self._step + 2]
        sigma = min(max(given, min(ends)), max(ends))
        self._unreported += by_sigma and given != self._last_given
        self._at, self._last_given = SigmaStep(sigma, self._step, given, self._unreported), given
        return self._at

    def _step_of(self, given: float) -> int:
        """Return the step of the evaluation that begins at this noise level of the model."""
        by_sigma = step_at(self._sigmas, given)
        if self._reported < 0 and self._reports:
            if self._wraps:
                return min(self.evaluation, len(self._sigmas) - 1)
            # If a noise level is not in the schedule, another node has changed it. A low level then need not mean a
            # late step, so the count of evaluations limits the step. Samplers that skip steps use scheduled levels.
            self._kept &= any(abs(sigma - given) <= 1e-3 * sigma for sigma in self._sigmas)
            if not self._kept:
                by_sigma = min(by_sigma, self.evaluation - self._repeated)
        if not self._reports or self._since > max(3, self._each + 1):
            return by_sigma
        if self._reported < 0:
            return 0 if self._since == 1 else by_sigma  # the first evaluation belongs to the first step
        following = min(self._reported + 1, len(self._sigmas) - 1)
        if self._each and self._since >= self._each:
            # Corrector samplers evaluate again for the step that they have just reported.
            again = self._since == 1 and given == self._last_given and not self._wraps
            corrects = again and self._sigmas[following] != self._sigmas[following - 1]
            return min(self._reported, following) if corrects else following
        return min(max(by_sigma, self._reported), following)


def enlarges(sampler: Any) -> bool:
    """Whether a sampler, or a sampler that it wraps, enlarges errors of the model's predictions."""
    name = _name_of(sampler)
    guided = bool((getattr(sampler, "extra_options", None) or {}).get("cfg_pp")) and f"{name}_cfg_pp" in _ENLARGES
    return name in _ENLARGES or guided or any(map(enlarges, _wrapped_by(sampler)))


def _name_of(sampler: Any) -> str:
    """Return the name of a sampler's function after "sample_"; "" if the name begins in another way."""
    before, _, name = str(getattr(getattr(sampler, "sampler_function", None), "__name__", "")).partition("sample_")
    return "" if before else name


def _wrapped_by(sampler: Any) -> list[Any]:
    """Return the samplers that another pack's sampler wraps."""
    options = getattr(sampler, "extra_options", None) or {}
    return [value for value in options.values() if isinstance(value, KSAMPLER)]


def _keeps_to_schedule(sampler: Any) -> bool:
    """Whether a sampler is an unchanged one of ComfyUI that evaluates once a step, at the sigmas of its schedule."""
    if type(sampler) is not KSAMPLER:
        return False
    function, options, name = sampler.sampler_function, sampler.extra_options or {}, _name_of(sampler)
    if name not in ONCE_A_STEP or vars(k_diffusion).get(f"sample_{name}") is not function or not _is_comfyuis(function):
        return False
    known = signature(function).parameters
    return all(o in _PASSIVE or (o in known and _equal(value, known[o].default)) for o, value in options.items())


def _equal(a: Any, b: Any) -> bool:
    return a is b or (isinstance(a, (int, float, str)) and a == b)


def _is_comfyuis(function: Any) -> bool:
    files = {k_diffusion.__file__, _contextlib.__file__}  # the second one, because `torch.no_grad` wraps the samplers
    while isinstance(function, FunctionType) and function.__code__.co_filename in files:
        if not hasattr(function, "__wrapped__"):
            return function.__code__.co_filename == k_diffusion.__file__
        function = function.__wrapped__
    return False


def _is_counted(guider: Any) -> bool:
    """Whether every evaluation of the sampler passes through this pack's wrapper before all other wrappers."""
    names = "__call__", "outer_predict_noise"
    usual = isinstance(guider, CFGGuider) and all(getattr(type(guider), n) is getattr(CFGGuider, n) for n in names)
    return usual and not guider.model_options["transformer_options"].get("wrappers", {}).get(WrappersMP.SAMPLER_SAMPLE)
