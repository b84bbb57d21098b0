"""When to merge, how much, and when a plan has grown too old: plain numbers, no tensors, no state.

The clock is the noise level, not a count of calls: samplers of higher order evaluate the model several times a step, at
levels between the scheduled ones, and the same schedule must give the same answer every time. Whoever knows the step
tells it all the same: levels may come twice in a schedule, or lie too close together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from .config import PlanFrom, ToMAConfig

# From high noise to low: (noise level, ratio of every block at levels above it); the last holds for all below too.
Bands = tuple[tuple[float, Mapping[str, float]], ...]

# The selection of plans that are made once a run. Even: windows are where they are at the first.
LASTING = 1 << 40


@dataclass(frozen=True)
class Decision:
    """What to do in one model evaluation.

    step: 0-based sampling step. ratio: share of tokens to merge away; 0.0 means that this evaluation runs whole.
    selection, weighing: generation numbers; a plan made in another generation is too old for that part.
    keeps_detail: this evaluation runs whole too, but blocks keep what merging at `ratio` would lose.
    plain: merged without what was kept. ratios: of every block, where they differ; blocks that are not named run whole,
    and `ratio` is the largest. borders: blocks with which a chain begins, whatever the one before does.
    """

    step: int
    ratio: float
    selection: int
    weighing: int
    keeps_detail: bool = False
    plain: bool = False
    ratios: Mapping[str, float] | None = None
    borders: frozenset[str] = frozenset()

    def ratio_of(self, block: str) -> float:
        """The ratio of a block, by its name."""
        return self.ratio if self.ratios is None else self.ratios.get(block, 0.0)

    def of(self, block: str) -> Decision:
        """The decision for a block, by its name."""
        return self if self.ratios is None else replace(self, ratio=self.ratio_of(block))

    def joins(self, before: str, block: str) -> bool:
        """Whether tokens may stay merged from one block to the next."""
        same = self.ratios is None or self.ratios.get(before) == self.ratios.get(block)
        return same and block not in self.borders

    @property
    def in_use(self) -> frozenset[float]:
        """The ratios of this evaluation."""
        return frozenset((self.ratio,) if self.ratios is None else self.ratios.values())

    @property
    def merged_ratio(self) -> float:
        """The share of tokens that this evaluation really merges away."""
        return 0.0 if self.keeps_detail else self.ratio


@dataclass(frozen=True)
class Schedule:
    """The settings resolved for one run.

    sigmas: the noise levels at which steps begin, from high to low, or from low to high where a picture is noised
    (unsampling); empty if unknown, then every evaluation is step 0.
    sigma_start, sigma_end: merging is active at noise levels in (sigma_end, sigma_start].
    finishes: the last step ends with a picture free of noise, not with one that another run goes on from.
    goes_on: it begins where another model's run has ended, as videos have one for high noise and one for low.
    bands: ratios of blocks by noise level, in place of the setting's one for all; none for that.
    borders: see `Decision`.
    """

    config: ToMAConfig
    sigmas: tuple[float, ...] = ()
    sigma_start: float = float("inf")
    sigma_end: float = float("-inf")
    finishes: bool = False
    goes_on: bool = False
    bands: Bands = ()
    borders: frozenset[str] = frozenset()

    def step_at(self, sigma: float) -> int:
        """The step a noise level belongs to; levels between two steps belong to the earlier one."""
        # Samplers compute levels in fp32: dpmpp_2s_ancestral comes back to the next scheduled one through exp and log,
        # a few millionths off, while neighbours in a schedule are at least thousandths apart.
        if self.sigmas and self.sigmas[-1] > self.sigmas[0]:
            begun = sum(begin <= sigma * (1 + 1e-4) for begin in self.sigmas)
        else:
            begun = sum(begin >= sigma * (1 - 1e-4) for begin in self.sigmas)
        return max(0, begun - 1)

    def in_range(self, sigma: float) -> bool:
        """Whether merging may be active at this noise level."""
        return self.sigma_end < sigma <= self.sigma_start

    @cached_property
    def span(self) -> tuple[int, int]:
        """The first and last step of the active range, or (0, 0) if there is none."""
        steps = [step for step, sigma in enumerate(self.sigmas) if self.in_range(sigma)]
        return (steps[0], steps[-1]) if steps else (0, 0)

    @property
    def _last_of_two(self) -> bool:
        """Whether the last step is merged all the same: else nothing would be in half of a run of four steps, and
        where blocks look at all tokens it is nearer so than three steps are (docs/fidelity-trials.md)."""
        return self.goes_on and len(self.sigmas) == 2 and self.config.whole_every > 2 and self.config.all_keys

    @cached_property
    def kinds(self) -> tuple[Decision, ...]:
        """A decision for each ratio, and for even and odd selections, that its merged steps will have."""
        decisions = [d for step, sigma in enumerate(self.sigmas) if (d := self.decide(sigma, step)).ratio]
        each = [replace(d, ratio=ratio) for d in decisions for ratio in sorted(d.in_use) if ratio]
        return tuple({(d.ratio, d.selection % 2): d for d in each}.values())

    def ratios_at(self, sigma: float, step: int) -> Mapping[str, float] | None:
        """The ratio of every block at this step, None where the setting holds for all. Blocks keep their ratio from one
        whole step to the next, so that what the first kept serves all steps between."""
        if not self.bands:
            return None
        every = self.config.whole_every
        if self.sigmas:
            first = self.span[0]
            begun = step - (step - first) % every + 1 if every and step >= first else step
            sigma = self.sigmas[min(begun, len(self.sigmas) - 1)]
        return next((ratios for above, ratios in self.bands if sigma > above), self.bands[-1][1])

    def why_full(self) -> str:
        """The setting by which steps run in full, for the report; empty if none does."""
        setting = self._full_by_setting()
        if not self._full_by_profile():
            return setting
        return f"{setting}, profile" if setting else "profile"

    def _full_by_profile(self) -> bool:
        inside = [(sigma, step) for step, sigma in enumerate(self.sigmas) if self.in_range(sigma)]
        return bool(self.bands) and any(not any((self.ratios_at(*each) or {}).values()) for each in inside)

    def _full_by_setting(self) -> str:
        config = self.config
        if config.whole_every:
            return f"whole_every = {config.whole_every}"
        if config.end_percent < 1.0:
            return f"end_percent = {config.end_percent:g}"
        if config.start_percent > 0.0:
            return f"start_percent = {config.start_percent:g}"
        return "" if config.plan_from is PlanFrom.TOKENS else f"plan_from = {config.plan_from.value}"

    def decide(self, sigma: float, step: int | None = None) -> Decision:
        """What to do at this noise level. step: the one it belongs to, where that is known."""
        config, step = self.config, self.step_at(sigma) if step is None else step
        age = max(0, step - self.span[0])
        # Without a schedule no step is known. The first step decides the composition, and what the very last one leaves
        # behind, seams and blur, no later one can mend: both are whole.
        counted = bool(config.whole_every and self.sigmas)
        whole = counted and age % config.whole_every == 0
        final = counted and self.finishes and step == len(self.sigmas) - 1 and not self._last_of_two
        merges = self.in_range(sigma) and not final and (config.reuses_detail or not whole)
        ratios = self.ratios_at(sigma, step) if merges else None
        ratio = max(ratios.values(), default=0.0) if ratios is not None else config.ratio if merges else 0.0
        generations = age // config.select_every, age // config.weigh_every
        return Decision(step, ratio, *generations, whole and ratio > 0.0, ratios=ratios, borders=self.borders)
