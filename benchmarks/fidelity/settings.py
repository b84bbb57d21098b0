"""The settings that are compared: presets, each option of the merge alone with every step merged, experiments, and
rivals.

A name is "group: value". Tiers give the order of measuring: 1 decides the presets, 2 completes the comparison with the
rivals, 3 varies one option at a time, 4 is slow or of little interest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks import variants
from benchmarks.variants import Patch, chain
from scripts.comfy_pack import pack_module

from . import experiments


@dataclass(frozen=True)
class Setting:
    """A row. steps: share of the sampling steps. window: side of its windows in tokens, for the metric of seams. image:
    whether it has a row in the contact sheet."""

    patch: Patch
    tier: int
    steps: float = 1.0
    window: int = 8
    image: bool = False


# Tokens of the smallest merged grids of tiny models.
FEWEST = 64


def toma(**settings: Any) -> Patch:
    """Return ToMA with every step merged, and some settings replaced."""
    return lambda model: variants.toma("", **{**tiny(model), **settings}).patch(model)


def preset(name: str, **settings: Any) -> Patch:
    """Return ToMA with a preset that also merges tiny grids."""
    return lambda model: variants.preset(name, **{"min_tokens": FEWEST, **settings}).patch(model)


def tiny(model: Any) -> dict[str, Any]:
    """Return skipped blocks for a Flux of two or three double and five or six single blocks: the skipped share is
    Flux's."""
    flux = type(model.model.diffusion_model).__name__ == "Flux"
    return {"min_tokens": FEWEST, **({"skip_first_blocks": 1} if flux else {})}


def easy_cache(threshold: float) -> Patch:
    """Return ComfyUI's own EasyCache."""
    return variants.step_cache("EasyCache", threshold).patch


def hyper_tile(tile: int) -> Patch:
    """Return ComfyUI's own HyperTile at both resolutions, with one tiling, so that nothing is random."""
    return variants.hypertile(tile, 2, swap=1).patch


def reuse(ratio: float, every: int, **settings: Any) -> Patch:
    """Return ToMA with the presets' settings for Flux: every Nth step is full and refreshes the residual cache."""
    plans = {"selection_interval": every, "weight_interval": every}
    return toma(**{"ratio": ratio, "full_step_interval": every, **plans, **settings})


def averaging(mean: float, steps: int, scheduler: str, **settings: Any) -> Patch:
    """Return ToMA at the ratio whose mean over all steps is `mean`, for settings that change it between steps."""

    def patch(model: Any) -> Any:
        from comfy.samplers import calculate_sigmas

        sampling = model.get_model_object("model_sampling")
        sigmas = calculate_sigmas(sampling, scheduler, steps).tolist()
        config = pack_module("toma_core.config").ToMAConfig(ratio=0.5, **settings)
        schedule = pack_module("nodes.adapters.patch_model").SamplingRun.start(config, sampling, sigmas).run.schedule
        share = sum(schedule.decide(sigma).merged_ratio for sigma in sigmas[:-1]) / (0.5 * steps)
        return toma(ratio=min(0.95, mean / share), **settings)(model)

    return patch


def settings(kind: str, steps: int, scheduler: str) -> dict[str, Setting]:
    """Return the settings by name for the model `kind`, one of `start.PICTURES`, and a number of steps, without
    duplicates."""
    table: dict[str, Setting] = {}

    def add(tier: int, group: str, choices: dict[str, Patch], **extra: Any) -> None:
        for name, patch in choices.items():
            table[f"{group}: {name}"] = Setting(patch, tier, **extra)

    unet = kind in ("unet", "deep")
    # The presets, the rivals' own rules at the same ratio, and other settings of the same cost.
    side = 8 if unet else 4  # windows of the presets
    own = {"window": side, "image": True}
    add(1, "preset", {name: preset(name) for name in pack_module("toma_core").PRESETS if name != "paper"}, **own)
    add(1, "preset", {"paper": preset("paper")}, image=True)
    add(1, "every step", {"0.5": toma()}, image=True)
    add(1, "preset", {f"balanced at {r:g}": preset("balanced", ratio=r) for r in (0.6, 0.75)}, **own)
    others = ("random", "tome", "grid") if unet else ("random",)
    add(1, "preset", {f"balanced, {s}": preset("balanced", selector=s) for s in others}, window=side)
    add(1, "selector", {s: toma(selector=s) for s in ("tome", "random", "grid", "farthest point")})
    add(1, "rival", {"half the evaluations": variants.half_the_evaluations}, image=True)
    add(1, "rival", {"EasyCache 0.2": easy_cache(0.2), "ToDo 1/4": variants.todo(2, 2).patch}, image=True)
    add(1, "rival", {"half the steps": lambda model: model}, steps=0.5, image=True)
    if unet:
        add(1, "rival", {"HyperTile 64": hyper_tile(64)}, image=True)
    add(1, "stacked", {"EasyCache 0.2 + every step": chain(easy_cache(0.2), toma())})
    add(1, "stacked", {"half the evaluations + every step": chain(variants.half_the_evaluations, toma())})

    add(2, "every step", {f"{r:g}": toma(ratio=r) for r in (0.25, 0.75)})
    add(2, "reuse", {f"{r:g} every {n}": reuse(r, n) for r, n in ((0.9, 3), (0.5, 2), (0.75, 2))})
    add(2, "variate", {f"{r:g} every {n}": experiments.control_variate(r, n, toma) for r, n in ((0.5, 3), (0.75, 3))})
    for name, when in _ALL_ALONG.items():
        add(2, "mean 0.5", {name: averaging(0.5, steps, scheduler, **when)})
    add(2, "rival", {f"EasyCache {t:g}": easy_cache(t) for t in (0.1, 0.4)})
    add(
        2,
        "rival",
        {"LazyCache 0.2": variants.step_cache("LazyCache", 0.2).patch, "ToDo 1/2": variants.todo(1, 2).patch},
    )
    add(2, "rival", {"three quarters of the steps": lambda model: model}, steps=0.75)
    if steps > 4:  # of four steps, three quarters
        add(2, "rival", {"one step fewer": lambda model: model}, steps=(steps - 1) / steps)
    if unet:
        add(2, "rival", {"HyperTile 32": hyper_tile(32)})
    else:
        add(2, "preset", {f"balanced at {r:g}": preset("balanced", ratio=r) for r in (0.47, 0.7)}, window=side)
        add(2, "preset", {"balanced, keys in four bits": experiments.packed(preset("balanced"))}, window=side)
        # The rival on few-step models: with one first block First Block Cache, with more DBCache.
        add(2, "rival", {f"block cache {t:g}": variants.block_cache(t).patch for t in (0.1, 0.2)})
        add(2, "rival", {"block cache 0.2, 2 first and 2 last": variants.block_cache(0.2, 2, 2).patch})
    add(2, "stacked", {"EasyCache 0.2 + balanced at 0.75": chain(easy_cache(0.2), preset("balanced", ratio=0.75))})
    add(2, "stacked", {"half the steps + every step": toma()}, steps=0.5)

    add(3, "granularity", {g: toma(granularity=g) for g in ("module", "block")})
    for w in (4, 16):
        add(3, "window", {f"{w}": toma(window_size=w)}, window=w)
    add(3, "window", {"stripe": toma(window_shape="stripe")})
    add(3, "scale", {f"{s}": toma(sharpness=s) for s in (30, 100, 1000)})
    add(3, "cosine", {"centred": experiments.centred(toma())})
    add(3, "unmerge", {"pseudo-inverse": experiments.pseudo_inverse(toma())})
    add(
        3,
        "refresh",
        {f"{s}/{w}": toma(selection_interval=s, weight_interval=w) for s, w in ((1, 1), (5, 1), (5, 5), (20, 20))},
    )
    add(3, "refresh", {"1/1 early": experiments.refreshed(toma(), (1, 1), (10, 5))})
    add(3, "refresh", {"1/1 late": experiments.refreshed(toma(), (10, 5), (1, 1))})
    if unet:
        add(2, "reuse", {f"0.5 every 3, last {n} whole": reuse(0.5, 3, skip_last_blocks=n) for n in range(4)})
        other = ((0.5, 2), (0.75, 3), (0.5, 5), (0.75, 5))
        add(3, "reuse", {f"{r:g} every {n}, last 2 whole": reuse(r, n, skip_last_blocks=2) for r, n in other})
        add(3, "whole last", {f"{n}": toma(skip_last_blocks=n) for n in (1, 2, 3)})
    else:
        add(3, "whole first", {f"{n}": toma(skip_first_blocks=n) for n in (0, 2)})
    add(3, "end", {f"{e:g}": toma(end_percent=e) for e in (0.7, 0.9)})
    add(3, "start", {f"{s:g}": toma(start_percent=s) for s in (0.1, 0.3)})
    add(3, "reuse", {"0.75 every 4": reuse(0.75, 4), "0.75 every 10": reuse(0.75, 10)})
    seldom = {"selection_interval": 10, "weight_interval": 5}
    add(3, "reuse", {"0.5 every 3, plans of the paper": reuse(0.5, 3, **seldom)})
    add(3, "reuse", {"0.75 every 3, end 0.9": reuse(0.75, 3, end_percent=0.9)})
    add(3, "reuse", {"0.75 every 3, random": reuse(0.75, 3, selector="random")})
    add(3, "reuse", {f"{r:g} every 3, block": reuse(r, 3, granularity="block") for r in (0.5, 0.75)})
    add(3, "destinations", {"own for cond and uncond": experiments.own_destinations(toma())})
    add(3, "preset", {"balanced, own for cond and uncond": experiments.own_destinations(preset("balanced"))})
    add(3, "budget", {"moved between windows": experiments.moved_budget(toma())})
    # The first step has no earlier prediction and is full; so it is in the row to compare with.
    add(3, "plan from", {"tokens, first step whole": toma(**_AT_EVERY_STEP, start_percent=0.01)})
    add(3, "plan from", {name: toma(**_PREDICTED, **which) for name, which in _PREDICTIONS.items()})
    add(3, "plan from", {"prediction, window 4": toma(**_PREDICTED, window_size=4)}, window=4)
    add(3, "plan from", {"prediction, destinations themselves": experiments.picked(toma(**_PREDICTED))})
    add(3, "plan from", {"prediction, means as long as tokens": experiments.norm_kept(toma(**_PREDICTED))})
    add(3, "preset", {"balanced, plan from prediction": preset("balanced", **_PREDICTED)})

    add(4, "selector", {f"{s} at 0.75": toma(selector=s, ratio=0.75) for s in ("tome", "random", "grid")})
    add(4, "variate", {"0.75 every 5": experiments.control_variate(0.75, 5, toma)})
    add(4, "every step", {"0.9": toma(ratio=0.9)})
    add(4, "window", {"global": toma(window_shape="global", selection_interval=1000)})
    return table


# Ways to spend a mean ratio of 0.5 over the steps.
_ALL_ALONG: dict[str, dict[str, Any]] = {
    "first 70 %": {"end_percent": 0.7},
    "first 85 %": {"end_percent": 0.85},
    "last 70 %": {"start_percent": 0.3},
}

# Plans of every step, each from a new prediction of the picture.
_AT_EVERY_STEP: dict[str, Any] = {"selection_interval": 1, "weight_interval": 1}
_PREDICTED: dict[str, Any] = {"similarity_from": "prediction", **_AT_EVERY_STEP}
_PREDICTIONS: dict[str, dict[str, Any]] = {"prediction": {}, "prediction, scale 1000": {"sharpness": 1000}}
