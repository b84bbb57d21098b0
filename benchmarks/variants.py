"""What is compared: ToMA's settings, what users would take instead, and the two together. Each is a function from a
`ModelPatcher` to a patched clone, as a node is."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from torch import Tensor

from scripts.comfy_pack import pack_module

Patch = Callable[[Any], Any]


@dataclass(frozen=True)
class Variant:
    """A way to run a model. note: what a reader of its row must know. unchanged: whether the output must be that of
    the model without it."""

    name: str
    patch: Patch
    note: str = ""
    unchanged: bool = False


# Small models have small grids and few blocks: merge all of them.
TINY: dict[str, Any] = {"min_tokens": 4, "flux_whole_double": 0, "flux_whole_single": 0}

UNPATCHED = Variant("unpatched", lambda model: model, unchanged=True)


# No step runs whole, from the first to the last, whatever the defaults become.
EVERY_STEP: dict[str, Any] = {
    "start_percent": 0.0,
    "end_percent": 1.0,
    "full_every": 0,
    "ratio_decay": 0.0,
    "detail_reuse": False,
}


def toma(name: str, **settings: Any) -> Variant:
    """ToMA with these settings of `ToMAConfig`, every step merged unless they say otherwise."""

    def patch(model: Any) -> Any:
        config = pack_module("toma_core.config").ToMAConfig(**{**EVERY_STEP, **settings})
        return pack_module("nodes.adapters.run").attach(model, config)

    return Variant(f"ToMA {name}", patch)


def preset(name: str, **settings: Any) -> Variant:
    """ToMA with a preset, some settings replaced."""

    def patch(model: Any) -> Any:
        config = pack_module("toma_core.config").ToMAConfig.from_preset(name, **settings)
        return pack_module("nodes.adapters.run").attach(model, config)

    return Variant(f"ToMA preset {name}", patch)


def stacked(*variants: Variant) -> Variant:
    """Several on one model, the first nearest to the loader."""

    def patch(model: Any) -> Any:
        for variant in variants:
            model = variant.patch(model)
        return model

    return Variant(" + ".join(v.name for v in variants), patch, "; ".join(v.note for v in variants if v.note))


def core_node(module: str, node: str, *args: Any) -> Patch:
    """A node of ComfyUI's own, old style or V3."""

    def patch(model: Any) -> Any:
        use_stand_ins()
        cls = getattr(importlib.import_module(f"comfy_extras.{module}"), node)
        if not hasattr(cls, "execute"):
            return getattr(cls(), cls.FUNCTION)(model, *args)[0]
        done = cls.execute(model, *args)
        return done[0] if isinstance(done, tuple) else done.args[0]

    return patch


def tome_node(ratio: float) -> Variant:
    """ComfyUI's own ToMe node."""
    patch = core_node("nodes_tomesd", "TomePatchModel", ratio)
    return Variant("ComfyUI's ToMe node", patch, "merges where a UNet has attention at full resolution", True)


def tome(ratio: float) -> Variant:
    """ToMe's bipartite matching around self-attention at every level that has it: queries, keys and values merged."""

    def patch(model: Any) -> Any:
        use_stand_ins()
        matching = importlib.import_module("comfy_extras.nodes_tomesd").bipartite_soft_matching_random2d
        held: dict[str, Any] = {}

        def merge(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
            height, width = options["activations_shape"][-2:]
            merged, held["unmerge"] = matching(q, width, height, 2, 2, int(q.shape[1] * ratio))
            reduced = merged(q)
            return reduced, reduced if k is q else merged(k), reduced if v is q else merged(v)

        model = model.clone()
        model.set_model_attn1_patch(merge)
        model.set_model_attn1_output_patch(lambda out, _: held.pop("unmerge")(out))
        return model

    return Variant(f"ToMe matching at SDXL's levels, ratio {ratio:g}", patch, "around self-attention, as ToMe does")


def todo(factor: int = 2) -> Variant:
    """ToDo-style: keys and values of self-attention from every `factor`-th row and column."""

    def patch(model: Any) -> Any:
        def downsample(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
            height, width = options["activations_shape"][-2:]

            def nearest(x: Tensor) -> Tensor:
                grid = x.view(x.shape[0], height, width, x.shape[2])
                return grid[:, ::factor, ::factor].flatten(1, 2)

            small = nearest(k)
            return q, small, small if v is k else nearest(v)

        model = model.clone()
        model.set_model_attn1_patch(downsample)
        return model

    return Variant(f"ToDo-style keys and values, 1/{factor * factor}", patch)


def hypertile(tile: int = 256, depth: int = 1) -> Variant:
    """ComfyUI's own HyperTile node."""
    patch = core_node("nodes_hypertile", "HyperTile", tile, 2, depth, False)
    return Variant(f"HyperTile {tile}, depth {depth}", patch, "tiles queries, not keys and values")


def step_cache(name: str, threshold: float = 0.2) -> Variant:
    """ComfyUI's own node `EasyCache` or `LazyCache` at its default range: skips evaluations while little changes."""
    patch = core_node("nodes_easycache", f"{name}Node", threshold, 0.15, 0.95, False)
    return Variant(name, patch, "how many steps it skips depends on the weights")


def compiled(backend: str = "inductor") -> Variant:
    """ComfyUI's own TorchCompileModel node."""
    return Variant(
        "torch.compile", core_node("nodes_torch_compile", "TorchCompileModel", backend), "first run compiles"
    )


def unet_rivals(ratio: float) -> list[Variant]:
    """What changes single evaluations of a UNet."""
    return [tome_node(ratio), tome(ratio), todo(), hypertile()]


class _StandIn(ModuleType):
    """An empty package: every name in it is an empty class."""

    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _StandIns(MetaPathFinder, Loader):
    """Packages that ComfyUI imports for video alone."""

    names = ("av",)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] in self.names:
            return ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


def use_stand_ins() -> None:
    """On a bare machine ComfyUI's nodes load without the packages that nothing here calls."""
    missing = [name for name in _StandIns.names if name not in sys.modules and importlib.util.find_spec(name) is None]
    if missing and not any(isinstance(finder, _StandIns) for finder in sys.meta_path):
        sys.meta_path.append(_StandIns())
