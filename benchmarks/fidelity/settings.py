"""The settings that docs/fidelity.md compares: presets, every step merged, other selectors of destinations, and rivals.

A setting's name is "group: value"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest import mock

from benchmarks import variants
from benchmarks.variants import Patch, chain
from scripts.comfy_pack import pack_module


@dataclass(frozen=True)
class Setting:
    """A setting to measure: how it patches the model, and how it samples."""

    patch: Patch
    steps: float = 1.0  # number of sampling steps, relative to the unmerged run
    window: int = 8  # side of the setting's windows in tokens, for `metrics.seam_energy`
    runs: int = 1  # only for clips, see `demo.video.draw_clips`


# `min_tokens` for tiny models, whose grids are smaller than the grids of real models.
FEWEST = 64


def toma(**settings: Any) -> Patch:
    """Return a patch that applies ToMA with every step merged and with these settings."""
    return lambda model: variants.toma("", **{**tiny(model), **settings}).patch(model)


def preset(name: str, **settings: Any) -> Patch:
    """Return a patch that applies a preset of ToMA and lets it merge the small grids of tiny models."""
    return lambda model: variants.preset(name, **{"min_tokens": FEWEST, **settings}).patch(model)


def packed(patch: Patch) -> Patch:
    """Wrap `patch` so that keys and values are cached in four bits, as the pack does for large models and videos."""

    def patched(model: Any) -> Any:
        from comfy.patcher_extension import WrappersMP

        def run(executor: Any, *args: Any, **kwargs: Any) -> Any:
            with mock.patch.multiple(pack_module("nodes.adapters.kv_memory"), memory_left=lambda *_: 0):
                return executor(*args, **kwargs)

        # Add this wrapper before `patch` adds the pack's own, so that the pack's run begins inside this wrapper.
        model = model.clone()
        model.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, "packed", run)
        return patch(model)

    return patched


def tiny(model: Any) -> dict[str, Any]:
    """Return settings for a tiny model. A tiny Flux does not merge its first block of each kind. This is about the
    share of blocks that the real Flux does not merge."""
    flux = type(model.model.diffusion_model).__name__ == "Flux"
    return {"min_tokens": FEWEST, **({"skip_first_blocks": 1} if flux else {})}


def settings(kind: str) -> dict[str, Setting]:
    """Return the settings by name for the model `kind`, one of `start.PICTURES`, in the order in which they are
    measured."""
    table: dict[str, Setting] = {}

    def add(group: str, choices: dict[str, Patch], **extra: Any) -> None:
        for name, patch in choices.items():
            table[f"{group}: {name}"] = Setting(patch, **extra)

    unet = kind in ("unet", "deep")
    side = 8 if unet else 4  # side of the presets' windows in tokens
    cache = variants.step_cache("EasyCache", 0.2).patch
    add("preset", {name: preset(name) for name in pack_module("toma_core").PRESETS if name != "paper"}, window=side)
    add("preset", {"paper": preset("paper")})
    ratios = (0.6, 0.75) if unet else (0.6, 0.75, 0.47, 0.71)
    add("preset", {f"balanced at {r:g}": preset("balanced", ratio=r) for r in ratios}, window=side)
    add("every step", {"0.5": toma()})
    add("rival", {"half the steps": lambda model: model}, steps=0.5)
    add("rival", {"three quarters of the steps": lambda model: model}, steps=0.75)
    add("rival", {"EasyCache 0.2": cache, "ToDo 1/4": variants.todo().patch})
    add("stacked", {"EasyCache 0.2 + every step": chain(cache, toma())})
    add("selector", {s: toma(selector=s) for s in ("tome", "random", "grid", "farthest point")})
    add("selector", {f"{s} at 0.75": toma(selector=s, ratio=0.75) for s in ("tome", "random")})
    if unet:
        add("whole last", {f"{n}": toma(skip_last_blocks=n) for n in (1, 2, 3)})
    else:
        add("preset", {"balanced, keys in four bits": packed(preset("balanced"))}, window=side)
        add("rival", {"block cache 0.2": variants.block_cache(0.2).patch})
    return table
