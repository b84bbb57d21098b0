"""Attach settings to a model, and give every sampling run its own state.

apply_toma       -> settings and three wrappers on a clone of the model
OUTER_SAMPLE     -> once a run: a new `SamplingRun`, dropped at the end, however the run ends
PREPARE_SAMPLING -> when ComfyUI loads the model for a run with a KV cache: reserves the cache's memory
PREDICT_NOISE    -> once an evaluation of the sampler; a run puts this and PREPARE_SAMPLING before all other wrappers
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

from ...toma_core import StepMode, ToMAConfig
from ...toma_core.reasons import Message, Reason
from ...toma_core.schedule import RatioSchedule
from . import registry, streams
from .attachment import Attachment, Settings, attachment_of, config_for, keep_stats
from .compat import UnmergedError, arguments, end_interrupted, own_code, require_api, warn, warned, with_argument
from .compile_ops import allow_more_graphs, compiled, in_one_piece
from .conditions import Contents, positions_of
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
    model: ModelPatcher, settings: Settings, watcher: Any = None, ratio_schedule: RatioSchedule = ()
) -> ModelPatcher:
    """Return a clone of the model that merges tokens by these settings, in place of settings that the model already
    carries. If the settings switch merging off, return a model without ToMA. ratio_schedule: ratios by block and noise
    level, in place of the ratio in the settings. If this ComfyUI's `ModelPatcher` is not as this pack knows it, log a
    warning and return the model itself. Raises `UnsupportedModelError`."""
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
    except UnmergedError as error:
        warn(error)
        return model


def _outer_sample(executor: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        with require_api("WrappersMP.OUTER_SAMPLE"):
            guider = executor.class_obj
            model, conds, options_before = guider.model_patcher, guider.conds, guider.model_options
            attachment = options_before["transformer_options"][ATTACHMENT]
            model_sampling = model.get_model_object("model_sampling")
            packed, sampler, sigmas = arguments(args, kwargs, noise=0, sampler=2, sigmas=3)
            sigmas, shapes = sigmas.tolist(), kwargs.get("latent_shapes")
            options = create_model_options_clone(options_before)
            wrappers = options["transformer_options"]["wrappers"]
            first = {WrappersMP.PREPARE_SAMPLING: _prepare_sampling, WrappersMP.PREDICT_NOISE: _predict_noise}
            for kind, wrapper in first.items():
                wrappers[kind] = {_KEY: [wrapper], **wrappers.get(kind, {})}
        with own_code():
            noise = streams.first(packed, shapes)
            config, kv_plan = run_config(attachment, guider, noise, sampler, packed.shape, sigmas)
            reason = Reason.FULLGRAPH() if in_one_piece(options_before) else kv_plan.reason
            hooks = registry.find(model.model.diffusion_model)
            video = noise.ndim > 4 and hooks is not None and hooks.takes_frames
            sampling = SamplingRun.start(config, model_sampling, sigmas, attachment.ratio_schedule, video)
            sampling.shapes, sampling.contents = shapes, Contents(conds)
            run, cache, stats = sampling.run, sampling.run.cache, sampling.run.stats
            if reason:
                run.disable(reason)
                kv_plan = KVCachePlan()
            cache.quantized, cache.reserved, cache.on_card = kv_plan.quantized, kv_plan.bytes, kv_plan.on_card
            cache.host = host_of(kv_plan, model.load_device)
            stats.kv_skipped = kv_plan.skipped
            sampling.tracker = SigmaTracker(sigmas, sampler, guider)
            cached = run.kv_cache
            # Measure new noise if a wrapper of another pack may change the latent between the sampler and the model.
            between = WrappersMP.PREDICT_NOISE, WrappersMP.CALC_COND_BATCH
            foreign = wrapped_by_others(options_before["transformer_options"]["wrappers"], between)
            sampling.trajectory.reads = sampling.tracker.measures_noise(cached) or (cached and foreign)
            args, kwargs = sampling.tracker.listening(args, kwargs)
            graphs = compiled(options_before)
            options["transformer_options"].update({SAMPLING: sampling, GRAPHS: graphs})
            if graphs and not reason:
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
            run.draw()
            stats.times_less_work = None if hooks is None else hooks.times_less_work(noise, run)
        return result
    finally:
        guider.model_options = options_before
        with warned(), own_code():
            sampling.close()
            keep_stats(attachment, stats)
            logging.info("ToMA: %s", summary(stats))
            if attachment.watcher is not None:
                attachment.watcher.ended(stats)


def run_config(
    attachment: Attachment, guider: Any, noise: Tensor, sampler: Any, packed: Sequence[int] = (), sigmas: Any = ()
) -> tuple[ToMAConfig, KVCachePlan]:
    """Return the settings for a run of a guider, and the plan of the run's KV cache. noise: that of the first stream.
    packed: the shape of all streams as packed by ComfyUI, if there are several. sigmas: see `plan_kv_cache`."""
    settings, model = attachment.settings, guider.model_patcher
    config = config_for(settings, model)
    if not config.uses_cache or getattr(comfy.model_management, "in_training", False):
        return config, KVCachePlan()
    kv_plan = plan_kv_cache(config, guider, noise, sampler, packed or noise.shape, sigmas)
    if enlarges(sampler):  # no cache, because this sampler's steps are all full
        kv_plan = KVCachePlan()
    return replace(config, skip_first_blocks=kv_plan.skipped) if kv_plan.skipped else config, kv_plan


def _prepare_sampling(executor: Any, *args: Any, **kwargs: Any) -> Any:
    sampling = None
    with warned(), require_api("WrappersMP.PREPARE_SAMPLING"):
        model, shape, conds = arguments(args, kwargs, model=0, noise_shape=1, conds=2)
        (options,) = arguments(args, kwargs, model_options=3)
        sampling, _ = options["transformer_options"][SAMPLING], model.model.memory_required
    if sampling is None or not sampling.run.cache.reserved:
        return executor(*args, **kwargs)
    with reserved(model.model, sampling.run.cache.on_card):
        loaded = executor(*args, **kwargs)
    if sampling.run.cache.host is not None:
        with warned(), own_code():
            measure_room(sampling.run.cache.host, model, shape, conds)
    return loaded


def _predict_noise(executor: Any, *args: Any, **kwargs: Any) -> Any:
    sampling = timestep = None
    with warned(), require_api("WrappersMP.PREDICT_NOISE"):
        sampling = executor.class_obj.model_options["transformer_options"].get(SAMPLING)
        (timestep,) = arguments(args, kwargs, timestep=1)
    if sampling is not None and timestep is not None:
        with warned(), own_code():
            sampling.next(timestep)
    try:
        image = executor(*args, **kwargs)
    except torch.OutOfMemoryError:
        # Evaluate all conditions again, on all tokens: if only one condition were repeated, guidance would amplify its
        # difference from the merged conditions. With several devices nothing can be repeated: ComfyUI does not wait for
        # the other devices, and would take their results for results of the next evaluation.
        if sampling is None or sampling.several_devices or not sampling.no_memory():
            raise
        image = None
    if image is None:
        # Continue outside of `except`, so that the error and the tensors that it references are freed.
        end_interrupted()
        image = executor(*args, **kwargs)
    if sampling is not None:
        with warned(), own_code():
            sampling.predicted(image)
    return image


def _calc_cond_batch(executor: Any, *args: Any, **kwargs: Any) -> Any:
    sampling = None
    try:
        with require_api("WrappersMP.CALC_COND_BATCH"):
            (options,) = arguments(args, kwargs, model_options=4)
            sampling = options["transformer_options"].get(SAMPLING)
            model, conds, latent, timestep = arguments(args, kwargs, model=0, conds=1, x_in=2, timestep=3)
            shapes = streams.shapes_of(conds)
        if sampling is not None:
            with own_code():
                latent = streams.first(latent, shapes or sampling.shapes)
                sampling.observe(timestep, conds, latent, options, model)
    except UnmergedError as error:
        warn(error)
        if sampling is not None:
            sampling.undecided(error.reason)
    return executor(*args, **kwargs)


def _apply_model(executor: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        with require_api("WrappersMP.APPLY_MODEL"):
            x, control, options = arguments(args, kwargs, x=0, control=4, transformer_options=5)
            sampling, model = options.get(SAMPLING), executor.class_obj.diffusion_model
    except UnmergedError as error:
        warn(error)
        return executor(*args, **kwargs)
    visible = {key: value for key, value in options.items() if key not in RIDING}
    args, kwargs = with_argument(args, kwargs, 5, "transformer_options", visible)
    full = partial(executor, *args, **kwargs)
    if sampling is None or (sampling.step_plan.mode is StepMode.FULL and sampling.sigma is not None):
        return full()
    try:
        with own_code():
            x = streams.first(x, kwargs.get("latent_shapes"))
            hooks = registry.find(model)
            reason = _obstacle(sampling, model, hooks, x)
            evaluation = None if reason else sampling.evaluation(x, options)
    except UnmergedError as error:
        warn(error)
        sampling.full_instead(error.reason)
        return full()
    if reason is not None:
        sampling.run.stats.call_not_merged(reason)
    if hooks is None or evaluation is None or evaluation.step_plan.mode is StepMode.FULL:
        return full()
    references = kwargs.get("ref_latents") or ()
    sampling.run.references |= bool(references)
    select = partial(hooks.select, x, options=options, control=control, references=references)
    try:
        return merged_call(full, select, sampling, evaluation, x, positions_of(options))
    except torch.OutOfMemoryError:
        # With several devices, the device that ran out of memory repeats its call. With one device, see
        # `_predict_noise`.
        if options.get("multigpu_thread_device") is None or not sampling.no_memory(again=False):
            raise
    end_interrupted(several_devices=True)
    return full()


def _obstacle(sampling: SamplingRun, model: nn.Module, hooks: ModelHooks | None, x: Any) -> Message | None:
    """Return why a call of the model on a latent x cannot be merged, None if it can."""
    if sampling.sigma is None:
        return Reason.UNKNOWN_SIGMA()
    name = type(unwrapped(model)).__name__
    if hooks is None:
        return Reason.UNKNOWN_MODEL(model=name)
    # Latents are (B, C, H, W), or (B, C, T, H, W) with T = 1 unless the model takes several frames.
    if isinstance(x, Tensor) and (x.ndim == 4 or (x.ndim == 5 and (hooks.takes_frames or x.shape[2] == 1))):
        return None
    return Reason.UNKNOWN_LATENT(model=name, shape=" x ".join(map(str, getattr(x, "shape", ()))))
