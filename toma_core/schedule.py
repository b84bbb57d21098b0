"""Decide when to merge, how much, and when a plan is too old. The decisions depend on numbers alone, not on tensors or
state.

The step of an evaluation is derived from its sigma, because samplers of higher order evaluate the model several times a
step, at sigmas between scheduled ones. Callers that know the step pass the step, because two steps may share a sigma.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property

from .config import ToMAConfig
from .reasons import Message, Reason

# From high noise to low: (sigma, ratio of each block at noise levels above this sigma). The last ratios also apply at
# lower noise levels.
RatioSchedule = tuple[tuple[float, Mapping[str, float]], ...]

# A run "begins flat" if it has at most _FLAT_STEPS steps, and if its first two steps together lower sigma by less than
# _FLAT_SHARE times the first sigma.
_FLAT_STEPS, _FLAT_SHARE = 8, 0.015

# Runs with more steps than this are long. Their second step is full too, because it may still change the composition.
# In shorter runs a full second step costs more time than it is worth (benchmarks/results/fidelity/trials.md).
_SHORT = 12

# Generation of plans that are made once in a run. It is even, because odd generations have shifted windows.
LASTING = 1 << 40


class StepMode(Enum):
    """The mode of one evaluation of the model: how it treats its tokens and the caches of the run."""

    FULL = "full"  # computes all tokens and caches nothing
    REFRESH = "refresh"  # computes all tokens and refreshes the residual and KV caches
    MERGED_CACHED = "merged cached"  # merges, and uses the caches
    MERGED = "merged"  # merges without caches

    @property
    def merges(self) -> bool:
        """Whether blocks compute only destinations."""
        return self in (StepMode.MERGED_CACHED, StepMode.MERGED)

    @property
    def caches(self) -> bool:
        """Whether blocks write to the caches or read from them."""
        return self in (StepMode.REFRESH, StepMode.MERGED_CACHED)


@dataclass(frozen=True)
class StepPlan:
    """The plan of one evaluation of the model, decided once."""

    step: int  # sampling step, from 0
    mode: StepMode = StepMode.FULL
    ratio: float = 0.0  # share of tokens merged away in merged steps, the largest of all blocks; 0.0 if FULL
    selection: int = 0  # generation of destinations; a plan of another generation is too old
    weighing: int = 0  # generation of weights; weights of another generation are too old
    ratios: Mapping[str, float] | None = None  # by block, if they differ; blocks that are not listed are not merged

    def of(self, block: str) -> StepPlan:
        return self if self.ratios is None else replace(self, ratio=self.ratios.get(block, 0.0))

    def with_mode(self, mode: StepMode) -> StepPlan:
        full = mode is StepMode.FULL
        return replace(self, mode=mode, ratio=0.0, ratios=None) if full else replace(self, mode=mode)

    def joins(self, before: str, block: str) -> bool:
        """Return whether tokens may stay merged from the block `before` to the next block, `block`."""
        return self.ratios is None or self.ratios.get(before) == self.ratios.get(block)

    @property
    def in_use(self) -> frozenset[float]:
        return frozenset((self.ratio,) if self.ratios is None else self.ratios.values())

    @property
    def merged_ratio(self) -> float:
        """The share of tokens that this evaluation merges away."""
        return self.ratio if self.mode.merges else 0.0


@dataclass(frozen=True)
class Schedule:
    """The settings of a run, and which steps they make full or merged."""

    config: ToMAConfig
    # Sigma at which each step begins; sigmas rise in unsampling. Empty if unknown: all evaluations are then in step 0.
    sigmas: tuple[float, ...] = ()
    sigma_start: float = float("inf")  # merging is active at sigmas in (sigma_end, sigma_start]
    sigma_end: float = float("-inf")
    finishes: bool = False  # the last step ends with a picture free of noise, not with a latent for another run
    continues_run: bool = False  # the run begins where another model's run ended: some video models come as two models
    ratio_schedule: RatioSchedule = ()  # ratios of blocks by sigma; empty: all blocks have the setting's ratio

    def in_range(self, sigma: float) -> bool:
        return self.sigma_end < sigma <= self.sigma_start

    @property
    def rises(self) -> bool:
        """Whether the run adds noise (unsampling)."""
        return bool(self.sigmas) and self.sigmas[-1] > self.sigmas[0]

    @cached_property
    def span(self) -> tuple[int, int]:
        """The first and last step of the active range, or (0, 0) if there is none."""
        steps = [step for step, sigma in enumerate(self.sigmas) if self.in_range(sigma)]
        return (steps[0], steps[-1]) if steps else (0, 0)

    @property
    def is_long(self) -> bool:
        """Whether the run has more steps than distilled models need."""
        return len(self.sigmas) > _SHORT

    @cached_property
    def begins_flat(self) -> bool:
        """Whether a short run begins with steps that hardly lower the noise level, as runs of distilled LTX models do.
        Caches stay valid throughout these steps, and full steps lower the error most at the end of the run
        (benchmarks/results/fidelity/trials.md)."""
        sigmas = self.sigmas
        if not (self.finishes and self.config.uses_cache and 2 < len(sigmas) <= _FLAT_STEPS) or self.ratio_schedule:
            return False
        return self.span == (0, len(sigmas) - 1) and 0 <= sigmas[0] - sigmas[2] < _FLAT_SHARE * sigmas[0]

    @property
    def cache_steps(self) -> int:
        """The number of steps for which cached entries may be used after a refresh."""
        return len(self.sigmas) if self.begins_flat else self.config.full_step_interval

    def predicted_share(self, step: int) -> float:
        """Return which share of the latent at the end of this step comes from predictions, if the sampler is Euler."""
        following = (*self.sigmas, 0.0)[min(step + 1, len(self.sigmas))]
        return 1 - following / self.sigmas[0] if self.sigmas and following <= self.sigmas[0] else 1.0

    def _since_full(self, step: int) -> int:
        """Return the number of steps since the last step that `full_step_interval` makes full."""
        first = self.span[0]
        if step > first == 0 and self.is_long and not self.continues_run:
            first = 1
        return max(0, step - first) % self.config.full_step_interval

    def _is_full(self, step: int) -> bool:
        """Return whether `full_step_interval` makes a step full. If a run begins flat, its first step is full, and all
        other full steps are at its end."""
        every, last = self.config.full_step_interval, len(self.sigmas) - 1
        if not self.begins_flat:
            return self._since_full(step) == 0
        return step == 0 or step >= last - len(range(every, last, every))

    @cached_property
    def kinds(self) -> tuple[StepPlan, ...]:
        """Step plans of this run, one for each ratio and parity of `selection` (odd selections shift windows)."""
        plans = [plan for step, sigma in enumerate(self.sigmas) if (plan := self.decide(sigma, step)).ratio]
        each = [replace(plan, ratio=ratio) for plan in plans for ratio in sorted(plan.in_use) if ratio]
        return tuple({(plan.ratio, plan.selection % 2): plan for plan in each}.values())

    def ratios_at(self, sigma: float, step: int) -> Mapping[str, float] | None:
        """Return the ratio of every block at this step; None if all blocks have the ratio of the settings. Ratios are
        constant from one full step to the next, because the cached chains depend on them."""
        if not self.ratio_schedule:
            return None
        every = self.config.full_step_interval
        if self.sigmas:
            begun = step - self._since_full(step) + 1 if every and step >= self.span[0] else step
            sigma = self.sigmas[min(begun, len(self.sigmas) - 1)]
        return next((ratios for above, ratios in self.ratio_schedule if sigma > above), self.ratio_schedule[-1][1])

    def why_full(self) -> tuple[Message, ...]:
        """Return the reasons, for the report, why steps are full."""
        config = self.config
        limits = "full_step_interval", "start_percent", "end_percent"
        named = [name for name in limits if getattr(config, name) != getattr(ToMAConfig, name)]
        found = [Reason.SETTING(setting=name, value=getattr(config, name)) for name in named]
        steps = list(enumerate(self.sigmas))
        if self.ratio_schedule:
            inside = [self.ratios_at(sigma, step) or {} for step, sigma in steps if self.in_range(sigma)]
            return (*found, Reason.PROFILE()) if any(not any(each.values()) for each in inside) else tuple(found)
        merges = any(self.decide(sigma, step).merged_ratio for step, sigma in steps)
        too_few = config.ratio and steps and found and not {"start_percent", "end_percent"} & {*named}
        return (Reason.TOO_FEW_STEPS(),) if too_few and not merges else tuple(found)

    def decide(self, sigma: float, step: int | None = None) -> StepPlan:
        """Return the plan of an evaluation by the settings; `decision.decide` adjusts it to the run. step: index of the
        sampling step, if known."""
        config, step = self.config, step_at(self.sigmas, sigma) if step is None else step
        age = max(0, step - self.span[0])
        # The first step is full because it decides the composition, the last because no later step can repair seams.
        steps = len(self.sigmas)
        counted = bool(config.full_step_interval and steps)
        full = counted and self._is_full(step)
        # If two models sample two steps each, with a KV cache, the second model also merges its last step: otherwise it
        # would merge none. The four steps of both models have less error than three unmerged steps
        # (benchmarks/results/fidelity/trials.md).
        half = self.continues_run and steps == 2 and config.full_step_interval > 2 and bool(config.kv_cache)
        final = counted and self.finishes and step == steps - 1 and not half
        generations = age // config.selection_interval, age // config.weight_interval
        ratios = self.ratios_at(sigma, step)
        ratio = config.ratio if ratios is None else max(ratios.values(), default=0.0)
        if not ratio or not self.in_range(sigma) or final or (full and not config.uses_cache):
            return StepPlan(step, StepMode.FULL, 0.0, *generations)
        merged = StepMode.MERGED_CACHED if config.uses_cache else StepMode.MERGED
        return StepPlan(step, StepMode.REFRESH if full else merged, ratio, *generations, ratios)


def step_at(sigmas: Sequence[float], sigma: float) -> int:
    """Return the step of a sigma in a schedule; sigmas between two steps belong to the earlier step."""
    # Compare with a tolerance, because dpmpp_2s_ancestral computes scheduled sigmas by exp and log in fp32.
    if sigmas and sigmas[-1] > sigmas[0]:
        begun = sum(begin <= sigma * (1 + 1e-4) for begin in sigmas)
    else:
        begun = sum(begin >= sigma * (1 - 1e-4) for begin in sigmas)
    return max(0, begun - 1)
