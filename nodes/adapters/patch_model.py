"""Attach settings to a model, and give every sampling run its own state.

apply_toma       -> settings and three wrappers on a clone of the model
OUTER_SAMPLE     -> once a run: a new `SamplingRun`, dropped at the end, however the run ends
PREPARE_SAMPLING -> when ComfyUI loads the model for a run with a KV cache: reserves the cache's memory
PREDICT_NOISE    -> once an evaluation of the sampler; each run adds this wrapper in front of all other wrappers
CALC_COND_BATCH  -> once for all conditions of an evaluation: its noise level becomes a `StepPlan`
APPLY_MODEL      -> once a batch of conditions: hooks are installed around the model call
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import comfy.model_management
import torch
from comfy.model_patcher import ModelPatcher, create_model_options_clone
from comfy.patcher_extension import WrappersMP
from torch import Tensor, nn

from ...toma_core import StepMode, ToMAConfig, UserSettings
from ...toma_core.reasons import Message, Reason
from ...toma_core.schedule import RatioSchedule
from . import registry, streams
from .attachment import Attachment, Watcher, attachment_of, config_for, keep_stats
from .compat import (
    OwnError,
    UnmergedError,
    UnsupportedApiError,
    argument,
    comfyui_lines,
    end_interrupted,
    optional_api,
    own_code,
    require_api,
    warn,
    warned,
    with_argument,
)
from .compile_ops import allow_more_graphs, compiled, in_one_piece
from .conditions import positions_of
from .contents import Contents
from .family import ModelHooks
from .kv_memory import KVCachePlan, host_of, measure_room, plan_kv_cache, reserved
from .merged_call import merged_call
from .model_hooks import ATTACHMENT, GRAPHS, RIDING, SAMPLING
from .origin import unwrapped, wrapped_by_others
from .report_text import summary
from .sampling_run import SamplingRun
from .sigmas import SigmaTracker, enlarges

_KEY = "toma"


def apply_toma(
    model: ModelPatcher,
    settings: UserSettings | ToMAConfig,
    watcher: Watcher | None = None,
    ratio_schedule: RatioSchedule = (),
) -> ModelPatcher:
    """Return a clone of the model that merges tokens by these settings; the model itself if the settings switch merging
    off.

    ratio_schedule: ratios by block and noise level, which replace the ratio of the settings. Any settings that the
    model already carries are replaced. If the models of this ComfyUI cannot be patched in the way that this pack knows,
    log a warning and return the model itself. Raises `UnsupportedModelError`.
    """
    registry.require(model.get_model_object("diffusion_model"))
    if settings.off and attachment_of(model) is None:
        return model
    try:
        with require_api("ModelPatcher"):
            wrappers = {
                WrappersMP.OUTER_SAMPLE: _outer_sample,
                WrappersMP.CALC_COND_BATCH: _calc_cond_batch,
                WrappersMP.APPLY_MODEL: _apply_model,
            }
            patched = model.clone()
            for kind in wrappers:
                patched.remove_wrappers_with_key(kind, _KEY)
            options = patched.model_options["transformer_options"]
            options.pop(ATTACHMENT, None)
            if not settings.off:
                options[ATTACHMENT] = Attachment(settings, uuid.uuid4().hex, watcher, ratio_schedule)
                for kind, wrapper in wrappers.items():
                    patched.add_wrapper_with_key(kind, _KEY, wrapper)
            return patched
    except UnsupportedApiError as error:
        warn(error)
        return model


def _outer_sample(executor: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        with require_api("WrappersMP.OUTER_SAMPLE"):
            guider = executor.class_obj
            model, conds, options_before = guider.model_patcher, guider.conds, guider.model_options
            attachment = options_before["transformer_options"][ATTACHMENT]
            model_sampling = model.get_model_object("model_sampling")
            sigmas = argument(args, kwargs, 3, "sigmas").tolist()
            packed = argument(args, kwargs, 0, "noise")
            shapes = kwargs.get("latent_shapes")
            sampler = argument(args, kwargs, 2, "sampler")
            options = create_model_options_clone(options_before)
        with own_code():
            noise = streams.first(packed, shapes)
            config, kv_plan = run_config(attachment, guider, noise, sampler, packed.shape, sigmas)
            if config.kv_cache and enlarges(sampler):
                kv_plan = KVCachePlan(reason=kv_plan.reason)  # no cache, because this sampler's steps are all full
            video = noise.ndim > 4 and getattr(registry.find(model.model.diffusion_model), "takes_frames", False)
            sampling = SamplingRun.start(config, model_sampling, sigmas, attachment.ratio_schedule, video)
            sampling.shapes = shapes
            sampling.config_for = partial(config_for, attachment.settings, model)
            cache = sampling.run.cache
            cache.quantized = kv_plan.quantized
            cache.reserved, cache.on_card = kv_plan.bytes, kv_plan.on_card
            cache.host = host_of(kv_plan, model.load_device)
            sampling.contents = Contents(conds)
            planned = sampling.run.stats
            planned.without_kv_cache, planned.kv_skipped = kv_plan.reason, kv_plan.skipped
            planned.comfyui = comfyui_lines()
            options["transformer_options"][SAMPLING] = sampling
            options["transformer_options"][GRAPHS] = inside = compiled(options_before)
            if in_one_piece(options_before):
                sampling.obstacle = Reason.FULLGRAPH()
            if kv_plan.bytes:
                _wrap_first(options["transformer_options"], "PREPARE_SAMPLING", _prepare_sampling)
            if _wrap_first(options["transformer_options"], "PREDICT_NOISE", _predict_noise):
                sampling.tracker = SigmaTracker(sigmas, sampler, guider)
                # Measure new noise where a wrapper of another pack may change the latent between sampler and model.
                between = WrappersMP.PREDICT_NOISE, WrappersMP.CALC_COND_BATCH
                foreign = wrapped_by_others(options_before["transformer_options"], between)
                cached = bool(config.kv_cache)
                sampling.trajectory.reads = sampling.tracker.measures_noise(cached) or (cached and foreign)
                args, kwargs = sampling.tracker.listening(args, kwargs)
            if inside and not sampling.obstacle:
                allow_more_graphs()
    except UnmergedError as error:
        warn(error)
        return executor(*args, **kwargs)
    guider.model_options = options
    if attachment.watcher is not None:
        attachment.watcher.began()
    try:
        result = executor(*args, **kwargs)
        with warned(), own_code():
            sampling.tracker.check()
            sampling.run.draw()
            hooks = registry.find(model.model.diffusion_model)
            sampling.run.stats.times_less_work = None if hooks is None else hooks.times_less_work(noise, sampling.run)
        return result
    finally:
        guider.model_options = options_before
        with warned(), own_code():
            stats = sampling.close()
            keep_stats(attachment, stats)
            logging.info("ToMA: %s", summary(stats))
            if attachment.watcher is not None:
                attachment.watcher.ended(stats)


def run_config(
    attachment: Attachment,
    guider: Any,
    noise: Tensor,
    sampler: Any,
    packed: Sequence[int] = (),
    sigmas: Sequence[float] = (),
) -> tuple[ToMAConfig, KVCachePlan]:
    """Return the settings for a run of a guider, and the plan of the run's KV cache.

    noise: that of the first stream. packed: the shape of all streams as packed by ComfyUI, if there are several.
    sigmas: see `plan_kv_cache`.
    """
    settings, model = attachment.settings, guider.model_patcher
    config = config_for(settings, model)
    kv_plan = KVCachePlan()
    if config.kv_cache and not getattr(comfy.model_management, "in_training", False):
        kv_plan = plan_kv_cache(config, guider, noise, sampler, packed or noise.shape, sigmas)
        config = config if kv_plan.bytes else config_for(settings, model, kv_cache=False)
        config = replace(config, skip_first_blocks=kv_plan.skipped) if kv_plan.skipped else config
    return config, kv_plan


def _wrap_first(transformer_options: dict[str, Any], kind: str, wrapper: Any) -> bool:
    """Add a wrapper in front of all other wrappers, for one run. Return False if this ComfyUI has no wrappers of this
    kind."""
    kind = getattr(WrappersMP, kind, "")
    if not kind:
        return False
    wrappers = transformer_options["wrappers"]
    transformer_options["wrappers"] = {**wrappers, kind: {_KEY: [wrapper], **wrappers.get(kind, {})}}
    return True


def _prepare_sampling(executor: Any, *args: Any, **kwargs: Any) -> Any:
    sampling, given = None, list[Any]()
    with optional_api("WrappersMP.PREPARE_SAMPLING"):
        given = [argument(args, kwargs, n, name) for n, name in enumerate(("model", "noise_shape", "conds"))]
        _ = given[0].model.memory_required
        sampling = argument(args, kwargs, 3, "model_options")["transformer_options"][SAMPLING]
    if sampling is None:
        return executor(*args, **kwargs)
    with reserved(given[0].model, sampling.run.cache.on_card):
        loaded = executor(*args, **kwargs)
    if sampling.run.cache.host is not None:
        with warned(), own_code():
            measure_room(sampling.run.cache.host, *given)
    return loaded


def _predict_noise(executor: Any, *args: Any, **kwargs: Any) -> Any:
    sampling, timestep = None, None
    with optional_api("WrappersMP.PREDICT_NOISE"):
        sampling = executor.class_obj.model_options["transformer_options"].get(SAMPLING)
        timestep = argument(args, kwargs, 1, "timestep")
    if sampling is not None and timestep is not None:
        with warned(), own_code():
            sampling.next(timestep)
    try:
        image = executor(*args, **kwargs)
    except torch.OutOfMemoryError:
        # Evaluate all conditions again, on all tokens: if only one condition were repeated, guidance would amplify its
        # difference from the merged ones. With several devices this is impossible: ComfyUI does not wait for the other
        # devices, and would take their results for those of the next evaluation.
        if sampling is None or sampling.several_devices or not sampling.no_memory():
            raise
        image = None
    if image is None:
        # Continue outside of `except`, so that the error and the tensors that it references are freed.
        end_interrupted()
        comfy.model_management.soft_empty_cache()
        image = executor(*args, **kwargs)
    if sampling is not None:
        with warned(), own_code():
            sampling.predicted(image)
    return image


def _calc_cond_batch(executor: Any, *args: Any, **kwargs: Any) -> Any:
    sampling = None
    try:
        with require_api("WrappersMP.CALC_COND_BATCH"):
            model_options = argument(args, kwargs, 4, "model_options")
            sampling = model_options["transformer_options"].get(SAMPLING)
            timestep = argument(args, kwargs, 3, "timestep")
            conds = argument(args, kwargs, 1, "conds")
            latent = argument(args, kwargs, 2, "x_in")
            shapes = streams.shapes_of(conds)
            model = argument(args, kwargs, 0, "model")
        if sampling is not None:
            with own_code():
                latent = streams.first(latent, shapes or sampling.shapes)
                sampling.observe(timestep, conds, latent, model_options, model)
    except UnmergedError as error:
        warn(error)
        if sampling is not None:
            sampling.undecided(error.reason)
    return executor(*args, **kwargs)


def _apply_model(executor: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        with require_api("WrappersMP.APPLY_MODEL"):
            x = argument(args, kwargs, 0, "x")
            shapes = kwargs.get("latent_shapes")
            control = argument(args, kwargs, 4, "control")
            options = argument(args, kwargs, 5, "transformer_options")
            sampling = options.get(SAMPLING)
            model = executor.class_obj.diffusion_model
    except UnsupportedApiError as error:
        warn(error)
        return executor(*args, **kwargs)
    visible = {key: value for key, value in options.items() if key not in RIDING}
    args, kwargs = with_argument(args, kwargs, 5, "transformer_options", visible)
    full = partial(executor, *args, **kwargs)
    if sampling is None or (sampling.step_plan.mode is StepMode.FULL and sampling.sigma is not None):
        return full()
    references = kwargs.get("ref_latents") or ()
    try:
        with own_code():
            x = streams.first(x, shapes)
            hooks = registry.find(model)
            reason = _obstacle(sampling, model, hooks, x)
            evaluation = None if reason else sampling.evaluation(x, options)
    except OwnError as error:
        warn(error)
        sampling.full_instead(error.reason)
        return full()
    if reason is not None:
        sampling.run.stats.call_not_merged(reason)
    if hooks is None or evaluation is None or evaluation.step_plan.mode is StepMode.FULL:
        return full()
    sampling.run.references |= bool(references)
    select = partial(hooks.select, x, options=options, control=control, references=references)
    try:
        return merged_call(full, select, sampling, evaluation, x, positions_of(options))
    except torch.OutOfMemoryError:
        # With several devices, the one that ran out of memory repeats its own call; else see `_predict_noise`.
        if options.get("multigpu_thread_device") is None or not sampling.no_memory(again=False):
            raise
    end_interrupted(several_devices=True)
    comfy.model_management.soft_empty_cache()
    return full()


def _obstacle(sampling: SamplingRun, model: nn.Module, hooks: ModelHooks | None, x: Any) -> Message | None:
    """Return why a call of the model on a latent x is not merged, None if it is merged."""
    if sampling.sigma is None:
        return Reason.UNKNOWN_SIGMA()
    name = type(unwrapped(model)).__name__
    if sampling.obstacle or hooks is None:
        return sampling.obstacle or Reason.UNKNOWN_MODEL(model=name)
    # Latents are (B, C, H, W), or (B, C, T, H, W) with T = 1 unless the model takes several frames.
    if isinstance(x, Tensor) and (x.ndim == 4 or (x.ndim == 5 and (hooks.takes_frames or x.shape[2] == 1))):
        return None
    return Reason.UNKNOWN_LATENT(model=name, shape=" x ".join(map(str, getattr(x, "shape", ()))))
