"""What can be merged where in the model at hand: measured in three sampling runs, and chosen.

whole and probed -> the preset beside it -> a choice from the table -> the choice, sampled, beside its prediction

The preset's run tells what becomes of an error until the end, step by step, and how much work there is to save.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import comfy.model_management
import comfy.samplers
import comfy.utils
import torch
from comfy.model_patcher import ModelPatcher
from comfy.samplers import CFGGuider
from torch import Tensor

from ..toma_core import Settings, ToMAConfig
from ..toma_core.cache import MOST
from ..toma_core.calibration import Choice, Option, Table, amplified, fastest, filled, front, held, nearest
from ..toma_core.profile import Profile, changed
from ..toma_core.reasons import Message, MessageId, Reason
from ..toma_core.stats import RunStats
from .adapters import last_runs, registry
from .adapters.family import BlockFacts
from .adapters.fingerprint import blocks_of, fingerprint
from .adapters.kv_memory import conditions_of, dtype_of, has_controls, overlap_of
from .adapters.patch_model import apply_toma, attachment_of, run_config
from .adapters.probe import OTHERS, RATIO, Band, Probes, sites_of
from .adapters.without_caches import without_caches
from .task import Task, error

# How near, in a word: as much work as this preset has at this ratio. Above 0.6 transformers are farther than in fewer
# steps (benchmarks/results/fidelity/tables.md).
NEAR: Mapping[str, tuple[str, float]] = {
    "quality": ("quality", 0.5),
    "balanced": ("balanced", 0.5),
    "fast": ("balanced", 0.6),
}

_MOST_SITES = 12
# Extra evaluations, as a share of the run's own: with the preset's run they are about two runs.
_PROBES = 1.2
# The least that tells anything: six sites at two levels, all of them at three, and what these are compared with.
_LEAST_SITES, _LEAST_PROBES = 6, 22
# A choice that was predicted wrongly has to be so much nearer than the preset: a few pictures may flatter it.
_DOUBTED = 0.8


class Problem(MessageId):
    """Why nothing was chosen."""

    UNSUPPORTED = "cannot_calibrate"  # model
    UNMEASURED = "unmeasured"
    TOO_FEW_STEPS = "unmeasured_steps"  # steps
    PLAIN_NAN = "plain_nan"
    MERGED_NAN = "merged_nan"


@dataclass(frozen=True)
class Run:
    """One sampling run. latent: its result. states: (n + 1, B, ...), what the model was given before each step, and the
    result as the model would be given it; fp32 on the CPU."""

    latent: Tensor
    states: Tensor

    def apart(self, whole: Run, steps: int) -> list[float]:
        """Squared distances from another run before each of so many steps and at the end, the last as `distance`."""
        end = self.distance(whole) ** 2
        if len(self.states) != len(whole.states) or len(self.states) != steps + 1:
            return [*[0.0] * steps, end]  # a sampler that does not tell of every step
        apart = (self.states - whole.states).double().square().flatten(1).sum(1).tolist()
        return [end * each / max(apart[-1], 1e-12) for each in apart]

    def distance(self, whole: Run) -> float:
        """Of the final latents, relative to the other's norm."""
        return error(self.latent, whole.latent)

    def mostly_nearer(self, than: Run, whole: Run) -> bool:
        """Whether more than half of its pictures are as near as those of another run: one picture that turned out
        otherwise, as some do with any setting, decides nothing."""
        mine, others = ((run.latent - whole.latent).flatten(1).norm(dim=1) for run in (self, than))
        return bool((mine <= others).float().mean() > 0.5)


@dataclass(frozen=True)
class Usual:
    """A preset at a ratio. work: of the model's blocks. distance: what it came to."""

    preset: str
    ratio: float
    work: float
    distance: float


@dataclass(frozen=True)
class Calibrated:
    """What came of it.

    model: merged as `profile` says: by the choice, or by the preset where that is nearer, or not at all. profile: None
    where nothing was learnt. choices: the front. usual: the preset. found: distance of the choice, at `chosen.work`.
    keeps_preset: the choice is not nearer, or not in most pictures. probes: evaluations beside the sampling runs.
    problem: why nothing was chosen. short: memory ran out. without: what the model has, and was measured
    without. unmeasured: blocks that the preset merges and that nothing was found out about.
    """

    model: ModelPatcher
    profile: Profile | None
    choices: Sequence[Choice]
    chosen: Choice
    found: float
    usual: Usual
    keeps_preset: bool = False
    probes: int = 0
    problem: Message | None = None
    short: bool = False
    without: Sequence[str] = ()
    unmeasured: Sequence[str] = ()

    @property
    def held(self) -> bool:
        """Whether the prediction came true."""
        return held(self.chosen.distance, self.found)


def calibrate(
    model: ModelPatcher,
    task: Task,
    near: str,
    distance: float | None = None,
    overrides: Mapping[str, Any] = {},
    told: Callable[[int, int], None] = lambda run, runs: None,
) -> Calibrated:
    """Measure a model and choose: as much work as one of `NEAR` says, or as far away as `distance` allows.

    The model is not changed; what ToMA it carries is left out. overrides: settings on top of the preset's. told: that
    one of three runs begins. Raises `UnsupportedModelError`, and ComfyUI's own exception when the user cancels.
    """
    plain = apply_toma(model, ToMAConfig(ratio=0.0))
    base, without = without_caches(plain)
    preset, ratio = NEAR[near]
    config = _settings(base, task, Settings(preset, {"ratio": ratio, **overrides}))
    placed = replace(config, ratio=RATIO, skip_first_blocks=0.0, skip_last_blocks=0.0)
    facts, most = blocks_of(base, task.latent), round(_PROBES * task.steps * task.conditions)
    if not facts:
        kind = type(base.model.diffusion_model).__name__
        raise registry.UnsupportedModelError(Problem.UNSUPPORTED(model=kind))
    sites = sites_of(facts, min(_MOST_SITES, max(_LEAST_SITES, most // 2 - 2), _sites_kept(base, placed, task)))
    progress = comfy.utils.ProgressBar(3 * task.steps + max(most, _LEAST_PROBES))

    def tick(*_: Any) -> None:
        comfy.model_management.throw_exception_if_processing_interrupted()
        progress.update(1)

    probes = Probes(sites, most, tick)
    probed = apply_toma(base, placed)
    told(1, 3)
    whole = _sample(probes.on(probed), task, tick)
    if (seen := _stats(probed)) is not None and seen.without_kv_cache == Reason.KV_FOREIGN_ATTENTION():
        # Another pack's attention asks nobody what to look at: a run goes on with other settings then.
        return calibrate(model, task, near, distance, {**overrides, "kv_cache": False}, told)
    told(2, 3)
    usual = apply_toma(base, config)
    beside = _sample(usual, task, tick)
    usual_distance = beside.distance(whole)

    def profile_of(
        settings: ToMAConfig, ratios: Mapping[str, Sequence[float]], above: Sequence[float], *predicted: float
    ) -> Profile:
        merging = {site: tuple(each) for site, each in ratios.items() if any(each)}
        return Profile(fingerprint(plain), changed(settings), tuple(above), merging, *predicted)

    merged, of_usual = _merged(probed), _merged(usual)
    work = Work(facts, merged | of_usual, len(probes.sigmas))
    saved = work.saved(sorted(of_usual), ratio, sum(len(band.steps) for band in probes.ratio_schedule))
    problem = None if math.isfinite(usual_distance) else _no_numbers(whole)
    short = _ran_short(usual)
    if not problem and short:
        problem = Problem.UNMEASURED()
    elif not problem and probes.sigmas and not probes.ratio_schedule:
        problem = Problem.TOO_FEW_STEPS(steps=task.steps)
    table = {} if problem else _table(probes, work, of_usual & merged, ratio, whole, beside)
    if not problem and distance is not None and saved > 0 and not any(table.values()):
        problem = Problem.UNMEASURED()
    chosen = nearest(table, saved) if distance is None else fastest(table, distance)
    above = [band.above for band in probes.ratio_schedule] or [0.0]
    ratios = {site: [chosen.ratio(site, level) for level in range(len(above))] for site in sites}
    profile = profile_of(placed, ratios, above, chosen.distance, chosen.work)
    names = [fact.name for fact in facts]
    found, nearer = 0.0, True
    if not profile.empty:
        told(3, 3)
        choice = apply_toma(base, placed, ratio_schedule=profile.ratio_schedule(names))
        made = _sample(choice, task, tick)
        found, nearer = made.distance(whole), made.mostly_nearer(beside, whole)
        if _ran_short(choice):
            short, problem, profile = True, Problem.UNMEASURED(), profile_of(placed, {}, [0.0])
    # A choice of nothing, where the preset merges something, is no choice: nothing could be told.
    enough = usual_distance * (1.0 if held(chosen.distance, found) else _DOUBTED)
    keeps = distance is None and not problem and saved > 0 and (profile.empty or not (found <= enough and nearer))
    if keeps:
        profile = profile_of(config, {site: [ratio] for site in sites}, [0.0], usual_distance, 1.0 - saved)
    elif not problem and not math.isfinite(found):
        profile, problem = profile_of(placed, {}, [0.0]), Problem.MERGED_NAN()
    progress.update_absolute(progress.total)
    return Calibrated(
        model=plain
        if profile.empty
        else apply_toma(plain, profile.config(), ratio_schedule=profile.ratio_schedule(names)),
        profile=None if problem and problem.id is not Problem.MERGED_NAN else profile,
        choices=front(table),
        chosen=chosen,
        found=found,
        usual=Usual(preset, ratio, 1.0 - saved, usual_distance),
        keeps_preset=keeps,
        probes=probes.made,
        problem=problem,
        short=short or probes.over or _ran_short(probed),
        without=without,
        unmeasured=[site for site, blocks in sites.items() if {*blocks} & of_usual and not probes.measured(site)],
    )


def _asked(model: ModelPatcher, task: Task) -> tuple[CFGGuider, Any]:
    """A guider with the task's conditions, and its sampler, to be asked what a run would do."""
    guider = CFGGuider(model)
    guider.set_conds(task.positive, task.positive if task.negative is None else task.negative)
    guider.set_cfg(1.0 if task.negative is None else task.cfg)
    guider.conds = guider.original_conds
    return guider, comfy.samplers.sampler_object(task.sampler)


def _settings(model: ModelPatcher, task: Task, settings: Settings) -> ToMAConfig:
    """What settings come to where this is sampled, see `patch_model.run_config`."""
    patched = apply_toma(model, settings)
    attachment = attachment_of(patched)
    if attachment is None:  # a ComfyUI that models cannot be attached to: nothing will be merged
        return settings.resolved()
    guider, sampler = _asked(patched, task)
    return run_config(attachment, guider, task.latent, sampler)[0]


def _sites_kept(model: ModelPatcher, config: ToMAConfig, task: Task) -> int:
    """How many sites' detail a run may hold: each has chains of its own, and videos give detail up above `MOST`."""
    hooks = registry.require(model.get_model_object("diffusion_model"))
    if task.latent.ndim < 5 or task.latent.shape[2] == 1:
        return _MOST_SITES
    guider, sampler = _asked(model, task)
    often, options = conditions_of(guider, sampler) * overlap_of(guider, task.latent), guider.model_options
    largest = max(fact.tokens * (fact.width or 1024) for fact in hooks.blocks(task.latent))
    updates, _ = hooks.kv_cache_numel(
        task.latent, config, options["transformer_options"], controlled=has_controls(guider)
    )
    held = largest * len(task.latent) * often * dtype_of(model).itemsize
    # What breaks chains anyhow is held besides.
    return max(1, int(0.9 * MOST / held) - max(0, updates // largest - 1))


def _ran_short(model: ModelPatcher) -> bool:
    """Whether memory ran out in the model's last run, so that the rest of it was whole."""
    stats = _stats(model)
    return stats is not None and any(reason.id in _OUT_OF_MEMORY for reason in stats.unmerged)


_OUT_OF_MEMORY = (Reason.KV_CACHE_DISABLED, Reason.OUT_OF_MEMORY_PLAN)


def _no_numbers(whole: Run) -> Message:
    return Problem.MERGED_NAN() if math.isfinite(float(whole.latent.sum())) else Problem.PLAIN_NAN()


@dataclass(frozen=True)
class Work:
    """What blocks cost, as shares of all blocks in a run of so many steps. merged: those that can be merged."""

    facts: Sequence[BlockFacts]
    merged: frozenset[str]
    steps: int

    def saved(self, blocks: Sequence[str], ratio: float, steps: int) -> float:
        """By merging these blocks in so many steps."""
        chosen = {*blocks} & self.merged
        saving = sum(_cost(f) - _cost(f, ratio) for f in self.facts if f.name in chosen)
        return saving / max(sum(map(_cost, self.facts)), 1e-12) * steps / max(self.steps, 1)

    def share(self, blocks: Sequence[str], of: frozenset[str]) -> float:
        """How many of a site's blocks are among others."""
        return len({*blocks} & of) / len(blocks)


def _cost(fact: BlockFacts, ratio: float = 0.0) -> float:
    return fact.work.flops(fact.tokens - round(ratio * fact.tokens), 1, fact.width or 1024)


def _table(probes: Probes, work: Work, usual: frozenset[str], usual_ratio: float, whole: Run, beside: Run) -> Table:
    """What there is to choose from. usual, usual_ratio: the blocks that the preset merges, and how much."""
    size = float(whole.states[-1].double().square().sum().clamp_min(1e-12))
    errors = filled(
        {place: error / size for place, error in probes.sites_found.items()},
        {place: error / size for place, error in probes.together.items()},
        list(probes.sites),
        RATIO,
        usual_ratio,
    )
    passed = [(1 - after / before) ** 2 for before, after in pairwise((*probes.sigmas, 0.0))]
    injected = [0.0] * len(passed)
    for level, band in enumerate(probes.ratio_schedule):
        there = sum(
            work.share(blocks, usual) * errors.get((site, level, usual_ratio), 0.0)
            for site, blocks in probes.sites.items()
        )
        for step in band.steps:
            injected[step] = passed[step] * there
    factors = amplified(beside.apart(whole, len(injected)), injected)
    return {
        (site, level): [
            Option(ratio, errors[site, level, ratio] * _sum(passed, factors, band), saving)
            for ratio in sorted({RATIO, *OTHERS, usual_ratio})
            if (site, level, ratio) in errors and (saving := work.saved(blocks, ratio, len(band.steps))) > 0
        ]
        for site, blocks in probes.sites.items()
        for level, band in enumerate(probes.ratio_schedule)
    }


def _sum(passed: Sequence[float], factors: Sequence[float], band: Band) -> float:
    return sum(passed[step] * factors[step] for step in band.steps)


def _merged(model: ModelPatcher) -> frozenset[str]:
    """The blocks that the model's last run merged."""
    stats = _stats(model)
    return frozenset() if stats is None else frozenset(stats.merged_blocks)


def _stats(model: ModelPatcher) -> RunStats | None:
    """Of the model's last run."""
    attachment = attachment_of(model)
    return None if attachment is None else last_runs.last(attachment.report_id)


def _sample(model: ModelPatcher, task: Task, tick: Callable[..., None]) -> Run:
    states: list[Tensor] = []

    def stepped(step: int, denoised: Any, x: Tensor, total: int) -> None:
        states.append(x.detach().float().cpu().clone())
        tick()

    latent = task.sample(model, stepped)
    end = model.model.process_latent_in(latent).float().cpu()
    return Run(latent, torch.stack([*states, end]))
