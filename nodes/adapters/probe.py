"""Measure during an unmerged sampling run what merging would change: one site at a time, at a few noise levels.

Every step runs unmerged. At one step of each band the evaluation is repeated with one site merged, then with all, by
the pack's own hooks, plans and residual cache: only the schedule has other ratios. The clean images of the first
condition are compared. Beside the caches, two images are held.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP
from torch import Tensor

from ...toma_core import Schedule, StepMode, StepPlan
from ...toma_core.calibration import Cell
from ...toma_core.config import SimilarityFrom
from ...toma_core.profile import entry_of
from .blocks import BlockFacts
from .compat import argument
from .conditions import takes_part
from .model_hooks import SAMPLING
from .sampling_run import SamplingRun
from .streams import first

_KEY = "toma_probes"
# The ratio of single sites, and the further ones of all sites together.
RATIO = 0.5
OTHERS = (0.75, 0.25)
_MAX_BANDS = 3
# Of these bands, from high noise on, every site is always measured by itself.
_MEASURED_BANDS = 2
# Evaluations that measure nothing: an unmerged one in each band, and those that make plans.
_BESIDE = 6


@dataclass(frozen=True)
class Band:
    """Merged steps that get the same ratios.

    Attributes:
        steps: The steps, 0-based.
        above: Sigma below them.
        probed: The step that is measured.
    """

    steps: tuple[int, ...]
    above: float
    probed: int


@dataclass(frozen=True)
class Probe:
    """One additional evaluation.

    Attributes:
        band: Index of the band.
        site: The site that is merged, None for all.
        ratio: Its ratio.
        measured: Whether it is measured; else it only makes plans.
    """

    band: int
    site: str | None
    ratio: float
    measured: bool = True


_Evaluate = Callable[[], tuple[Tensor, StepPlan]]


@dataclass(eq=False)
class Probes:
    """What to measure in one run, and what was found.

    Attributes:
        sites: Blocks of each site, which get one ratio.
        budget: Additional evaluations; the necessary ones are made beyond it.
        tick: Called before each.
        schedule: Schedule of the run, once it has begun.
        bands: Its bands.
        pending: Probes that are still to be made, by step.
        evaluations: Additional evaluations so far.
        out_of_memory: Whether memory ran out: nothing more is measured.
    """

    sites: Mapping[str, Sequence[str]]
    budget: int
    tick: Callable[[], None] = lambda: None
    schedule: Schedule | None = None
    bands: tuple[Band, ...] = ()
    pending: dict[int, list[Probe]] = field(default_factory=dict)
    evaluations: int = 0
    out_of_memory: bool = False
    # On the device: reading a value would wait for it in the middle of a run.
    _errors: dict[Probe, Tensor] = field(default_factory=dict)
    _merged: set[str] = field(default_factory=set)
    _unmerged: set[str] = field(default_factory=set)

    @property
    def sigmas(self) -> tuple[float, ...]:
        """Noise levels at which the run's steps began."""
        return () if self.schedule is None else self.schedule.sigmas

    @property
    def done(self) -> int:
        """Number of measurements."""
        return len(self._errors)

    @property
    def site_errors(self) -> dict[Cell, float]:
        """Squared errors of single sites at `RATIO`, see `calibration.filled`; to be read after the run."""
        return {(p.site, p.band): error for p, error in self._finite() if p.site is not None}

    @property
    def joint_errors(self) -> dict[tuple[int, float], float]:
        """Squared errors of all sites together, by band and ratio."""
        return {(p.band, p.ratio): error for p, error in self._finite() if p.site is None}

    def measured(self, site: str) -> bool:
        """Whether a site has a measurement."""
        return any(cell[0] == site for cell in self.site_errors)

    def _finite(self) -> list[tuple[Probe, float]]:
        """Return the measurements without sites that gave NaN anywhere: they must not be merged."""
        errors = [(probe, float(error)) for probe, error in self._errors.items()]
        broken = {probe.site for probe, error in errors if not math.isfinite(error)} - {None}
        return [(probe, error) for probe, error in errors if math.isfinite(error) and probe.site not in broken]

    def on(self, model: ModelPatcher) -> ModelPatcher:
        """Return a clone of a model with ToMA that samples unmerged and is measured."""
        patched, kind = model.clone(), WrappersMP.CALC_COND_BATCH
        wrappers = patched.wrappers.pop(kind, {})
        patched.add_wrapper_with_key(kind, _KEY, self._evaluated)  # the first wraps all others
        for key, wrapper in ((key, wrapper) for key, each in wrappers.items() for wrapper in each):
            patched.add_wrapper_with_key(kind, key, wrapper)
        return patched

    def _evaluated(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate all conditions unmerged, then measure. The sampler gets the unmerged images of all conditions."""
        conds, x = argument(args, kwargs, 1, "conds"), argument(args, kwargs, 2, "x_in")
        timestep, options = argument(args, kwargs, 3, "timestep"), argument(args, kwargs, 4, "model_options")
        model, sampling = argument(args, kwargs, 0, "model"), options["transformer_options"].get(SAMPLING)
        if sampling is None:
            return executor(*args, **kwargs)
        schedule = self.schedule or self._begin(sampling.run.schedule)
        at = sampling.tracker.of(timestep)
        plan = schedule.decide(at.sigma, at.step)
        try:
            # A full step caches the residuals of every site, which probes begin with.
            sampling.run.schedule = self._at({} if plan.mode.merges else dict.fromkeys(self.sites, RATIO))
            images = executor(*args, **kwargs)
            probes = tuple(self.pending.pop(plan.step, ())) if plan.mode.merges else ()
            if not takes_part(conds[0], sampling.sigma):
                self._postpone(probes, plan.step)  # the first condition begins later
            elif any(map(self._wanted, probes)):
                sampling.run.schedule = self._at({})
                again = partial(self._again, sampling, lambda: executor(model, conds[:1], x, timestep, options)[0])
                # Alone, as the measured ones are: a batch of two computes in another order.
                unmerged = images[0] if len(conds) == 1 or conds[1] is None else again()[0]
                for n, probe in enumerate(probes):
                    if self._wanted(probe) and self._measure(probe, plan.step, sampling, again, unmerged):
                        # The cache holds residuals of this very step now: further errors would be too small.
                        self._postpone(probes[n + 1 :], plan.step)
                        break
            return images
        finally:
            sampling.run.schedule = schedule

    def _wanted(self, probe: Probe) -> bool:
        return not self.out_of_memory and probe.site not in self._unmerged

    def _postpone(self, probes: Iterable[Probe], step: int) -> None:
        """Make probes in the next step of their band, if there is one."""
        for probe in probes:
            later = next((n for n in self.bands[probe.band].steps if n > step), None)
            if later is not None:
                self.pending.setdefault(later, []).append(probe)

    def _measure(self, probe: Probe, step: int, sampling: SamplingRun, evaluate: _Evaluate, unmerged: Tensor) -> bool:
        """Make a probe. Return whether all sites refreshed the cache instead."""
        run, stats = sampling.run, sampling.run.stats
        sites = self.sites if probe.site is None else (probe.site,)
        run.schedule = self._at(dict.fromkeys(sites, probe.ratio))
        before, stats.merged_blocks = stats.merged_blocks, set()
        try:
            run.cache.read_only = True
            image, plan = evaluate()
            merged = stats.merged_blocks & {block for site in sites for block in self.sites[site]}
        finally:
            run.cache.read_only = False
            stats.merged_blocks |= before
        if run.cache.disabled or run.oom_scopes:
            self.out_of_memory = True
            return False
        refreshed = plan.mode is StepMode.REFRESH
        if refreshed:
            # A new condition made this a refresh, of these sites alone: refresh all of them.
            run.cache.clear()
            run.schedule = self._at(dict.fromkeys(self.sites, RATIO))
            evaluate()
        if plan.mode is not StepMode.MERGED_CACHED and (run.config.uses_cache or not plan.mode.merges):
            self._postpone([probe], step)
        elif merged:
            self._merged |= merged
            if probe.measured:
                difference = first(image.float() - unmerged.float(), sampling.shapes)
                self._errors[probe] = difference.square().sum()
        elif probe.site is not None and self._merged.isdisjoint(self.sites[probe.site]):
            self._unmerged.add(probe.site)  # too small to be merged, or skipped by the settings
        return refreshed

    def _again(self, sampling: SamplingRun, evaluate: Callable[[], Tensor]) -> tuple[Tensor, StepPlan]:
        """Evaluate the first condition as if it were the first call of the step. Return its image and its plan."""
        self.tick()
        self.evaluations += 1
        counts, plan = sampling.counts.copy(), sampling.step_plan
        sampling.counts.clear()
        try:
            return evaluate(), sampling.step_plan
        finally:
            sampling.counts.clear()
            sampling.counts.update(counts)
            sampling.step_plan = plan

    def _at(self, ratios: Mapping[str, float]) -> Schedule:
        """Return the run's schedule with these sites merged, each in its own chains."""
        assert self.schedule is not None  # noqa: S101 - for mypy: it has begun
        by_block = {block: ratio for site, ratio in ratios.items() for block in self.sites[site]}
        borders = frozenset(blocks[0] for blocks in self.sites.values())
        return replace(self.schedule, ratio_schedule=((0.0, by_block),), borders=borders)

    def _begin(self, schedule: Schedule) -> Schedule:
        self.schedule, self.bands = schedule, bands_of(schedule)
        # Single sites first: the plans that they make are of tokens that nothing was merged into.
        for probe in sorted(self._planned(), key=lambda probe: probe.site is None):
            self._plan_before(probe, schedule)
            self.pending.setdefault(self.bands[probe.band].probed, []).append(probe)
        return schedule

    def _plan_before(self, probe: Probe, schedule: Schedule) -> None:
        """Make plans at the step at which a run makes them, where that is before the one that is measured: tokens of an
        earlier step have more noise and make poorer plans."""
        sigmas, probed = schedule.sigmas, self.bands[probe.band].probed
        selection = schedule.decide(sigmas[probed], probed).selection
        # Plans from predictions are not made in a full step.
        awaits = schedule.config.similarity_from is SimilarityFrom.PREDICTION
        plans = [(step, schedule.decide(sigma, step)) for step, sigma in enumerate(sigmas)]
        first = next(n for n, plan in plans if plan.selection == selection and (plan.merged_ratio or not awaits))
        early = replace(probe, site=None, measured=False)
        if first < probed and early not in self.pending.setdefault(first, []):
            self.pending[first].append(early)

    def _planned(self) -> list[Probe]:
        """Return all probes that fit the budget. Low noise is left out first: its errors follow from the band before,
        while at high noise a stack may cost a thousand times as much (seen on a UNet)."""
        bands = range(len(self.bands))
        if not bands:
            return []
        middle = len(bands) // 2
        single = [Probe(band, site, RATIO) for band in bands for site in self.sites]
        always = _MEASURED_BANDS * len(self.sites)
        least = [Probe(band, None, RATIO) for band in bands]
        least += [*single[:always], Probe(middle, None, OTHERS[0])]
        more = [Probe(middle, None, ratio) for ratio in OTHERS[1:]] + single[always:]
        return least + more[: max(0, self.budget - len(least) - _BESIDE)]


def bands_of(schedule: Schedule) -> tuple[Band, ...]:
    """Return the merged steps of a schedule in up to three bands; steps between two full ones stay together."""
    interval, first = schedule.config.full_step_interval, schedule.span[0]
    periods: dict[int, list[int]] = {}
    awaits = schedule.config.similarity_from is SimilarityFrom.PREDICTION  # then the first step is full
    for step, sigma in enumerate(schedule.sigmas):
        if schedule.decide(sigma, step).merged_ratio and not (awaits and step == 0):
            periods.setdefault((step - first) // interval if interval else step, []).append(step)
    parts = _parts(list(periods.values()), _MAX_BANDS)
    bands = []
    for n, part in enumerate(parts):
        steps = tuple(step for period in part for step in period)
        above = 0.0
        if n + 1 < len(parts):
            # A period has the ratios of its first merged step.
            above = (schedule.sigmas[part[-1][0]] * schedule.sigmas[parts[n + 1][0][0]]) ** 0.5
        bands.append(Band(steps, above, steps[len(steps) // 2]))
    return tuple(bands)


def sites_of(blocks: Sequence[BlockFacts], limit: int) -> dict[str, list[str]]:
    """Divide consecutive blocks into at most `limit` sites, by name. Every stack has a site of its own if they suffice,
    and the largest have several; else the smallest neighbours share one."""
    homes: dict[str, list[BlockFacts]] = {}
    for block in blocks:
        homes.setdefault(block.home, []).append(block)
    groups = list(homes.values())
    while len(groups) > max(limit, 1):
        at = min(range(len(groups) - 1), key=lambda n: _joint_work(*groups[n : n + 2]))
        groups[at : at + 2] = [groups[at] + groups[at + 1]]
    counts = [1] * len(groups)
    while sum(counts) < limit:
        longest = max(range(len(groups)), key=lambda n: len(groups[n]) / counts[n])
        if counts[longest] >= len(groups[longest]):
            break
        counts[longest] += 1
    parts = [part for group, count in zip(groups, counts, strict=True) for part in _parts(group, count)]
    named = [[block.name for block in part] for part in parts]
    return {entry_of(names): names for names in named}


def _parts(items: list[Any], count: int) -> list[list[Any]]:
    """Divide a list into parts of about equal length, `count` of them or as many as it has items."""
    count = min(count, len(items))
    return [items[a:b] for a, b in pairwise(round(n * len(items) / count) for n in range(count + 1))] if count else []


def _joint_work(a: Sequence[BlockFacts], b: Sequence[BlockFacts]) -> tuple[bool, float]:
    """Return the order in which neighbours join: those of one resolution first, then by work."""
    work = math.fsum(block.work.flops(block.tokens, 1, block.width or 1024) for block in (*a, *b))
    return a[0].tokens != b[0].tokens, work
