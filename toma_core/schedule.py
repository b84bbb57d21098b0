"""When to merge, how much, and when a plan has grown too old: plain numbers, no tensors, no state.

The clock is the noise level, not a count of calls: samplers of higher order evaluate the model several times a step, at
levels between the scheduled ones, and the same schedule must give the same answer every time. Whoever knows the step
tells it all the same: levels may come twice in a schedule, or lie too close together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property

from .config import SimilarityFrom, ToMAConfig
from .reasons import Message, Reason

# From high noise to low: (noise level, ratio of every block at levels above it); the last holds for all below too.
RatioSchedule = tuple[tuple[float, Mapping[str, float]], ...]

# The selection of plans that are made once a run. Even: windows are where they are at the first.
LASTING = 1 << 40


class StepMode(Enum):
    """What one evaluation of the model does with its tokens and with the caches of the run."""

    FULL = "full"  # computes all tokens and caches nothing
    REFRESH = "refresh"  # computes all tokens and refreshes the residual and KV caches
    MERGED_CACHED = "merged cached"  # merges, and begins with what the caches hold
    MERGED = "merged"  # merges without caches

    @property
    def merges(self) -> bool:
        """Whether fewer tokens are computed."""
        return self in (StepMode.MERGED_CACHED, StepMode.MERGED)

    @property
    def caches(self) -> bool:
        """Whether blocks write to the caches or read from them."""
        return self in (StepMode.REFRESH, StepMode.MERGED_CACHED)


@dataclass(frozen=True)
class StepPlan:
    """What one evaluation of the model does. It is decided once for an evaluation and never changed.

    step: 0-based sampling step.
    mode: see `StepMode`.
    selection, weighing: generation numbers; a merge plan of another generation is too old for that part.
    ratio: share of tokens that merged steps merge away, the largest of all blocks; 0.0 if the mode is FULL.
    ratios: ratio by block where blocks differ; blocks without an entry are not merged.
    borders: blocks with which a chain begins whatever comes before them.
    """

    step: int
    mode: StepMode = StepMode.FULL
    ratio: float = 0.0
    selection: int = 0
    weighing: int = 0
    ratios: Mapping[str, float] | None = None
    borders: frozenset[str] = frozenset()

    def ratio_of(self, block: str) -> float:
        """Return the ratio of a block, by its name."""
        return self.ratio if self.ratios is None else self.ratios.get(block, 0.0)

    def of(self, block: str) -> StepPlan:
        """Return the plan for a block, by its name."""
        return self if self.ratios is None else replace(self, ratio=self.ratio_of(block))

    def with_mode(self, mode: StepMode) -> StepPlan:
        """Return the same plan in another mode."""
        if mode is StepMode.FULL:
            return replace(self, mode=mode, ratio=0.0, ratios=None)
        return self if mode is self.mode else replace(self, mode=mode)

    def joins(self, before: str, block: str) -> bool:
        """Return whether tokens may stay merged from one block to the next."""
        same = self.ratios is None or self.ratios.get(before) == self.ratios.get(block)
        return same and block not in self.borders

    @property
    def in_use(self) -> frozenset[float]:
        """The ratios of this evaluation."""
        return frozenset((self.ratio,) if self.ratios is None else self.ratios.values())

    @property
    def merged_ratio(self) -> float:
        """The share of tokens that this evaluation merges away."""
        return self.ratio if self.mode.merges else 0.0


@dataclass(frozen=True)
class Schedule:
    """The settings resolved for one run.

    sigmas: the noise levels at which steps begin, from high to low, or from low to high where a picture is noised
    (unsampling); empty if unknown, then every evaluation is step 0.
    sigma_start, sigma_end: merging is active at noise levels in (sigma_end, sigma_start].
    finishes: the last step ends with a picture free of noise, not with one that another run goes on from.
    goes_on: it begins where another model's run has ended, as videos have one for high noise and one for low.
    bands: ratios of blocks by noise level, in place of the setting's one for all; none for that.
    borders: see `StepPlan`.
    """

    config: ToMAConfig
    sigmas: tuple[float, ...] = ()
    sigma_start: float = float("inf")
    sigma_end: float = float("-inf")
    finishes: bool = False
    goes_on: bool = False
    ratio_schedule: RatioSchedule = ()
    borders: frozenset[str] = frozenset()

    def step_at(self, sigma: float) -> int:
        """Return the step that a noise level belongs to; levels between two steps belong to the earlier one."""
        return step_at(self.sigmas, sigma)

    def in_range(self, sigma: float) -> bool:
        """Whether merging may be active at this noise level."""
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
    def _last_of_two(self) -> bool:
        """Whether the last step is merged all the same: else nothing would be in half of a run of four steps, and
        where blocks look at all tokens it is nearer so than three steps are (benchmarks/results/fidelity/trials.md)."""
        return self.goes_on and len(self.sigmas) == 2 and self.config.full_step_interval > 2 and self.config.kv_cache

    @cached_property
    def kinds(self) -> tuple[StepPlan, ...]:
        """A step plan for each ratio, and for even and odd selections, that merged steps of this run will have."""
        plans = [plan for step, sigma in enumerate(self.sigmas) if (plan := self.decide(sigma, step)).ratio]
        each = [replace(plan, ratio=ratio) for plan in plans for ratio in sorted(plan.in_use) if ratio]
        return tuple({(plan.ratio, plan.selection % 2): plan for plan in each}.values())

    def ratios_at(self, sigma: float, step: int) -> Mapping[str, float] | None:
        """The ratio of every block at this step, None where the setting holds for all. Blocks keep their ratio from one
        whole step to the next, so that what the first kept serves all steps between."""
        if not self.ratio_schedule:
            return None
        every = self.config.full_step_interval
        if self.sigmas:
            first = self.span[0]
            begun = step - (step - first) % every + 1 if every and step >= first else step
            sigma = self.sigmas[min(begun, len(self.sigmas) - 1)]
        return next((ratios for above, ratios in self.ratio_schedule if sigma > above), self.ratio_schedule[-1][1])

    def why_full(self) -> tuple[Message, ...]:
        """Why steps are full steps, for the report."""
        if self._too_few_steps():
            return (Reason.TOO_FEW_STEPS(),)
        return (*self._full_by_setting(), *([Reason.PROFILE()] if self._full_by_profile() else []))

    def _too_few_steps(self) -> bool:
        """Whether a run of one or two steps has no step between its full ones."""
        config = self.config
        whole_range = config.start_percent <= 0.0 and config.end_percent >= 1.0
        prediction = config.similarity_from is SimilarityFrom.PREDICTION
        if (
            not (config.ratio and whole_range and self.sigmas and (config.full_step_interval or prediction))
            or self.ratio_schedule
        ):
            return False
        decisions = [self.decide(sigma, step) for step, sigma in enumerate(self.sigmas)]
        return not any(decision.merged_ratio and (decision.step or not prediction) for decision in decisions)

    def _full_by_profile(self) -> bool:
        inside = [(sigma, step) for step, sigma in enumerate(self.sigmas) if self.in_range(sigma)]
        return bool(self.ratio_schedule) and any(not any((self.ratios_at(*each) or {}).values()) for each in inside)

    def _full_by_setting(self) -> list[Message]:
        config = self.config
        if config.full_step_interval:
            return [Reason.SETTING(setting="full_step_interval", value=config.full_step_interval)]
        if config.end_percent < 1.0:
            return [Reason.SETTING(setting="end_percent", value=config.end_percent)]
        if config.start_percent > 0.0:
            return [Reason.SETTING(setting="start_percent", value=config.start_percent)]
        if config.similarity_from is SimilarityFrom.TOKENS:
            return []
        return [Reason.SETTING(setting="similarity_from", value=config.similarity_from.value)]

    def decide(self, sigma: float, step: int | None = None) -> StepPlan:
        """Return what the settings say about an evaluation. `decide` (decision.py) adds what the run knows.

        sigma: its noise level. step: the step it belongs to, where that is known.
        """
        config, step = self.config, self.step_at(sigma) if step is None else step
        age = max(0, step - self.span[0])
        # Without a schedule no step is known. The first step decides the composition, and what the last one leaves
        # behind, seams and blur, no later one can mend: both are full.
        counted = bool(config.full_step_interval and self.sigmas)
        full = counted and age % config.full_step_interval == 0
        final = counted and self.finishes and step == len(self.sigmas) - 1 and not self._last_of_two
        generations = age // config.selection_interval, age // config.weight_interval
        plan = StepPlan(step, StepMode.FULL, 0.0, *generations, borders=self.borders)
        if not self.in_range(sigma) or final or (full and not config.uses_cache):
            return plan
        ratios = self.ratios_at(sigma, step)
        ratio = config.ratio if ratios is None else max(ratios.values(), default=0.0)
        if not ratio:
            return plan
        merged = StepMode.MERGED_CACHED if config.uses_cache else StepMode.MERGED
        mode = StepMode.REFRESH if full else merged
        return replace(plan, mode=mode, ratio=ratio, ratios=ratios)


def step_at(sigmas: Sequence[float], sigma: float) -> int:
    """Return the step that a noise level belongs to in a schedule; levels between two steps belong to the earlier."""
    # Samplers compute levels in fp32: dpmpp_2s_ancestral comes back to the next scheduled one through exp and log,
    # a few millionths off, while neighbours in a schedule are at least thousandths apart.
    if sigmas and sigmas[-1] > sigmas[0]:
        begun = sum(begin <= sigma * (1 + 1e-4) for begin in sigmas)
    else:
        begun = sum(begin >= sigma * (1 - 1e-4) for begin in sigmas)
    return max(0, begun - 1)
