"""ToMA Calibrate: measure the error of merging in each part of a model, choose ratios, and return the merged model and
a profile.

A site is a group of blocks with one ratio. A probe evaluates the model once more, with one site or all sites merged.
There are three sampling runs:

1. unmerged, with probes         measures the error of each site
2. merged by the preset          measures the preset's error and the work that it saves
3. merged by the chosen ratios   measures their error
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import comfy.samplers
from comfy.model_patcher import ModelPatcher
from comfy_api.latest import io, ui
from torch import Tensor

from ..toma_core import ToMAConfig, UserSettings
from ..toma_core.calibration import UNMERGED, Cell, Option, choose, saved_by
from ..toma_core.config import ConfigError, Refusal, shown
from ..toma_core.profile import Profile
from ..toma_core.reasons import Message, MessageId
from . import widgets
from .adapters.attachment import config_for, last_stats
from .adapters.family import BlockFacts
from .adapters.patch_model import apply_toma
from .adapters.probe import MAX_BANDS, Probes, sites_of, without_caches
from .adapters.registry import blocks_of, fingerprint
from .node_status import said, status_of
from .report_charts import MERGED, RECOMMENDED, Bar, Caption, as_image, bar_chart
from .task import OnRun, Task, error, progress

# Target -> (preset, ratio). The ratios that are chosen save as much work as this preset at this ratio.
TARGETS = {"quality": ("quality", 0.5), "balanced": ("balanced", 0.5), "fast": ("balanced", 0.6)}
_PROBES = 1.2  # number of evaluations for probes, divided by the evaluations of a sampling run
_MIN_SITES, _MAX_SITES = 6, 12


class ToMACalibrate(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return widgets.schema(
            "ToMACalibrate",
            [
                io.Model.Input("model"),
                io.Conditioning.Input("positive"),
                io.Latent.Input("latent"),
                io.Combo.Input("target", options=[*TARGETS], default="balanced"),
                io.Int.Input("steps", default=20, min=2, max=100),
                io.Float.Input("cfg", default=4.0, min=0.0, max=100.0, step=0.1),
                io.Combo.Input("sampler_name", options=comfy.samplers.KSampler.SAMPLERS),
                io.Combo.Input("scheduler", options=comfy.samplers.KSampler.SCHEDULERS),
                io.Conditioning.Input("negative", optional=True),
            ],
            io.Model.Output(),
            io.String.Output("profile"),
            io.Image.Output("plot"),
            words=["calibrate", "profile"],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, model: Any, target: str, **sampled: Any) -> io.NodeOutput:
        with status_of(cls.hidden) as status:
            task = Task.of_inputs(model, **sampled)
            if target not in TARGETS:
                raise ConfigError(Refusal.NOT_A_CHOICE(setting="target", value=shown(target), choices=tuple(TARGETS)))
            found = calibrate(model, task, target, on_run=status.measures)
        image = as_image(bar_chart(_bars(found, target)))
        used = [] if task.negative is None or found.problem or cls.hidden is None else _cfgs_of_samplers(cls.hidden)
        warnings = [Found.OTHER_CFG(cfg=task.cfg, used=other) for other in used if other != task.cfg]
        page = {**ui.PreviewImage(image, cls=cls).as_dict(), **said([*warnings[:1], *_notes(found, target)])}
        return io.NodeOutput(found.model, found.profile.text() if found.profile else "", image, ui=page)


class Found(MessageId):
    """Messages on the result of a calibration. A comment beside an id names the parameters of the message."""

    LESS_ERROR = "less_error"  # error, before, percent
    PRESET_KEPT = "preset_kept"  # preset, error
    PRESET = "preset_found"  # parameters: preset, ratio, error, percent
    FULL_STEPS = "preset_has_full_steps"  # preset
    NOTHING = "nothing_to_calibrate"
    PLAIN_NAN = "plain_nan"
    MERGED_NAN = "merged_nan"
    OTHER_CFG = "other_cfg"  # cfg, used


@dataclass(frozen=True)
class Calibrated:
    model: ModelPatcher  # merged by the profile
    profile: Profile | None = None  # the chosen ratios, or the preset's if `keeps_preset`; None with a `problem`
    errors: tuple[float, float] = (0.0, 0.0)  # error of the preset, and of the chosen ratios
    work: tuple[float, float] = (1.0, 1.0)  # share of the blocks' work left by the preset, and by the chosen ratios
    # Whether the profile keeps the preset's ratio. The chosen ratios are used only if they lower the error of the whole
    # batch, and raise it in fewer than half of the images.
    keeps_preset: bool = False
    problem: Message | None = None  # why nothing was measured or chosen


def calibrate(
    model: ModelPatcher, task: Task, target: str, overrides: Mapping[str, Any] = {}, on_run: OnRun = lambda *_: None
) -> Calibrated:
    """Measure a model, and choose ratios that need as much work as the target's preset, see `TARGETS`. If this preset
    has full steps, measure nothing and return the model merged by the preset: no choice of ratios had less error than
    such a preset (benchmarks/results/fidelity/calibrated.md). The given model is not changed, and its own ToMA settings
    are ignored. overrides: values that override the preset's. Raises `UnsupportedModelError`, and ComfyUI's own
    exception if the user cancels."""
    plain, (preset, ratio) = apply_toma(model, ToMAConfig(ratio=0.0)), TARGETS[target]
    settings = UserSettings(preset, {"ratio": ratio, **overrides})
    config = config_for(settings, model)
    if config.full_step_interval:
        return Calibrated(apply_toma(plain, settings), problem=Found.FULL_STEPS(preset=preset))
    base = without_caches(plain)
    facts = blocks_of(base, task.latent)
    names = [fact.name for fact in facts]
    budget = round(_PROBES * task.steps * task.conditions)
    sites = sites_of(facts, min(_MAX_SITES, max(_MIN_SITES, budget // MAX_BANDS - 1)))
    tick = progress(3 * task.steps + MAX_BANDS * (len(sites) + 2))

    def run(number: int, model: ModelPatcher) -> tuple[Tensor, frozenset[str]]:
        on_run(number, 3)
        latent = task.sample(model, tick)
        stats = last_stats(model)
        return latent, frozenset(() if stats is None else stats.merged_blocks)

    def merged(on: ModelPatcher, profile: Profile) -> ModelPatcher:
        return apply_toma(on, profile.config, ratio_schedule=profile.ratio_schedule(names))

    probes = Probes(sites, tick)
    everywhere = replace(config, skip_first_blocks=0.0, skip_last_blocks=0.0)
    unmerged, mergeable = run(1, probes.on(base, everywhere))
    usual, merged_by_preset = run(2, apply_toma(base, config))
    before = error(usual, unmerged)
    saved = _saving(facts, merged_by_preset, ratio)
    if not math.isfinite(before):
        return Calibrated(plain, problem=Found.MERGED_NAN() if unmerged.isfinite().all() else Found.PLAIN_NAN())
    if not saved:
        return Calibrated(plain, problem=Found.NOTHING())
    choice = choose(_table(probes, facts, mergeable | merged_by_preset), saved)
    above = tuple(band.above for band in probes.bands) or (0.0,)
    ratios = {site: tuple(choice.get((site, band), UNMERGED).ratio for band in range(len(above))) for site in sites}
    profile = Profile(fingerprint(plain), everywhere, above, {site: each for site, each in ratios.items() if any(each)})
    chosen = run(3, merged(base, profile))[0] if choice else usual
    after = error(chosen, unmerged)
    keeps = not (after < before and _mostly_closer(chosen, usual, unmerged))
    if keeps:
        profile = replace(profile, config=config, above=(0.0,), ratios=dict.fromkeys(sites, (ratio,)))
    work = 1.0 - saved, 1.0 - saved_by(choice)
    return Calibrated(merged(plain, profile), profile, (before, after), work, keeps)


def _saving(facts: Sequence[BlockFacts], blocks: Container[str], ratio: float) -> float:
    """Return the share of all blocks' work that merging `blocks` at this ratio saves."""
    saving = sum(fact.flops() - fact.flops(ratio) for fact in facts if fact.name in blocks)
    return saving / max(sum(fact.flops() for fact in facts), 1e-12)


def _table(probes: Probes, facts: Sequence[BlockFacts], mergeable: frozenset[str]) -> dict[Cell, list[Option]]:
    """Return the options of every cell (site, band of noise levels). `Option.saved` is a share of all blocks' work."""
    # For each step: the share of the predicted image's error that the step passes to the latent, squared. How this
    # error grows in later steps is left out: estimates of the growth did not improve the choices on a trained UNet.
    passed = [(1 - after / before) ** 2 for before, after in pairwise((*probes.sigmas, 0.0))]
    table: dict[Cell, list[Option]] = {}
    for (site, number, ratio), squared in probes.squared_errors().items():
        steps = probes.bands[number].steps
        saving = _saving(facts, mergeable.intersection(probes.sites[site]), ratio) * len(steps) / len(passed)
        if saving > 0:
            option = Option(ratio, squared * sum(passed[step] for step in steps), saving)
            table.setdefault((site, number), []).append(option)
    return table


def _mostly_closer(latent: Tensor, than: Tensor, unmerged: Tensor) -> bool:
    """Return whether more than half of the images have no more error in `latent` than in `than`."""
    mine, others = ((each - unmerged).flatten(1).norm(dim=1) for each in (latent, than))
    return bool((mine <= others).float().mean() > 0.5)


def _cfgs_of_samplers(hidden: Any) -> list[float]:
    """Return the cfg of every sampler in ComfyUI's prompt that gets this node's model."""
    prompt = hidden.prompt or {}
    reached = [str(hidden.unique_id)]
    found = list[float]()
    for source in reached:
        for node_id, node in prompt.items():
            inputs = node.get("inputs", {})
            link = inputs.get("model")
            if isinstance(link, list) and link and str(link[0]) == source and node_id not in reached:
                reached.append(node_id)
                found += [float(inputs["cfg"])] if isinstance(inputs.get("cfg"), (int, float)) else []
    return found


def _notes(found: Calibrated, target: str) -> list[Message | str]:
    if found.problem is not None:
        return [found.problem]
    (before, after), (usual, work), (preset, ratio) = found.errors, found.work, TARGETS[target]
    answer = Found.LESS_ERROR(error=after, before=before, percent=100 * work)
    if found.keeps_preset:
        answer = Found.PRESET_KEPT(preset=preset, error=after)
    return [answer, Found.PRESET(preset=preset, ratio=ratio, error=before, percent=100 * usual), "", Caption.WORK()]


def _bars(found: Calibrated, target: str) -> list[Bar]:
    names, colours = (TARGETS[target][0], "profile"), (MERGED, RECOMMENDED)
    rows = () if found.problem else zip(names, found.work, found.errors, colours, strict=True)
    label = "{:.0f} % of the work, error {:.3f}".format
    return [Bar(name, work, label(100 * work, by), colour, error=by) for name, work, by, colour in rows]
