"""Choose ratios for the model at hand from three sampling runs.

1. unmerged and probed         the errors of sites
2. the preset                  how errors grow until the end, and how much work there is to save
3. the choice                  its error, beside the predicted one and the preset's
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
from ..toma_core.cache import MAX_CACHE_BYTES
from ..toma_core.calibration import Choice, Option, Table, amplified, fastest, filled, front, held, nearest
from ..toma_core.profile import Profile, changed
from ..toma_core.reasons import Message, MessageId, Reason
from ..toma_core.stats import RunStats
from .adapters import last_runs, registry
from .adapters.blocks import BlockFacts
from .adapters.fingerprint import blocks_of, fingerprint
from .adapters.kv_memory import conditions_of, dtype_of, has_controls, overlap_of
from .adapters.patch_model import apply_toma, attachment_of, run_config
from .adapters.probe import OTHERS, RATIO, Probes, sites_of
from .adapters.streams import first_of_nested
from .adapters.without_caches import without_caches
from .task import Task, error

# Target -> the preset and ratio whose work a choice may have. Above 0.6 transformers have a larger error than in fewer
# steps (benchmarks/results/fidelity/tables.md).
TARGETS: Mapping[str, tuple[str, float]] = {
    "quality": ("quality", 0.5),
    "balanced": ("balanced", 0.5),
    "fast": ("balanced", 0.6),
}

# Extra evaluations, as a share of the run's own: with the preset's run they are about two runs.
_PROBES, _MIN_PROBES = 1.2, 22
_MAX_SITES, _MIN_SITES = 12, 6
# Share of the preset's error that a choice must reach if its prediction failed: a few images may flatter it.
_DOUBTED = 0.8
_OUT_OF_MEMORY = (Reason.KV_CACHE_DISABLED, Reason.OUT_OF_MEMORY_PLAN)


class Problem(MessageId):
    """Why nothing was chosen."""

    UNSUPPORTED = "cannot_calibrate"  # model
    UNMEASURED = "unmeasured"
    TOO_FEW_STEPS = "unmeasured_steps"  # steps
    PLAIN_NAN = "plain_nan"
    MERGED_NAN = "merged_nan"


@dataclass(frozen=True)
class Run:
    """One sampling run.

    Attributes:
        latent: The result, (B, C, ..., H, W), fp32 on the CPU.
        states: What the model was given before each step, and the result as it would be given: (n + 1, B, ...).
    """

    latent: Tensor
    states: Tensor

    def error(self, unmerged: Run) -> float:
        """Return the relative L2 error of the final latent."""
        return error(self.latent, unmerged.latent)

    def squared_errors(self, unmerged: Run, steps: int) -> list[float]:
        """Return the squared errors before each step and at the end, on the scale of `error`. All but the last are 0
        for a sampler that does not report every step."""
        end = self.error(unmerged) ** 2
        if not len(self.states) == len(unmerged.states) == steps + 1:
            return [*[0.0] * steps, end]
        squares = (self.states - unmerged.states).double().square().flatten(1).sum(1).tolist()
        return [end * each / max(squares[-1], 1e-12) for each in squares]

    def mostly_closer(self, than: Run, unmerged: Run) -> bool:
        """Whether more than half of the images are at least as close as another run's: one outlier decides nothing."""
        mine, others = ((run.latent - unmerged.latent).flatten(1).norm(dim=1) for run in (self, than))
        return bool((mine <= others).float().mean() > 0.5)


@dataclass(frozen=True)
class Usual:
    """A preset at a ratio, the share of the blocks' work that it leaves, and its error."""

    preset: str
    ratio: float
    work: float
    error: float


@dataclass(frozen=True)
class Calibrated:
    """What a calibration found.

    Attributes:
        model: Merged as `profile` says: by the choice, or by the preset where that is closer, or not at all.
        profile: None where nothing was found out.
        choices: The front.
        chosen: The choice, with its predicted error and work.
        found: Measured error of the choice.
        usual: The preset.
        keeps_preset: The choice is not closer, or not in most images.
        probes: Evaluations beside the sampling runs.
        problem: Why nothing was chosen.
        short: Memory ran out.
        without: Parts of the model that were left out of measuring.
        unmeasured: Sites that the preset merges and that could not be measured.
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
        return held(self.chosen.error, self.found)


def calibrate(
    model: ModelPatcher,
    task: Task,
    target: str,
    limit: float | None = None,
    overrides: Mapping[str, Any] = {},
    on_run: Callable[[int, int], None] = lambda run, runs: None,
) -> Calibrated:
    """Measure a model and choose: for the work of one of `TARGETS`, or the least work within an error.

    The model is not changed; ToMA that it carries is left out. Raises `UnsupportedModelError`, and ComfyUI's own
    exception when the user cancels.

    Args:
        limit: The largest error, in place of the work of the target.
        overrides: Settings on top of the preset's.
        on_run: Called with the number of the run that begins, and of all runs.
    """
    plain = apply_toma(model, ToMAConfig(ratio=0.0))
    base, without = without_caches(plain)
    preset, ratio = TARGETS[target]
    config = _run_config(base, task, Settings(preset, {"ratio": ratio, **overrides}))
    settings = replace(config, ratio=RATIO, skip_first_blocks=0.0, skip_last_blocks=0.0)
    facts, budget = blocks_of(base, task.latent), round(_PROBES * task.steps * task.conditions)
    if not facts:
        raise registry.UnsupportedModelError(Problem.UNSUPPORTED(model=type(base.model.diffusion_model).__name__))
    sites = sites_of(facts, min(_MAX_SITES, max(_MIN_SITES, budget // 2 - 2), _max_sites(base, settings, task)))
    progress = comfy.utils.ProgressBar(3 * task.steps + max(budget, _MIN_PROBES))

    def tick(*_: Any) -> None:
        comfy.model_management.throw_exception_if_processing_interrupted()
        progress.update(1)

    def run(number: int, model: ModelPatcher) -> tuple[Run, RunStats | None]:
        on_run(number, 3)
        made, attachment = _sample(model, task, tick), attachment_of(model)
        return made, None if attachment is None else last_runs.last(attachment.report_id)

    def profile_of(
        config: ToMAConfig, ratios: Mapping[str, Sequence[float]], above: Sequence[float] = (0.0,), *predicted: float
    ) -> Profile:
        merging = {site: tuple(each) for site, each in ratios.items() if any(each)}
        return Profile(fingerprint(plain), changed(config), tuple(above), merging, *predicted)

    def merged(profile: Profile, on: ModelPatcher) -> ModelPatcher:
        schedule = profile.ratio_schedule([fact.name for fact in facts])
        return apply_toma(on, profile.config(), ratio_schedule=schedule)

    probes = Probes(sites, budget, tick)
    unmerged, seen = run(1, probes.on(apply_toma(base, settings)))
    if seen is not None and seen.without_kv_cache == Reason.KV_FOREIGN_ATTENTION():
        # The attention of another pack cannot attend to all tokens: a run then goes on with other settings.
        return calibrate(model, task, target, limit, {**overrides, "kv_cache": False}, on_run)
    beside, usual = run(2, apply_toma(base, config))
    usual_error, usual_blocks = beside.error(unmerged), _merged(usual)
    work = Work(facts, _merged(seen) | usual_blocks, len(probes.sigmas))
    saved = work.saved(usual_blocks, ratio, sum(len(band.steps) for band in probes.bands))
    short, problem = _ran_short(usual), None
    if not math.isfinite(usual_error):
        finite = math.isfinite(float(unmerged.latent.sum()))
        problem = Problem.MERGED_NAN() if finite else Problem.PLAIN_NAN()
    elif short:
        problem = Problem.UNMEASURED()
    elif probes.sigmas and not probes.bands:
        problem = Problem.TOO_FEW_STEPS(steps=task.steps)
    table = {} if problem else _table(probes, work, usual_blocks & _merged(seen), ratio, unmerged, beside)
    if not problem and limit is not None and saved > 0 and not any(table.values()):
        problem = Problem.UNMEASURED()
    chosen = nearest(table, saved) if limit is None else fastest(table, limit)
    above = [band.above for band in probes.bands] or [0.0]
    ratios = {site: [chosen.ratio(site, band) for band in range(len(above))] for site in sites}
    profile = profile_of(settings, ratios, above, chosen.error, chosen.work)
    found, closer = 0.0, True
    if not profile.empty:
        made, stats = run(3, merged(profile, base))
        found, closer = made.error(unmerged), made.mostly_closer(beside, unmerged)
        if _ran_short(stats):
            short, problem, profile = True, Problem.UNMEASURED(), profile_of(settings, {})
    # Choosing nothing where the preset merges something means that nothing could be measured.
    enough = usual_error * (1.0 if held(chosen.error, found) else _DOUBTED)
    keeps = limit is None and not problem and saved > 0 and (profile.empty or not (found <= enough and closer))
    if keeps:
        profile = profile_of(config, {site: [ratio] for site in sites}, [0.0], usual_error, 1.0 - saved)
    elif not problem and not math.isfinite(found):
        profile, problem = profile_of(settings, {}), Problem.MERGED_NAN()
    progress.update_absolute(progress.total)
    return Calibrated(
        model=plain if profile.empty else merged(profile, plain),
        profile=None if problem and problem.id is not Problem.MERGED_NAN else profile,
        choices=front(table),
        chosen=chosen,
        found=found,
        usual=Usual(preset, ratio, 1.0 - saved, usual_error),
        keeps_preset=keeps,
        probes=probes.evaluations,
        problem=problem,
        short=short or probes.out_of_memory or _ran_short(seen),
        without=without,
        unmeasured=[s for s, blocks in sites.items() if {*blocks} & usual_blocks and not probes.measured(s)],
    )


def _guider(model: ModelPatcher, task: Task) -> tuple[CFGGuider, Any]:
    """Return a guider with the task's conditions, and its sampler, which show what a run would do."""
    guider = CFGGuider(model)
    guider.set_conds(task.positive, task.positive if task.negative is None else task.negative)
    guider.set_cfg(1.0 if task.negative is None else task.cfg)
    guider.conds = guider.original_conds
    return guider, comfy.samplers.sampler_object(task.sampler)


def _run_config(model: ModelPatcher, task: Task, settings: Settings) -> ToMAConfig:
    """Return the settings of a run of this task, see `patch_model.run_config`."""
    patched = apply_toma(model, settings)
    attachment = attachment_of(patched)
    if attachment is None:  # a ComfyUI whose models cannot be patched: nothing will be merged
        return settings.resolved()
    guider, sampler = _guider(patched, task)
    numbers = sum(each[0].numel() for each in (task.latent, *task.others))
    packed = (len(task.latent), 1, numbers) if task.others else task.latent.shape  # as ComfyUI packs streams
    return run_config(attachment, guider, task.latent, sampler, packed)[0]


def _max_sites(model: ModelPatcher, config: ToMAConfig, task: Task) -> int:
    """Return how many sites' residuals fit into the cache: each has its own chains, and for videos it is limited."""
    if task.latent.ndim < 5 or task.latent.shape[2] == 1:
        return _MAX_SITES
    hooks = registry.require(model.get_model_object("diffusion_model"))
    guider, sampler = _guider(model, task)
    options = guider.model_options["transformer_options"]
    largest = max(fact.tokens * (fact.width or 1024) for fact in hooks.blocks(task.latent))
    updates, _ = hooks.kv_cache_numel(task.latent, config, options, controlled=has_controls(guider))
    evaluations = conditions_of(guider, sampler) * overlap_of(guider, task.latent)
    site_bytes = largest * len(task.latent) * evaluations * dtype_of(model).itemsize
    # Chains that the model breaks are cached besides.
    return max(1, int(0.9 * MAX_CACHE_BYTES / site_bytes) - max(0, updates // largest - 1))


@dataclass(frozen=True)
class Work:
    """Work of blocks, as shares of all blocks in a run."""

    facts: Sequence[BlockFacts]
    merged: frozenset[str]  # names of those that can be merged
    steps: int

    def saved(self, blocks: Sequence[str] | frozenset[str], ratio: float, steps: int) -> float:
        """Return what merging these blocks in some of the steps saves."""
        chosen = {*blocks} & self.merged
        saving = sum(_flops(f) - _flops(f, ratio) for f in self.facts if f.name in chosen)
        return saving / max(sum(map(_flops, self.facts)), 1e-12) * steps / max(self.steps, 1)


def _flops(fact: BlockFacts, ratio: float = 0.0) -> float:
    return fact.work.flops(fact.tokens - round(ratio * fact.tokens), 1, fact.width or 1024)


def _table(probes: Probes, work: Work, usual: frozenset[str], usual_ratio: float, unmerged: Run, beside: Run) -> Table:
    """Return the options of every cell. usual, usual_ratio: the blocks that the preset merges, and its ratio."""
    size = float(unmerged.states[-1].double().square().sum().clamp_min(1e-12))
    single = {cell: error / size for cell, error in probes.site_errors.items()}
    joint = {key: error / size for key, error in probes.joint_errors.items()}
    errors = filled(single, joint, list(probes.sites), RATIO, usual_ratio)
    passed = [(1 - after / before) ** 2 for before, after in pairwise((*probes.sigmas, 0.0))]
    injected = [0.0] * len(passed)
    for band, steps in enumerate(each.steps for each in probes.bands):
        added = sum(
            len({*blocks} & usual) / len(blocks) * errors.get((site, band, usual_ratio), 0.0)
            for site, blocks in probes.sites.items()
        )
        for step in steps:
            injected[step] = passed[step] * added
    factors = amplified(beside.squared_errors(unmerged, len(injected)), injected)
    table = {}
    for site, blocks in probes.sites.items():
        for band, steps in enumerate(each.steps for each in probes.bands):
            weight = sum(passed[step] * factors[step] for step in steps)
            table[site, band] = [
                Option(ratio, errors[site, band, ratio] * weight, saving)
                for ratio in sorted({RATIO, *OTHERS, usual_ratio})
                if (site, band, ratio) in errors and (saving := work.saved(blocks, ratio, len(steps))) > 0
            ]
    return table


def _ran_short(stats: RunStats | None) -> bool:
    """Whether memory ran out in a run, so that the rest of it was not merged."""
    return stats is not None and any(reason.id in _OUT_OF_MEMORY for reason in stats.unmerged)


def _merged(stats: RunStats | None) -> frozenset[str]:
    """Return the blocks that a run merged."""
    return frozenset() if stats is None else frozenset(stats.merged_blocks)


def _sample(model: ModelPatcher, task: Task, tick: Callable[..., None]) -> Run:
    states: list[Tensor] = []

    def stepped(step: int, denoised: Any, x: Tensor, total: int) -> None:
        states.append(first_of_nested(x).detach().float().cpu().clone())
        tick()

    latent = task.sample(model, stepped)
    end = model.model.process_latent_in(latent).float().cpu()
    return Run(latent, torch.stack([*states, end]))
