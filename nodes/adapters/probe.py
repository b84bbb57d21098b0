"""Measure during an unmerged sampling run what merging would change: one site at a time, once in each band.

At one step of each band the first condition is evaluated again with one site merged, by the pack's own hooks and plans:
only the schedule has other ratios. The predicted clean images are compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP
from torch import Tensor

from ...toma_core import Schedule, ToMAConfig
from ...toma_core.profile import entry_of
from ...toma_core.schedule import RatioSchedule
from .blocks import BlockFacts
from .compat import argument
from .conditions import takes_part
from .model_hooks import SAMPLING
from .patch_model import apply_toma

_KEY = "toma_probes"
# Ratio of single sites, and the ratios of all sites together, which are measured in the middle band.
RATIO = 0.5
RATIOS = (0.25, 0.5, 0.75)
MAX_BANDS = 3


@dataclass(frozen=True)
class Band:
    """Consecutive steps that get the same ratios.

    Attributes:
        steps: The steps, 0-based.
        above: Sigma below them.
    """

    steps: Sequence[int]
    above: float

    def may_probe(self, step: int) -> bool:
        """Whether a step is in the second half, where it is measured."""
        return step in self.steps[len(self.steps) // 2 :]


@dataclass(eq=False)
class Probes:
    """What one run measures.

    Attributes:
        sites: Blocks of each site, which get one ratio.
        tick: Called before each additional evaluation.
        sigmas: Noise levels at which the run's steps begin, once it has begun.
        bands: Its bands.
        evaluations: Additional evaluations so far.
    """

    sites: Mapping[str, Sequence[str]]
    tick: Callable[[], None] = lambda: None
    sigmas: tuple[float, ...] = ()
    bands: tuple[Band, ...] = ()
    evaluations: int = 0
    # By band, site (None for all together) and ratio. On the device: reading a value would wait for it.
    _errors: dict[tuple[int, str | None, float], Tensor] = field(default_factory=dict)
    _measured: set[int] = field(default_factory=set)

    def on(self, model: ModelPatcher, config: ToMAConfig) -> ModelPatcher:
        """Return a clone of a model that samples unmerged and is measured with these settings."""
        patched = apply_toma(model, config, ratio_schedule=_merging({}))
        patched.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, _KEY, self._evaluated)
        return patched

    def squared_errors(self) -> dict[tuple[str, int, float], float]:
        """Return the squared error of each site, band and ratio; to be read after the run.

        Errors at `RATIO` are measured, those at others scaled like the error of all sites together. Sites that gave
        NaN anywhere are left out: they must not be merged.
        """
        errors = {key: float(error) for key, error in self._errors.items()}
        joint = {ratio: error for (_, site, ratio), error in errors.items() if site is None}
        single = {(site, band): error for (band, site, _), error in errors.items() if site is not None}
        broken = {site for (site, _), error in single.items() if not math.isfinite(error)}
        return {
            (site, band, ratio): error * _growth(joint, ratio)
            for (site, band), error in single.items()
            if site not in broken
            for ratio in RATIOS
        }

    def _evaluated(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate all conditions unmerged, then measure. The sampler gets the unmerged images."""
        images = executor(*args, **kwargs)
        model, conds, x, timestep, options = (
            argument(args, kwargs, n, name)
            for n, name in enumerate(("model", "conds", "x_in", "timestep", "model_options"))
        )
        sampling = options["transformer_options"].get(SAMPLING)
        if sampling is None:
            return images
        run, step, schedule = sampling.run, sampling.step_plan.step, sampling.run.schedule
        if not self.sigmas:
            self.sigmas, self.bands = schedule.sigmas, bands_of(replace(schedule, ratio_schedule=()))
        band = next((n for n, each in enumerate(self.bands) if each.may_probe(step) and n not in self._measured), None)
        if band is None or not takes_part(conds[0], sampling.sigma):
            return images

        def evaluated(site: str | None, ratio: float) -> Tensor:
            self.tick()
            self.evaluations += 1
            blocks = (block for name in self.sites if site in (None, name) for block in self.sites[name])
            run.schedule = replace(schedule, ratio_schedule=_merging(dict.fromkeys(blocks, ratio)))
            sampling.observe(timestep, conds[:1], x, options)
            image: Tensor = executor(model, conds[:1], x, timestep, options)[0]
            return image.float()

        self._measured.add(band)
        # Alone, as the measured ones are: a batch of two computes in another order.
        alone = len(conds) == 1 or conds[1] is None
        unmerged = images[0].float() if alone else evaluated(None, 0.0)
        probes: list[tuple[str | None, float]] = [(site, RATIO) for site in self.sites]
        if band == len(self.bands) // 2:
            probes += [(None, ratio) for ratio in RATIOS]
        for site, ratio in probes:
            self._errors[band, site, ratio] = (evaluated(site, ratio) - unmerged).square().sum()
        run.schedule = schedule
        return images


def _merging(ratios: Mapping[str, float]) -> RatioSchedule:
    """Return the schedule that merges these blocks at every step, and no others."""
    return ((0.0, ratios),)


def bands_of(schedule: Schedule) -> tuple[Band, ...]:
    """Return the merged steps of a schedule in up to three bands."""
    sigmas = schedule.sigmas
    merged = [step for step, sigma in enumerate(sigmas) if schedule.decide(sigma, step).mode.merges]
    count = min(MAX_BANDS, len(merged))
    borders = [round(n * len(merged) / count) for n in range(count + 1)] if count else []
    parts = [merged[a:b] for a, b in pairwise(borders)]
    above = [(sigmas[part[-1]] * sigmas[after[0]]) ** 0.5 for part, after in pairwise(parts)]
    return tuple(Band(part, sigma) for part, sigma in zip(parts, [*above, 0.0], strict=False))


def sites_of(blocks: Sequence[BlockFacts], limit: int) -> dict[str, list[str]]:
    """Divide consecutive blocks into at most `limit` sites, by name: a stack each, or neighbours with little work."""
    stacks: dict[str, list[BlockFacts]] = {}
    for block in blocks:
        stacks.setdefault(block.home, []).append(block)
    groups = list(stacks.values())
    while len(groups) > max(limit, 1):
        at = min(range(len(groups) - 1), key=lambda n: _joint_work(*groups[n : n + 2]))
        groups[at : at + 2] = [groups[at] + groups[at + 1]]
    named = [[block.name for block in group] for group in groups]
    return {entry_of(names): names for names in named}


def _joint_work(a: Sequence[BlockFacts], b: Sequence[BlockFacts]) -> tuple[bool, float]:
    """Return the order in which neighbours join: those of one resolution first, then by work."""
    return a[0].tokens != b[0].tokens, math.fsum(block.flops() for block in (*a, *b))


def _growth(errors: Mapping[float, float], ratio: float) -> float:
    """Return by how much an error is larger at a ratio than at `RATIO`; where that is unknown, by its square."""
    known = math.isfinite(errors.get(ratio, math.nan)) and errors.get(RATIO, 0.0) > 0.0
    return errors[ratio] / errors[RATIO] if known else (ratio / RATIO) ** 2
