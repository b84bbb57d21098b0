"""Measure the error of merging during an unmerged sampling run: one site at a time, once in each band. A site is a
group of blocks, a band is a range of steps. At one step of each band, the first condition is evaluated again for each
site, with only this site merged. The error is how much this changes the clean image that the model predicts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP
from torch import Tensor

from ...toma_core import ToMAConfig
from ...toma_core.profile import entry_of
from .compat import arguments, require_api, warned
from .conditions import is_active
from .family import BlockFacts
from .model_hooks import SAMPLING
from .origin import unwrapped
from .patch_model import apply_toma

_KEY = "toma_probes"
RATIO = 0.5  # at which single sites are measured
RATIOS = (0.25, 0.5, 0.75)  # at which all sites together are measured, in the middle band
MAX_BANDS = 3
# Wrappers to remove before measuring: step caches return results of earlier steps, torch.compile makes a graph per
# site.
_LEFT_OUT = ("easycache", "lazycache", "torch.compile")


class Band(NamedTuple):
    """Consecutive steps that get the same ratios."""

    steps: Sequence[int]  # from 0
    above: float  # sigma above which the steps lie

    def may_probe(self, step: int) -> bool:
        """Whether a step is in the second half of the band, where errors are measured."""
        return step in self.steps[len(self.steps) // 2 :]


@dataclass(eq=False)
class Probes:
    """The measurements of one run."""

    sites: Mapping[str, Sequence[str]]  # blocks of each site, all with one ratio
    tick: Callable[[], None] = lambda: None  # called before each additional evaluation
    sigmas: tuple[float, ...] = ()  # noise levels at which the run's steps begin; empty before the run
    bands: tuple[Band, ...] = ()
    # Squared errors by band, site (None for all together) and ratio; on the device, so that the host does not wait.
    _errors: dict[tuple[int, str | None, float], Tensor] = field(default_factory=dict)

    def on(self, model: ModelPatcher, config: ToMAConfig) -> ModelPatcher:
        """Return a clone of a model. It samples unmerged and measures the errors of merging with `config`."""
        patched = apply_toma(model, config, ratio_schedule=((0.0, {}),))
        patched.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, _KEY, self._evaluated)
        return patched

    def squared_errors(self) -> dict[tuple[str, int, float], float]:
        """Return the squared error by site, band and ratio. Single sites are measured only at `RATIO`; their errors at
        other ratios are scaled like the error of all sites together. Leave out sites that gave NaN in any band."""
        errors = {key: float(error) for key, error in self._errors.items()}
        joint = {ratio: error for (_, site, ratio), error in errors.items() if site is None}
        broken = {site for (_, site, _), error in errors.items() if not math.isfinite(error)}
        single = {(s, band): error for (band, s, _), error in errors.items() if s is not None and s not in broken}
        return {(*cell, ratio): error * _growth(joint, ratio) for cell, error in single.items() for ratio in RATIOS}

    def _evaluated(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate all conditions unmerged for the sampler. At one step of each band, measure each site's error."""
        images = executor(*args, **kwargs)
        model, conds, x = arguments(args, kwargs, model=0, conds=1, x_in=2)
        timestep, options = arguments(args, kwargs, timestep=3, model_options=4)
        sampling = options["transformer_options"].get(SAMPLING)
        if sampling is None:
            return images
        run, step, schedule = sampling.run, sampling.step_plan.step, sampling.run.schedule
        if not self.sigmas:
            self.sigmas, self.bands = schedule.sigmas, bands_of(schedule.sigmas)
        measured = {band for band, _, _ in self._errors}
        band = next((n for n, each in enumerate(self.bands) if each.may_probe(step) and n not in measured), None)
        # Measure nothing after memory ran out: every evaluation is then full, and its error would be 0.
        sigma = sampling.sigma
        takes_part = sigma is None or any(is_active(cond, sigma) for cond in conds[0] or ())
        if band is None or run.disabled_by or not takes_part:
            return images

        def evaluated(site: str | None, ratio: float) -> Tensor:
            self.tick()
            blocks = (block for name in self.sites if site in (None, name) for block in self.sites[name])
            run.schedule = replace(schedule, ratio_schedule=((0.0, dict.fromkeys(blocks, ratio)),))
            sampling.observe(timestep, conds[:1], x, options)
            image: Tensor = executor(model, conds[:1], x, timestep, options)[0]
            return image.float()

        # Compare with the first condition evaluated alone, as the probes are: a batch of two rounds differently.
        alone = len(conds) == 1 or conds[1] is None
        unmerged = images[0].float() if alone else evaluated(None, 0.0)
        probes: list[tuple[str | None, float]] = [(site, RATIO) for site in self.sites]
        if band == len(self.bands) // 2:
            probes += [(None, ratio) for ratio in RATIOS]
        for site, ratio in probes:
            self._errors[band, site, ratio] = (evaluated(site, ratio) - unmerged).square().sum()
        run.schedule = schedule
        return images


def without_caches(model: ModelPatcher) -> ModelPatcher:
    """Return a clone without ComfyUI's step caches and torch.compile."""
    patched = model.clone()
    with warned(), require_api("ModelPatcher.wrappers, object_patches"):
        for wrappers in patched.wrappers.values():
            for key in _LEFT_OUT:
                wrappers.pop(key, None)
        # Drop patches that put torch.compile's wrapper around a block, as some packs do.
        plain = {key: module for key, module in patched.object_patches.items() if unwrapped(module) is module}
        patched.object_patches = plain
    patched.model_options.pop("torch_compile_kwargs", None)
    return patched


def bands_of(sigmas: Sequence[float]) -> tuple[Band, ...]:
    """Divide the steps of a run into at most three bands."""
    count = min(MAX_BANDS, len(sigmas))
    borders = [round(n * len(sigmas) / count) for n in range(count + 1)] if count else []
    parts = [range(*border) for border in pairwise(borders)]
    above = [(sigmas[part[-1]] * sigmas[after[0]]) ** 0.5 for part, after in pairwise(parts)]
    return tuple(Band(part, sigma) for part, sigma in zip(parts, [*above, 0.0], strict=False))


def sites_of(blocks: Sequence[BlockFacts], limit: int) -> dict[str, list[str]]:
    """Divide blocks into at most `limit` sites, and return the names of each site's blocks, by the site's name. A site
    is a stack of blocks, or several neighbouring stacks with little work."""
    stacks: dict[str, list[BlockFacts]] = {}
    for block in blocks:
        stacks.setdefault(block.home, []).append(block)
    groups = list(stacks.values())

    def joint_work(index: int) -> tuple[bool, float]:
        """Return a sorting key for two neighbouring groups: equal resolution comes before different, little work before
        more."""
        a, b = groups[index : index + 2]
        return a[0].tokens != b[0].tokens, math.fsum(block.flops() for block in (*a, *b))

    while len(groups) > max(limit, 1):
        at = min(range(len(groups) - 1), key=joint_work)
        groups[at : at + 2] = [groups[at] + groups[at + 1]]
    named = [[block.name for block in group] for group in groups]
    return {entry_of(names): names for names in named}


def _growth(errors: Mapping[float, float], ratio: float) -> float:
    """Return the error at a ratio divided by the error at `RATIO`. If one is unknown, assume growth with the squared
    ratio."""
    known = math.isfinite(errors.get(ratio, math.nan)) and errors.get(RATIO, 0.0) > 0.0
    return errors[ratio] / errors[RATIO] if known else (ratio / RATIO) ** 2
