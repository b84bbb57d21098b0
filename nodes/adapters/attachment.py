"""The settings that a patched model carries, and the stats of its last runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from comfy.model_patcher import ModelPatcher

from ...toma_core import ToMAConfig, UserSettings
from ...toma_core.config import KVCache
from ...toma_core.presets import ModelKind
from ...toma_core.schedule import RatioSchedule
from ...toma_core.stats import RunStats
from . import registry
from .compat import comfyui_lines
from .model_hooks import ATTACHMENT

Settings = UserSettings | ToMAConfig
_MAX_REPORTS = 32
_reports: dict[str, RunStats] = {}  # stats of each `Attachment`'s last run, by `report_id`; the latest run comes last


@dataclass(frozen=True)
class Attachment:
    settings: Settings  # as given by the caller; each run resolves the settings once, see `config_for`
    report_id: str  # id under which the stats of the model's runs are stored
    watcher: Any = None  # a `NodeStatus`; its `began` and `ended` are called by each run, and must not raise
    ratio_schedule: RatioSchedule = ()  # ratios of the profile; empty without a profile


def attachment_of(model: ModelPatcher) -> Attachment | None:
    """Return the `Attachment` that `apply_toma` gave to this model, or to the model from which it was cloned."""
    return model.model_options.get("transformer_options", {}).get(ATTACHMENT)


def config_for(settings: Settings, model: ModelPatcher) -> ToMAConfig:
    """Return the config of a run: the settings, resolved for the model's kind."""
    hooks = registry.find(model.get_model_object("diffusion_model"))
    kind, own = (hooks.kind, hooks.own_presets) if hooks else (ModelKind.UNET, {})
    config = settings.resolved(kind, own) if isinstance(settings, UserSettings) else settings
    return replace(config, kv_cache=KVCache.OFF) if kind is ModelKind.UNET and config.kv_cache else config


def last_stats(model: ModelPatcher) -> RunStats | None:
    """Return the stats of a model's last finished run with ToMA; None if no run finished, or they were dropped."""
    attachment = attachment_of(model)
    return None if attachment is None else _reports.get(attachment.report_id)


def keep_stats(attachment: Attachment, stats: RunStats) -> None:
    """Store the stats of a finished run; they replace the stats of the model's previous run."""
    stats.comfyui = comfyui_lines()
    _reports.pop(attachment.report_id, None)
    _reports[attachment.report_id] = stats
    for oldest in list(_reports)[:-_MAX_REPORTS]:
        del _reports[oldest]
