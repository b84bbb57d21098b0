"""Choose ratios for the model at hand from three sampling runs.

1. unmerged and probed         the errors of sites
2. the preset                  how errors grow until the end, and how much work there is to save
3. the choice                  its error, beside the preset's
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher
from torch import Tensor

from ..toma_core import Settings, ToMAConfig
from ..toma_core.calibration import UNMERGED, Cell, Option, amplified, choose, saved_by
from ..toma_core.profile import Profile, changed
from ..toma_core.reasons import Message, MessageId
from .adapters import last_runs, registry
from .adapters.blocks import BlockFacts
from .adapters.fingerprint import blocks_of, fingerprint
from .adapters.patch_model import apply_toma, attachment_of
from .adapters.probe import MAX_BANDS, RATIO, Probes, sites_of
from .adapters.without_caches import without_caches
from .task import Task, error, progress

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
class Run:
    """One sampling run.

    Attributes:
        latent: The result, (B, C, ..., H, W), fp32 on the CPU.
        states: What the model was given before each step, and the result as it would be given: (n + 1, B, ...).
        merged: The blocks that were merged.
    """

    latent: Tensor
    states: Tensor
    merged: frozenset[str] = frozenset()

    def squared_errors(self, unmerged: Run, steps: int) -> list[float]:
        """Return the squared errors before each step and at the end, 0 for a sampler that does not report steps."""
        if not len(self.states) == len(unmerged.states) == steps + 1:
            return [0.0] * (steps + 1)
        squares: list[float] = (self.states - unmerged.states).double().square().flatten(1).sum(1).tolist()
        return squares

    def mostly_closer(self, than: Run, unmerged: Run) -> bool:
        """Whether more than half of the images are at least as close as another run's: one outlier decides nothing."""
        mine, others = ((run.latent - unmerged.latent).flatten(1).norm(dim=1) for run in (self, than))
        return bool((mine <= others).float().mean() > 0.5)


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
    config = settings.resolved(registry.require(model.get_model_object("diffusion_model")).presets)
    if config.full_step_interval:
        return Calibrated(apply_toma(plain, settings), preset, ratio, problem=Problem.FULL_STEPS(preset=preset))
    base, without = without_caches(plain)
    facts = blocks_of(base, task.latent)
    budget = round(_PROBES * task.steps * task.conditions)
    sites = sites_of(facts, min(_MAX_SITES, max(_MIN_SITES, budget // MAX_BANDS - 1)))
    tick = progress(3 * task.steps + MAX_BANDS * (len(sites) + 2))

    def run(number: int, model: ModelPatcher) -> Run:
        on_run(number, 3)
        return _sample(model, task, tick)

    def merged(profile: Profile, on: ModelPatcher) -> ModelPatcher:
        schedule = profile.ratio_schedule([fact.name for fact in facts])
        return apply_toma(on, profile.config(), ratio_schedule=schedule)

    def profile_of(config: ToMAConfig, above: tuple[float, ...], ratios: Mapping[str, tuple[float, ...]]) -> Profile:
        merging = {site: each for site, each in ratios.items() if any(each)}
        return Profile(fingerprint(plain), changed(config), above, merging)

    probes, everywhere = Probes(sites, tick), replace(config, skip_first_blocks=0.0, skip_last_blocks=0.0)
    unmerged = run(1, probes.on(base, everywhere))
    usual = run(2, apply_toma(base, config))
    before = error(usual.latent, unmerged.latent)
    if not math.isfinite(before):
        problem = Problem.MERGED_NAN if unmerged.latent.isfinite().all() else Problem.PLAIN_NAN
        return Calibrated(plain, preset, ratio, problem=problem())
    saved = _saving(facts, usual.merged, ratio)
    choice = choose(_table(probes, facts, unmerged, usual), saved)
    above = tuple(band.above for band in probes.bands) or (0.0,)
    profile = profile_of(
        everywhere,
        above,
        {site: tuple(choice.get((site, band), UNMERGED).ratio for band in range(len(above))) for site in sites},
    )
    chosen = usual if profile.empty else run(3, merged(profile, base))
    after = error(chosen.latent, unmerged.latent)
    keeps = saved > 0 and not (after < before and chosen.mostly_closer(usual, unmerged))
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


def _table(probes: Probes, facts: Sequence[BlockFacts], unmerged: Run, usual: Run) -> dict[Cell, list[Option]]:
    """Return the options of every cell; savings are shares of the work in a run."""
    errors = probes.squared_errors()
    # How much of a predicted image's error enters the latent in each step.
    passed = [(1 - after / before) ** 2 for before, after in pairwise((*probes.sigmas, 0.0))]
    injected = [0.0] * len(passed)
    for number, band in enumerate(probes.bands):
        added = sum(
            len({*blocks} & usual.merged) / len(blocks) * errors.get((site, number, RATIO), 0.0)
            for site, blocks in probes.sites.items()
        )
        for step in band.steps:
            injected[step] = passed[step] * added
    factors = amplified(usual.squared_errors(unmerged, len(injected)), injected)
    table: dict[Cell, list[Option]] = {}
    for (site, number, ratio), squared in errors.items():
        steps = probes.bands[number].steps
        blocks = {*probes.sites[site]} & (unmerged.merged | usual.merged)
        if blocks:
            weight = sum(passed[step] * factors[step] for step in steps)
            saving = _saving(facts, blocks, ratio) * len(steps) / len(passed)
            table.setdefault((site, number), []).append(Option(ratio, squared * weight, saving))
    return table


def _sample(model: ModelPatcher, task: Task, tick: Callable[..., None]) -> Run:
    states: list[Tensor] = []

    def stepped(step: int, denoised: Any, x: Tensor, total: int) -> None:
        states.append(x.detach().float().cpu().clone())
        tick()

    latent, attachment = task.sample(model, stepped), attachment_of(model)
    end = model.model.process_latent_in(latent).float().cpu()
    stats = None if attachment is None else last_runs.last(attachment.report_id)
    return Run(latent, torch.stack([*states, end]), frozenset(() if stats is None else stats.merged_blocks))
