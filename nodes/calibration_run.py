"""Choose ratios for the model at hand from three sampling runs.

1. unmerged and probed         the errors of sites
2. the preset                  its error, and how much work there is to save
3. the choice                  its error, beside the preset's
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from comfy.model_patcher import ModelPatcher
from torch import Tensor

from ..toma_core import Settings, ToMAConfig
from ..toma_core.calibration import UNMERGED, Cell, Option, choose, saved_by
from ..toma_core.profile import Profile, changed
from ..toma_core.reasons import Message, MessageId
from .adapters.blocks import BlockFacts
from .adapters.fingerprint import blocks_of, fingerprint
from .adapters.patch_model import apply_toma, config_for
from .adapters.probe import MAX_BANDS, Probes, sites_of
from .adapters.without_caches import without_caches
from .task import Task, error, last_stats, progress

# Target -> the preset and ratio whose work a choice has.
TARGETS: Mapping[str, tuple[str, float]] = {
    "quality": ("quality", 0.5),
    "balanced": ("balanced", 0.5),
    "fast": ("balanced", 0.6),
}

# Additional evaluations, as a share of the run's own: with the preset's run they are about two runs.
_PROBES = 1.2
_MIN_SITES, _MAX_SITES = 6, 12


class Problem(MessageId):
    """Why nothing was measured or chosen."""

    FULL_STEPS = "preset_has_full_steps"  # preset
    NOTHING = "nothing_to_calibrate"
    PLAIN_NAN = "plain_nan"
    MERGED_NAN = "merged_nan"


@dataclass(frozen=True)
class Calibrated:
    """What a calibration found.

    Attributes:
        model: Merged as `profile` says: by the choice, or by the preset where that is closer, or not at all.
        preset: The preset that the choice is compared with.
        ratio: Its ratio.
        profile: None where nothing was measured.
        errors: Errors of the preset and of the choice.
        work: Shares of the blocks' work that they leave.
        keeps_preset: The choice is not closer, or not in most images.
        probes: Evaluations beside the sampling runs.
        problem: Why nothing was measured or chosen.
        without: Parts of the model that were left out of measuring.
    """

    model: ModelPatcher
    preset: str
    ratio: float
    profile: Profile | None = None
    errors: tuple[float, float] = (0.0, 0.0)
    work: tuple[float, float] = (1.0, 1.0)
    keeps_preset: bool = False
    probes: int = 0
    problem: Message | None = None
    without: Sequence[str] = ()


def calibrate(
    model: ModelPatcher,
    task: Task,
    target: str,
    overrides: Mapping[str, Any] = {},
    on_run: Callable[[int, int], None] = lambda run, runs: None,
) -> Calibrated:
    """Measure a model and choose ratios with the work of one of `TARGETS`.

    Presets with full steps are kept without measuring: on those models no choice had less error
    (benchmarks/results/fidelity/calibrated.md). The model is not changed; ToMA that it carries is left out. Raises
    `UnsupportedModelError`, and ComfyUI's own exception when the user cancels.

    Args:
        overrides: Settings on top of the preset's.
        on_run: Called with the number of the run that begins, and of all runs.
    """
    plain, (preset, ratio) = apply_toma(model, ToMAConfig(ratio=0.0)), TARGETS[target]
    settings = Settings(preset, {"ratio": ratio, **overrides})
    config = config_for(settings, model)
    if config.full_step_interval:
        return Calibrated(apply_toma(plain, settings), preset, ratio, problem=Problem.FULL_STEPS(preset=preset))
    base, without = without_caches(plain)
    facts = blocks_of(base, task.latent)
    budget = round(_PROBES * task.steps * task.conditions)
    sites = sites_of(facts, min(_MAX_SITES, max(_MIN_SITES, budget // MAX_BANDS - 1)))
    tick = progress(3 * task.steps + MAX_BANDS * (len(sites) + 2))

    def run(number: int, model: ModelPatcher) -> tuple[Tensor, frozenset[str]]:
        """Return the final latent, and the blocks that were merged."""
        on_run(number, 3)
        latent, stats = task.sample(model, tick), last_stats(model)
        return latent, frozenset(() if stats is None else stats.merged_blocks)

    def merged(profile: Profile, on: ModelPatcher) -> ModelPatcher:
        schedule = profile.ratio_schedule([fact.name for fact in facts])
        return apply_toma(on, profile.config(), ratio_schedule=schedule)

    def profile_of(config: ToMAConfig, above: tuple[float, ...], ratios: Mapping[str, tuple[float, ...]]) -> Profile:
        merging = {site: each for site, each in ratios.items() if any(each)}
        return Profile(fingerprint(plain), changed(config), above, merging)

    probes, everywhere = Probes(sites, tick), replace(config, skip_first_blocks=0.0, skip_last_blocks=0.0)
    unmerged, mergeable = run(1, probes.on(base, everywhere))
    usual, merged_by_preset = run(2, apply_toma(base, config))
    before = error(usual, unmerged)
    if not math.isfinite(before):
        problem = Problem.MERGED_NAN if unmerged.isfinite().all() else Problem.PLAIN_NAN
        return Calibrated(plain, preset, ratio, problem=problem())
    saved = _saving(facts, merged_by_preset, ratio)
    choice = choose(_table(probes, facts, mergeable | merged_by_preset), saved)
    above = tuple(band.above for band in probes.bands) or (0.0,)
    profile = profile_of(
        everywhere,
        above,
        {site: tuple(choice.get((site, band), UNMERGED).ratio for band in range(len(above))) for site in sites},
    )
    chosen = usual if profile.empty else run(3, merged(profile, base))[0]
    after = error(chosen, unmerged)
    keeps = saved > 0 and not (after < before and _mostly_closer(chosen, usual, unmerged))
    if keeps:
        profile = profile_of(config, (0.0,), dict.fromkeys(sites, (ratio,)))
    return Calibrated(
        model=plain if profile.empty else merged(profile, plain),
        preset=preset,
        ratio=ratio,
        profile=profile,
        errors=(before, after),
        work=(1.0 - saved, 1.0 - saved_by(choice)),
        keeps_preset=keeps,
        probes=probes.evaluations,
        problem=Problem.NOTHING() if profile.empty else None,
        without=without,
    )


def _saving(facts: Sequence[BlockFacts], blocks: Container[str], ratio: float) -> float:
    """Return the share of all blocks' work that merging some of them saves."""
    saving = sum(fact.flops() - fact.flops(ratio) for fact in facts if fact.name in blocks)
    return saving / max(sum(fact.flops() for fact in facts), 1e-12)


def _table(probes: Probes, facts: Sequence[BlockFacts], mergeable: Container[str]) -> dict[Cell, list[Option]]:
    """Return the options of every cell; savings are shares of the work in a run."""
    # How much of a predicted image's error enters the latent in each step. From there on it is taken to last: on a
    # trained UNet estimates of its growth made choices no better.
    passed = [(1 - after / before) ** 2 for before, after in pairwise((*probes.sigmas, 0.0))]
    table: dict[Cell, list[Option]] = {}
    for (site, number, ratio), squared in probes.squared_errors().items():
        steps = probes.bands[number].steps
        blocks = [block for block in probes.sites[site] if block in mergeable]
        saving = _saving(facts, blocks, ratio) * len(steps) / len(passed)
        if saving > 0:
            option = Option(ratio, squared * sum(passed[step] for step in steps), saving)
            table.setdefault((site, number), []).append(option)
    return table


def _mostly_closer(latent: Tensor, than: Tensor, unmerged: Tensor) -> bool:
    """Whether more than half of the images are at least as close as another run's: one outlier decides nothing."""
    mine, others = ((each - unmerged).flatten(1).norm(dim=1) for each in (latent, than))
    return bool((mine <= others).float().mean() > 0.5)
