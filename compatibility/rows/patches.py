"""Nodes that patch the inside of the model: attention, skip connections, caches, compilation, devices."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from scripts.comfy_pack import pack_module

from ..judge import attach
from ..kit import SIDE, Kit, node, part, patcher, random
from ..parallel import InTurn, Shares, by_condition
from ..row import FAMILIES, FOR_FLUX, FOR_UNETS, MERGED, NONE, NOT_TRIED, OTHERS, Expected, Graph, Refused, unmerged
from .table import row

GROUP = "Model patches"
TOKENS_CHANGED, REPLACED = "tokens_changed", "block_replaced"


@row(GROUP, "FreeU", flux=Refused(KeyError), quick=True)
def freeu(kit: Kit) -> Graph:
    patch = node("nodes_freelunch.FreeU")
    return Graph(lambda m: patch(m, 1.1, 1.2, 0.9, 0.2))


@row(GROUP, "FreeU V2", flux=Refused(KeyError))
def freeu_v2(kit: Kit) -> Graph:
    patch = node("nodes_freelunch.FreeU_V2")
    return Graph(lambda m: patch(m, 1.3, 1.4, 0.9, 0.2))


@row(GROUP, "HyperTile", sdxl=Expected(unmerged={TOKENS_CHANGED: 3}), flux=Refused(TypeError))
def hypertile(kit: Kit) -> Graph:
    """Cut the grid of the finer resolution into tiles of four or more tokens."""
    patch = node("nodes_hypertile.HyperTile")
    return Graph(lambda m: patch(m, 32, 2, 1, False))


@row(GROUP, "Token Merging (ToMe)", flux=Refused(TypeError))
def tome(kit: Kit) -> Graph:
    """Use ComfyUI's ToMe, which merges nothing on SDXL. Because ToMe is an attention patch, ToMA merges each module
    separately."""
    patch = node("nodes_tomesd.TomePatchModel")
    return Graph(lambda m: patch(m, 0.3), same_as={"granularity": "module"})


@row(GROUP, "Token Merging (ToMe) on SD1.5", sdxl=Expected(unmerged={TOKENS_CHANGED: 3}), flux=FOR_UNETS)
def tome_sd15(kit: Kit) -> Graph:
    """Use SD1.5: at its first resolution, which has attention, ToMe itself merges queries."""
    patch = node("nodes_tomesd.TomePatchModel")
    return Graph(lambda m: patch(m, 0.3), model=kit.build_sd15(), steered=False)


@row(GROUP, "Kohya Deep Shrink (PatchModelAddDownscale)", flux=FOR_UNETS)
def deep_shrink(kit: Kit) -> Graph:
    patch = node("nodes_model_downscale.PatchModelAddDownscale")
    return Graph(lambda m: patch(m, 2, 2.0, 0.0, 0.6, True, "bicubic", "bicubic"))


@row(GROUP, "RoPE scaling (ScaleROPE)", sdxl=FOR_FLUX,
     others={**dict.fromkeys(("flux2", "z_image", "lumina2"), MERGED), "wan": NOT_TRIED})  # fmt: skip
def rope(kit: Kit) -> Graph:
    patch = node("nodes_rope.ScaleROPE")
    without = Graph(lambda m: patch(m, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0))
    return Graph(lambda m: patch(m, 1.5, 0.0, 1.5, 2.0, 1.0, 0.0), without=without, off=True)


@row(GROUP, "Style reference (USO)", sdxl=FOR_FLUX)
def uso(kit: Kit) -> Graph:
    """Add twelve text tokens by a patch at the model's input. The added tokens have a batch size of one, so sample
    without guidance."""
    import comfy.ops

    patch, projector = node("nodes_model_patch.USOStyleReference"), part("nodes_model_patch.SigLIPMultiFeatProjModel")
    style = patcher(projector(9, 4, 16, 48, operations=comfy.ops.manual_cast))
    seen = SimpleNamespace(all_hidden_states=random(1, 27, 9, 16), penultimate_hidden_states=random(1, 9, 16))
    return Graph(lambda m: patch(m, style, seen), options={"cfg": 1.0})


# SD3 is missing here, because ComfyUI's SD3 has no hook for EasyCache.
@row(
    GROUP,
    "EasyCache",
    others={name: MERGED for name in OTHERS if name != "sd3"},
    latest={"omnigen2": NONE, "ernie": NONE},
    quick=True,
)
def easycache(kit: Kit) -> Graph:
    patch, steps = node("nodes_easycache.EasyCacheNode"), {"steps": 5}
    without = Graph(lambda m: patch(m, 0.0, 0.0, 1.0, False), options=steps)
    # A threshold at which EasyCache skips the same steps with and without merging.
    reuse = 3.0 if kit.name in FAMILIES else 1e6
    return Graph(lambda m: patch(m, reuse, 0.0, 1.0, False), options=steps, without=without, off=True)


@row(GROUP, "LazyCache", others=MERGED, sound=True)
def lazycache(kit: Kit) -> Graph:
    patch, steps = node("nodes_easycache.LazyCacheNode"), {"steps": 5}
    without = Graph(lambda m: patch(m, 0.0, 0.0, 1.0, False), options=steps)
    reuse = 3.0 if kit.name in FAMILIES else 1e6
    return Graph(lambda m: patch(m, reuse, 0.0, 1.0, False), options=steps, without=without, off=True)


@row(GROUP, "Attention by another function (optimized_attention_override)", others=MERGED, sound=True)
def attention_override(kit: Kit) -> Graph:
    """Override attention as packs for FlashAttention or SageAttention do, here with ComfyUI's sub-quadratic
    attention."""
    from comfy.ldm.modules.attention import attention_sub_quad

    def patch(model: Any) -> Any:
        model = model.clone()
        instead = lambda _, *args, **kwargs: attention_sub_quad(*args, **kwargs)  # noqa: E731
        model.model_options["transformer_options"]["optimized_attention_override"] = instead
        return model

    return Graph(patch, steered=False)


@row(
    GROUP,
    "torch.compile (TorchCompileModel)",
    others={**dict.fromkeys(OTHERS, NOT_TRIED), "z_image": MERGED, "qwen_image21": MERGED},
)
def compiled(kit: Kit) -> Graph:
    """Compile with a backend that runs the captured graphs as they are."""
    patch = node("nodes_torch_compile.TorchCompileModel")
    torch._dynamo.reset()
    unet = {"depths": (0, 1), "num_res_blocks": [1, 1], "transformer_depth": [0, 1], "middle": 1}
    small: dict[str, Any] = {"layers": 2}
    if kit.name == "sdxl":
        small = {**unet, "transformer_depth_output": [0, 0, 1, 0]}
    elif kit.name in ("flux", "flux2", "chroma"):
        small = {"double": 1, "single": 1}
    return Graph(lambda m: patch(m, "eager"), model=kit.build(**small), same_as={})


@row(GROUP, "MultiGPU CFG Split (two devices with a thread each, both of them the CPU)")
def multigpu(kit: Kit) -> Iterator[Graph]:
    """Use ComfyUI's concurrent threads on two devices. Both are the CPU, but ComfyUI and ToMA take them for different
    devices. Both devices make their plans from the predicted picture, so both select the same destinations."""
    import comfy.model_management

    patch = node("nodes_multigpu.MultiGPUCFGSplitNode")
    devices = [torch.device("cpu"), torch.device("cpu", 0)]
    model, loaded = kit.build(), comfy.model_management.loaded_models
    model.cached_patcher_init = (kit.build, ())

    def split(m: Any) -> Any:
        # Hide models of other rows whose patcher was garbage-collected, because the node fails on them.
        here: dict[str, Any] = {
            "get_all_torch_devices": lambda exclude_current=False: devices,
            "loaded_models": lambda: [found for found in loaded() if found is not None],
        }
        with mock.patch.multiple("comfy.model_management", **here):
            m = patch(m, 2)
        assert len(m.get_additional_models_with_key("multigpu")) == 1
        return m

    def similar(result: Tensor) -> None:
        one, full = kit.sample(attach(model, **smooth)), kit.sample(model)
        assert (result - full).norm() < 1.2 * (one - full).norm(), "a larger error than on one device"

    def shared(result: Tensor) -> None:
        state = pack_module("toma_core.run").RunState
        original = state.plan
        destinations: dict[Any, dict[Any, Tensor]] = {}

        def noted(self: Any, x: Tensor, grid: Any, scope: Any, decision: Any, copies: Any, *rest: Any) -> Any:
            plan = original(self, x, grid, scope, decision, copies, *rest)
            for device, _ in copies:
                destinations.setdefault((grid, scope, decision.step), {})[device] = plan.destinations
            return plan

        with mock.patch.object(state, "plan", noted):
            assert torch.equal(kit.sample(attach(split(model))), result), "not the same twice"
        for found in destinations.values():
            assert [*found] and {*found} == {*devices}, "not merged on both devices"
            assert torch.equal(*found.values()), "cond and uncond have destinations of their own"

    smooth: dict[str, Any] = {"selector": "grid", "sharpness": 20.0}
    yield Graph(split, model=model, settings=smooth, steered=False, check=similar, name="error")
    yield Graph(split, model=model, settings={}, steered=False, check=shared, name="destinations")


@row(GROUP, "Reference key-value cache (FluxKVCache)", sdxl=FOR_FLUX,
     flux=unmerged("attention_patch", 6))  # fmt: skip
def kv_cache(kit: Kit) -> Graph:
    patch = node("nodes_flux.FluxKVCache")
    model = kit.build(guidance_embed=False, vec_in_dim=None, global_modulation=True)
    references: dict[str, Any] = {"reference_latents": [random(1, 16, 16, 12)]}
    conds = {"positive": kit.prompt(1, **references), "negative": kit.prompt(2, **references)}
    return Graph(patch, sample=lambda m: kit.sample(m, steps=3, **conds), model=model)


@row(GROUP, "Sequence parallelism of raylight", sdxl=FOR_FLUX,
     flux=Expected(merged=False, unmerged={REPLACED: 3, TOKENS_CHANGED: 3}))  # fmt: skip
def raylight(kit: Kit) -> Iterator[Graph]:
    """Share tokens as raylight does, which replaces the `forward` of double blocks."""
    return _sequence_parallel(kit, rejoin=True)


@row(GROUP, "Sequence parallelism of xDiT", sdxl=FOR_FLUX, flux=unmerged(TOKENS_CHANGED, 6))
def xdit(kit: Kit) -> Iterator[Graph]:
    return _sequence_parallel(kit, rejoin=False)


def _sequence_parallel(kit: Kit, rejoin: bool) -> Iterator[Graph]:
    """Simulate two processes, one after the other. With two references of the picture's size, each process has more
    tokens than text and picture have together."""
    for references in (0, 2):
        latents = {"reference_latents": [random(1, 16, SIDE, SIDE, seed=i) for i in range(references)]}
        options = latents if references else {}
        conds = {"positive": kit.prompt(1, 6, **options), "negative": kit.prompt(2, 6, **options)}
        yield Graph(Shares(InTurn(), rejoin).on, options=conds, name=f"{references} references")


@row(GROUP, "CFG parallelism: processes share the conditions (raylight)", sdxl=unmerged(TOKENS_CHANGED, 11),
     flux=unmerged(TOKENS_CHANGED, 6))  # fmt: skip
def cfg_parallel(kit: Kit) -> Graph:
    return Graph(partial(by_condition, InTurn()))
