"""Measure while a model samples whole what merging would change: one site at a time, at a few noise levels.

Every merged step of the run to come is evaluated whole, and the run goes on from that. At one step of each band of
noise levels the same evaluation is done again with one site merged, and again with all of them: by the pack's own
hooks, plans and kept detail, told by nothing but a schedule with other ratios. What is compared is the clean picture of
the first condition. Beside the detail that the settings keep anyhow nothing is held but two pictures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP
from torch import Tensor

from ...toma_core import Schedule, StepMode, StepPlan
from ...toma_core.calibration import Site
from ...toma_core.config import SimilarityFrom
from ...toma_core.profile import place_of
from .compat import argument
from .family import BlockFacts
from .model_hooks import SAMPLING
from .sampling_run import SamplingRun, takes_part

_KEY = "toma_probes"
# What single sites are measured at, and what else all of them are.
RATIO = 0.5
OTHERS = (0.75, 0.25)
_MOST_BANDS = 3
# Of these, from high noise on, every site is measured by itself in any case.
_MEASURED = 2
# Evaluations that measure nothing: a whole one in each band to compare with, and those that make plans.
_BESIDE = 6


@dataclass(frozen=True)
class Band:
    """Merged steps that get the same ratios. above: the noise level below them. probed: the step that is measured."""

    steps: tuple[int, ...]
    above: float
    probed: int


@dataclass(frozen=True)
class Probe:
    """One evaluation more: of a site, None for all of them. counts: it is measured; else it only makes plans."""

    level: int
    site: str | None
    ratio: float
    counts: bool = True


_Again = Callable[[], tuple[Tensor, StepPlan]]


@dataclass(eq=False)
class Probes:
    """What to measure in one run, and what was found.

    sites: name -> blocks that get one ratio. most: so many evaluations more, where the least that is needed is not more
    already. tick: called before each. made: how many there were. over: there was no memory for more.
    """

    sites: Mapping[str, Sequence[str]]
    most: int
    tick: Callable[[], None] = lambda: None
    schedule: Schedule | None = None
    ratio_schedule: tuple[Band, ...] = ()
    todo: dict[int, list[Probe]] = field(default_factory=dict)
    made: int = 0
    over: bool = False
    # By probe, on the device: to read one would be to wait for it in the middle of a run.
    _errors: dict[Probe, Tensor] = field(default_factory=dict)
    _merged: set[str] = field(default_factory=set)
    _whole: set[str] = field(default_factory=set)

    @property
    def sigmas(self) -> tuple[float, ...]:
        """The noise levels at which the run's steps began."""
        return () if self.schedule is None else self.schedule.sigmas

    @property
    def done(self) -> int:
        """How many were measured."""
        return len(self._errors)

    @property
    def sites_found(self) -> dict[Site, float]:
        """Squared differences of single sites at `RATIO`, see `calibration.filled`. After the run: it is waited for."""
        return {(p.site, p.level): error for p, error in self._numbers() if p.site is not None}

    @property
    def together(self) -> dict[tuple[int, float], float]:
        """Those of all sites, by level and ratio."""
        return {(p.level, p.ratio): error for p, error in self._numbers() if p.site is None}

    def measured(self, site: str) -> bool:
        """Whether there is a number for it."""
        return any(place[0] == site for place in self.sites_found)

    def _numbers(self) -> list[tuple[Probe, float]]:
        """Without sites that made NaN anywhere: they are not to be merged."""
        numbers = [(probe, float(error)) for probe, error in self._errors.items()]
        broken = {probe.site for probe, error in numbers if probe.site is not None and not math.isfinite(error)}
        return [(probe, error) for probe, error in numbers if math.isfinite(error) and probe.site not in broken]

    def on(self, model: ModelPatcher) -> ModelPatcher:
        """A clone of a model that ToMA is attached to, which samples whole and is measured."""
        patched = model.clone()
        kind = WrappersMP.CALC_COND_BATCH
        ours = patched.wrappers.pop(kind, {})
        patched.add_wrapper_with_key(kind, _KEY, self._evaluated)  # the first is around all others
        for key, wrappers in ours.items():
            for wrapper in wrappers:
                patched.add_wrapper_with_key(kind, key, wrapper)
        return patched

    def _evaluated(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """One evaluation of the sampler: it gets the whole one, of all conditions, so that samplers which read the
        negative's picture too have that of the same evaluation. What is measured comes after."""
        conds, x = argument(args, kwargs, 1, "conds"), argument(args, kwargs, 2, "x_in")
        timestep, options = argument(args, kwargs, 3, "timestep"), argument(args, kwargs, 4, "model_options")
        model, sampling = argument(args, kwargs, 0, "model"), options["transformer_options"].get(SAMPLING)
        if sampling is None:
            return executor(*args, **kwargs)
        if self.schedule is None:
            self._begin(sampling.run.schedule)
        assert self.schedule is not None  # noqa: S101 - for mypy: it has begun
        at = sampling.tracker.of(timestep)
        plan = self.schedule.decide(at.sigma, at.step)
        try:
            # Whole anyhow: what it keeps of every site is what probes begin with.
            keeps = not plan.mode.merges
            sampling.run.schedule = self._at(dict.fromkeys(self.sites, RATIO) if keeps else {})
            pictures = executor(*args, **kwargs)
            probes = () if keeps else tuple(self.todo.pop(plan.step, ()))
            if not takes_part(conds[0], sampling.sigma):
                # Its picture would be nobody's: one that begins later is measured there.
                for probe in probes:
                    self._later(probe, plan.step)
                probes = ()
            if any(self._wanted(probe) for probe in probes):
                sampling.run.schedule = self._at({})
                again = partial(self._again, sampling, lambda: executor(model, conds[:1], x, timestep, options)[0])
                # Alone too, as what is compared with it: a batch of two is computed in another order.
                whole = pictures[0] if len(conds) == 1 or conds[1] is None else again()[0]
                for n, probe in enumerate(probes):
                    if self._wanted(probe) and self._probe(probe, plan.step, sampling, again, whole):
                        # All detail is of this very step now: what the others measure would be too good.
                        for other in probes[n + 1 :]:
                            self._later(other, plan.step)
                        break
            return pictures
        finally:
            sampling.run.schedule = self.schedule

    def _wanted(self, probe: Probe) -> bool:
        return not self.over and probe.site not in self._whole

    def _later(self, probe: Probe, step: int) -> None:
        """Once more in the next step of the band, if there is one."""
        later = next((n for n in self.ratio_schedule[probe.level].steps if n > step), None)
        if later is not None:
            self.todo.setdefault(later, []).append(probe)

    def _probe(self, probe: Probe, step: int, sampling: SamplingRun, again: _Again, whole: Tensor) -> bool:
        """Measures; returns whether all sites ran whole instead, to keep detail anew."""
        sites = self.sites if probe.site is None else (probe.site,)
        blocks = {block for site in sites for block in self.sites[site]}
        sampling.run.schedule = self._at(dict.fromkeys(sites, probe.ratio))
        stats = sampling.run.stats
        before, stats.merged_blocks = stats.merged_blocks, set()
        run = sampling.run
        try:
            run.cache.frozen = True
            picture, plan = again()
            merged = stats.merged_blocks & blocks
        finally:
            run.cache.frozen = False
            stats.merged_blocks |= before
        if run.cache.disabled or run.oom_scopes:
            self.over = True  # for want of memory, and there will be no more of it
            return False
        refreshed = plan.mode is StepMode.REFRESH
        if refreshed:
            # A condition is new, so this was a refresh: of the sites asked for alone, and all are needed.
            run.cache.clear()
            run.schedule = self._at(dict.fromkeys(self.sites, RATIO))
            again()
        if plan.mode is not StepMode.MERGED_CACHED and (run.config.uses_cache or not plan.mode.merges):
            self._later(probe, step)  # whole after all, as where a condition is new or plans await a picture
        elif not merged:
            if probe.site is not None and not blocks & self._merged:
                self._whole.add(probe.site)  # too small to be merged, or left whole by the settings
        else:
            self._merged |= merged
            if probe.counts:
                self._errors[probe] = (picture.float() - whole.float()).square().sum()
        return refreshed

    def _again(self, sampling: SamplingRun, evaluate: Callable[[], Tensor]) -> tuple[Tensor, StepPlan]:
        """The first condition's picture with what the schedule says, as if nobody had asked before, and what was done
        for it."""
        self.tick()
        self.made += 1
        seen, plan = sampling.counts.copy(), sampling.step_plan
        sampling.counts.clear()
        try:
            return evaluate(), sampling.step_plan
        finally:
            sampling.counts.clear()
            sampling.counts.update(seen)
            sampling.step_plan = plan

    def _at(self, ratios: Mapping[str, float]) -> Schedule:
        """The run's schedule with these sites merged, each in chains of its own."""
        assert self.schedule is not None  # noqa: S101 - for mypy: it has begun
        by_block = {block: ratio for site, ratio in ratios.items() for block in self.sites[site]}
        borders = frozenset(blocks[0] for blocks in self.sites.values())
        return replace(self.schedule, ratio_schedule=((0.0, by_block),), borders=borders)

    def _begin(self, schedule: Schedule) -> None:
        self.schedule, self.ratio_schedule = schedule, ratio_schedule_of(schedule)
        # Single ones first: the plans that they make are of tokens that nothing was done to.
        for probe in sorted(self._planned(), key=lambda probe: probe.site is None):
            self._plan_before(probe)
            self.todo.setdefault(self.ratio_schedule[probe.level].probed, []).append(probe)

    def _plan_before(self, probe: Probe) -> None:
        """Have plans made at the step at which the run to come will make them, if that is before the one that is
        measured: tokens of an earlier step, with more noise, make poorer ones."""
        assert self.schedule is not None  # noqa: S101 - for mypy: it has begun
        decide, sigmas, probed = self.schedule.decide, self.schedule.sigmas, self.ratio_schedule[probe.level].probed
        selection = decide(sigmas[probed], probed).selection
        # Where plans are made of pictures, a step that keeps detail makes none.
        awaits = self.schedule.config.similarity_from is SimilarityFrom.PREDICTION
        same = [step for step, sigma in enumerate(sigmas) if decide(sigma, step).selection == selection]
        first = next(step for step in same if not awaits or decide(sigmas[step], step).merged_ratio)
        early = replace(probe, site=None, counts=False)
        if first < probed and early not in self.todo.setdefault(first, []):
            self.todo[first].append(early)

    def _planned(self) -> list[Probe]:
        """Where there are too few evaluations for all, those at low noise are left out, whose errors are told from the
        band before. At high noise a stack may cost a thousand times as much as there (seen on a UNet), or no more."""
        levels = range(len(self.ratio_schedule))
        if not levels:
            return []
        middle = len(levels) // 2
        least = [Probe(level, None, RATIO) for level in levels]
        least += [Probe(level, site, RATIO) for level in levels[:_MEASURED] for site in self.sites]
        least.append(Probe(middle, None, OTHERS[0]))
        more = [Probe(middle, None, ratio) for ratio in OTHERS[1:]]
        more += [Probe(level, site, RATIO) for level in levels[_MEASURED:] for site in self.sites]
        return least + more[: max(0, self.most - len(least) - _BESIDE)]


def ratio_schedule_of(schedule: Schedule) -> tuple[Band, ...]:
    """The merged steps of a schedule in up to three bands. What comes between two whole steps stays together."""
    every, first = schedule.config.full_step_interval, schedule.span[0]
    periods: dict[int, list[int]] = {}
    awaits = schedule.config.similarity_from is SimilarityFrom.PREDICTION  # the first step runs whole
    for step, sigma in enumerate(schedule.sigmas):
        if schedule.decide(sigma, step).merged_ratio and not (awaits and step == 0):
            periods.setdefault((step - first) // every if every else step, []).append(step)
    groups = list(periods.values())
    count = min(_MOST_BANDS, len(groups))
    cuts = [round(n * len(groups) / count) for n in range(count + 1)] if count else []
    parts = [groups[a:b] for a, b in pairwise(cuts)]
    ratio_schedule = []
    for n, part in enumerate(parts):
        steps = tuple(step for group in part for step in group)
        above = 0.0
        if n + 1 < len(parts):
            # A period has the ratios of its first merged step.
            above = (schedule.sigmas[part[-1][0]] * schedule.sigmas[parts[n + 1][0][0]]) ** 0.5
        ratio_schedule.append(Band(steps, above, steps[len(steps) // 2]))
    return tuple(ratio_schedule)


def sites_of(blocks: Sequence[BlockFacts], most: int) -> dict[str, list[str]]:
    """Blocks that get one ratio, by name, so many sites at most. Every home has one where there are no more homes than
    that, and those with most blocks have more, of neighbours. Of more homes the smallest join a neighbour."""
    homes: dict[str, list[BlockFacts]] = {}
    for block in blocks:
        homes.setdefault(block.home, []).append(block)
    groups = list(homes.values())
    while len(groups) > max(most, 1):
        at = min(range(len(groups) - 1), key=lambda n: _joined_work(*groups[n : n + 2]))
        groups[at : at + 2] = [groups[at] + groups[at + 1]]
    pieces = [1] * len(groups)
    while sum(pieces) < most:
        longest = max(range(len(groups)), key=lambda n: len(groups[n]) / pieces[n])
        if pieces[longest] >= len(groups[longest]):
            break
        pieces[longest] += 1
    sites = {}
    for group, count in zip(groups, pieces, strict=True):
        names = [block.name for block in group]
        for a, b in pairwise([round(n * len(names) / count) for n in range(count + 1)]):
            sites[place_of(names[a:b])] = names[a:b]
    return sites


def _joined_work(a: Sequence[BlockFacts], b: Sequence[BlockFacts]) -> tuple[bool, float]:
    """What to join first: neighbours with as many tokens, and of these the least work."""
    work = math.fsum(block.work.flops(block.tokens, 1, block.width or 1024) for block in (*a, *b))
    return a[0].tokens != b[0].tokens, work
