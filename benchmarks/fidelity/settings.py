"""What is compared: every choice of the merge, one at a time against the presets, and the rivals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from scripts.comfy_pack import pack_module

Patch = Callable[[Any], Any]

# The tiny models have two or three double blocks and five or six single ones: the share left whole is that of Flux.
_TINY = {"flux_whole_double": 1, "flux_whole_single": 1, "min_tokens": 64}


def toma(**settings: Any) -> Patch:
    """ToMA with the balanced preset's settings and some replaced."""

    def patch(model: Any) -> Any:
        config = pack_module("toma_core.config").ToMAConfig(**{**_TINY, **settings})
        return pack_module("nodes.adapters.run").attach(model, config)

    return patch


def preset(name: str, **settings: Any) -> Patch:
    """ToMA with a preset; the blocks of Flux left whole are scaled to the tiny model."""

    def patch(model: Any) -> Any:
        config = pack_module("toma_core.config").ToMAConfig.from_preset(name, **{**_TINY, **settings})
        return pack_module("nodes.adapters.run").attach(model, config)

    return patch


def _core(module: str, node: str, *args: Any) -> Patch:
    """One of ComfyUI's own nodes, old style or V3."""

    def patch(model: Any) -> Any:
        import importlib

        cls = getattr(importlib.import_module(f"comfy_extras.{module}"), node)
        if hasattr(cls, "execute"):
            return cls.execute(model, *args).args[0]
        return getattr(cls(), cls.FUNCTION)(model, *args)[0]

    return patch


def _half_the_steps(model: Any) -> Any:
    """Skip every second evaluation and reuse the one before: the plainest rival at half the cost."""
    from comfy.patcher_extension import WrappersMP

    class Held:
        index = 0
        result: Any = None

    def start(executor: Any, *args: Any, **kwargs: Any) -> Any:
        Held.index = 0
        return executor(*args, **kwargs)

    def skip(executor: Any, x: torch.Tensor, timestep: torch.Tensor, *args: Any) -> Any:
        sigma = timestep.view(-1, *[1] * (x.ndim - 1))
        if Held.index % 2 == 0 or Held.result is None:
            Held.result = (x - executor(x, timestep, *args)) / sigma
        Held.index += 1
        return x - sigma * Held.result

    model = model.clone()
    model.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, "skip", start)
    model.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, "skip", skip)
    return model


def settings() -> dict[str, Patch]:
    """Name -> how to patch the model. A name is "group: value"."""
    table: dict[str, Patch] = {}
    table |= {f"preset: {name}": preset(name) for name in pack_module("toma_core.config").PRESETS}
    table |= {f"ratio: {r:g}": toma(ratio=r) for r in (0.25, 0.5, 0.75)}
    kinds = [kind.value for kind in pack_module("toma_core.config").SelectorKind]
    table |= {f"selector: {kind}": toma(selector=kind) for kind in kinds}
    table |= {f"granularity: {g}": toma(granularity=g) for g in ("module", "block", "stack")}
    table |= {f"window: {w}": toma(window_size=w) for w in (4, 8, 16)}
    table |= {"window: stripe": toma(window_kind="stripe"), "window: shifted": toma(shift_windows=True, select_every=1)}
    table |= {f"scale: {s}": toma(scale=s) for s in (30, 100, 300, 1000)}
    table |= {f"unmerge: {u}": toma(unmerge=u) for u in ("transpose", "pseudo-inverse")}
    table |= {f"share: {s}": toma(share=s) for s in ("block", "stack", "level")}
    table |= {f"refresh: {s}/{w}": toma(select_every=s, weigh_every=w) for s, w in ((1, 1), (5, 1), (5, 5), (10, 5))}
    table |= {f"end: {e:g}": toma(end_percent=e) for e in (0.7, 0.8, 0.9, 1.0)}
    table |= {f"start: {s:g}": toma(start_percent=s) for s in (0.1, 0.3)}
    table |= {f"decay: {d:g}": toma(ratio_decay=d) for d in (0.5, 1.0)}
    table |= {f"full every: {n}": toma(full_every=n) for n in (2, 3, 5)}
    table |= {f"whole first: {n}": toma(flux_whole_double=n, unet_whole_blocks=n) for n in (0, 1, 2)}
    table |= {
        "rival: EasyCache": _core("nodes_easycache", "EasyCacheNode", 0.2, 0.15, 0.95, False),
        "rival: HyperTile": _core("nodes_hypertile", "HyperTile", 64, 2, 1, False),
        "rival: half the steps": _half_the_steps,
    }
    return table
