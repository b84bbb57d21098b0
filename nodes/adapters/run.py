"""Hang a config on a model, and give every sampling run its own state.

attach           -> config and three wrappers on a clone of the model
OUTER_SAMPLE     -> once a run: a fresh `Sampling`, dropped at the end, however the run ends
CALC_COND_BATCH  -> once an evaluation: the noise level becomes a `Decision`
APPLY_MODEL      -> once a batch of conditions: hooks are installed around the model call
"""

from __future__ import annotations

import logging
import uuid
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Protocol

from comfy.ldm.modules import attention
from comfy.model_patcher import ModelPatcher, create_model_options_clone
from comfy.patcher_extension import WrappersMP
from torch import Tensor

from ...toma_core import Decision, Evaluation, RunState, Schedule, ToMAConfig
from ...toma_core.stats import RunStats
from . import registry, reports
from .hooks import ATTACHMENT, EVALUATION, SAMPLING, installed

_KEY = "toma"


class Watcher(Protocol):
    """Whoever wants to know of a model's runs. Called twice a run, never in between; must not raise."""

    def began(self) -> None:
        """A run begins."""

    def ended(self, stats: RunStats) -> None:
        """The run is over, or broke off."""


@dataclass(frozen=True)
class Attachment:
    """What rides on a patched model: the frozen settings, the id under which its runs are reported, and who else wants
    to know of them."""

    config: ToMAConfig
    report_id: str
    watcher: Watcher | None = None


def attach(model: ModelPatcher, config: ToMAConfig, watcher: Watcher | None = None) -> ModelPatcher:
    """A clone of the model that merges tokens as `config` says; the very same object if that is never.

    Attaching to a model that already has ToMA replaces its settings. Raises `UnsupportedModelError`.
    """
    registry.require(model.get_model_object("diffusion_model"))
    attached = attachment_of(model) is not None
    if config.off and not attached:
        return model
    model = model.clone()
    for kind, _ in _WRAPPERS:
        model.remove_wrappers_with_key(kind, _KEY)
    options = model.model_options["transformer_options"]
    options.pop(ATTACHMENT, None)
    if config.off:
        return model
    options[ATTACHMENT] = Attachment(config, uuid.uuid4().hex, watcher)
    for kind, wrapper in _WRAPPERS:
        model.add_wrapper_with_key(kind, _KEY, wrapper)
    return model


def attachment_of(model: ModelPatcher) -> Attachment | None:
    """What `attach` left on this model or a clone of it."""
    return model.model_options.get("transformer_options", {}).get(ATTACHMENT)


@dataclass(eq=False)
class Sampling:
    """One sampling run: its state, and what the evaluation in progress is to do."""

    run: RunState
    decision: Decision
    areas: dict[Hashable, Hashable] = field(default_factory=dict)
    sigma: float | None = None
    seen: Counter[Hashable] = field(default_factory=Counter)

    @classmethod
    def start(cls, config: ToMAConfig, model_sampling: Any, sigmas: list[float]) -> Sampling:
        """A fresh run over a schedule of noise levels, the last of which is where it ends."""
        start = (
            float("inf") if config.start_percent <= 0 else float(model_sampling.percent_to_sigma(config.start_percent))
        )
        end = float("-inf") if config.end_percent >= 1 else float(model_sampling.percent_to_sigma(config.end_percent))
        run = RunState(Schedule(config, tuple(sigmas[:-1]), start, end))
        run.stats.total_steps = len(sigmas[:-1])
        return cls(run, Decision(0, 0.0, 0, 0))

    def observe(self, timestep: Tensor, conds: list[Any] = []) -> None:  # noqa: B006
        """Take note of an evaluation. The one place where sampling waits for the device: the noise level decides in
        Python whether to merge, and samplers keep it in a tensor."""
        sigma = float(timestep.flatten()[0])
        if sigma != self.sigma:
            self.sigma = sigma
            self.seen.clear()
        self.decision = self.run.schedule.decide(sigma)
        self.run.stats.count_evaluation(self.decision.step, self.decision.merged_ratio)
        for cond in (c for group in conds if group is not None for c in group):
            if "uuid" in cond and cond.get("area") is not None:
                self.areas[cond["uuid"]] = tuple(cond["area"])

    def copies(self, batch: int, transformer_options: dict[str, Any]) -> tuple[Hashable, ...]:
        """For each chunk of the batch, which part of the latent it shows: cond and uncond of one area share plans."""
        chunks, frames = _chunks(batch, transformer_options)
        return tuple((self.areas.get(chunk), frames) for chunk in chunks)

    def parts(self, batch: int, transformer_options: dict[str, Any]) -> tuple[Hashable, ...]:
        """For each chunk of the batch, what tells it from all others at this noise level: its condition (which has an
        area of its own), the images in it, and how many calls came before it with the same, as tiles and perturbed
        guidance make them."""
        chunks, frames = _chunks(batch, transformer_options)
        parts = []
        for chunk in chunks:
            self.seen[chunk, frames] += 1
            parts.append((chunk, frames, self.seen[chunk, frames]))
        return tuple(parts)

    def __deepcopy__(self, memo: dict[int, Any]) -> Sampling:
        # Options may be deep-copied by others while sampling; a copy must go on counting in this run.
        return self


def _chunks(batch: int, transformer_options: dict[str, Any]) -> tuple[tuple[Hashable, ...], Hashable]:
    """The ids of the conditions in a batch, one per equal chunk, and which images of a longer series it holds."""
    window = transformer_options.get("context_window")
    frames = None if window is None else tuple(getattr(window, "index_list", ()))
    chunks = tuple(transformer_options.get("uuids") or (None,))
    return (chunks if batch % len(chunks) == 0 else (None,)), frames


def _outer_sample(
    executor: Any, noise: Tensor, latent_image: Tensor, sampler: Any, sigmas: Tensor, *args: Any, **kwargs: Any
) -> Any:
    guider = executor.class_obj
    given = guider.model_options
    attachment = given["transformer_options"][ATTACHMENT]
    model_sampling = guider.model_patcher.get_model_object("model_sampling")
    sampling = Sampling.start(attachment.config, model_sampling, sigmas.tolist())
    guider.model_options = create_model_options_clone(given)
    guider.model_options["transformer_options"][SAMPLING] = sampling
    sampling.run.stats.attention = attention_in_use(guider.model_options["transformer_options"])
    if attachment.watcher is not None:
        attachment.watcher.began()
    try:
        result = executor(noise, latent_image, sampler, sigmas, *args, **kwargs)
        sampling.run.draw()
        return result
    finally:
        guider.model_options = given
        stats = sampling.run.close()
        reports.keep(attachment.report_id, stats)
        logging.info("ToMA: %s", stats.summary())
        if attachment.watcher is not None:
            attachment.watcher.ended(stats)


def attention_in_use(transformer_options: dict[str, Any]) -> str:
    """What computes attention, on merged tokens too: ComfyUI's choice, or what another node put in its place."""
    chosen = str(attention.optimized_attention.__name__).removeprefix("attention_")
    override = transformer_options.get("optimized_attention_override")
    if override is None:
        return chosen
    where = getattr(override, "__module__", None) or type(override).__module__
    return f"{chosen}, overridden by {where.rpartition('custom_nodes.')[2]}"


def _calc_cond_batch(
    executor: Any, model: Any, conds: Any, x_in: Tensor, timestep: Tensor, model_options: dict[str, Any], *args: Any
) -> Any:
    sampling = model_options["transformer_options"].get(SAMPLING)
    if sampling is not None:
        sampling.observe(timestep, conds)
    return executor(model, conds, x_in, timestep, model_options, *args)


def _apply_model(
    executor: Any,
    x: Tensor,
    t: Tensor,
    c_concat: Any = None,
    c_crossattn: Any = None,
    control: Any = None,
    transformer_options: dict[str, Any] = {},  # noqa: B006
    **kwargs: Any,
) -> Any:
    def call(options: dict[str, Any]) -> Any:
        return executor(x, t, c_concat, c_crossattn, control, options, **kwargs)

    sampling = transformer_options.get(SAMPLING) or _lone_evaluation(executor.class_obj, t, transformer_options)
    if sampling is None or not sampling.decision.ratio:
        return call(transformer_options)
    hooks = registry.find(executor.class_obj.diffusion_model)
    if hooks is None or x.ndim != 4:
        sampling.run.stats.whole("model", "a model or latent of unknown kind")
        return call(transformer_options)
    chunks = sampling.copies(x.shape[0], transformer_options), sampling.parts(x.shape[0], transformer_options)
    evaluation = Evaluation(sampling.run, sampling.decision, *chunks)
    with installed(hooks.select(x, evaluation, transformer_options, control)):
        return call({**transformer_options, EVALUATION: evaluation})


def _lone_evaluation(model: Any, t: Tensor, transformer_options: dict[str, Any]) -> Sampling | None:
    """State for a call of the model outside of a sampling run: it lives as long as the call."""
    attachment = transformer_options.get(ATTACHMENT)
    if attachment is None:
        return None
    sigmas = transformer_options.get("sample_sigmas")
    sampling = Sampling.start(attachment.config, model.model_sampling, [] if sigmas is None else sigmas.tolist())
    sampling.observe(t)
    return sampling


_WRAPPERS = (
    (WrappersMP.OUTER_SAMPLE, _outer_sample),
    (WrappersMP.CALC_COND_BATCH, _calc_cond_batch),
    (WrappersMP.APPLY_MODEL, _apply_model),
)
