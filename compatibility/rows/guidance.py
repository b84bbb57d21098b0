"""Nodes that change the model's parametrisation or process its predictions."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from ..kit import SIDE, SMALL, Kit, node
from ..row import CHEAP, FOR_FLUX, FOR_UNETS, MERGED, Expected, Graph, NotFor, Refused, unmerged
from .table import row

GROUP = "Guidance and schedules"
REPLACED = "block_replaced"
NEEDED = "attention_patch"


@row(GROUP, "Perturbed-Attention Guidance", sdxl=Expected(unmerged={REPLACED: 2}), flux=FOR_UNETS, quick=True)
def pag(kit: Kit) -> Graph:
    patch = node("nodes_pag.PerturbedAttentionGuidance")
    return Graph(lambda m: patch(m, 3.0), without=Graph(lambda m: patch(m, 0.0)), off=True)


@row(GROUP, "Self-Attention Guidance", sdxl=Expected(unmerged={REPLACED: 1}), flux=Refused(AttributeError), quick=True)
def sag(kit: Kit) -> Graph:
    patch = node("nodes_sag.SelfAttentionGuidance")
    return Graph(lambda m: patch(m, 0.5, 2.0))


@row(GROUP, "Skip Layer Guidance (SD3, DiT, DiT simple)", sdxl=NotFor("for DiTs"),
     others=dict.fromkeys(("flux2", "chroma", "qwen_image", "qwen_image21", "sd3"), MERGED))  # fmt: skip
def slg(kit: Kit) -> Iterator[Graph]:
    sd3, dit = node("nodes_sd3.SkipLayerGuidanceSD3"), node("nodes_slg.SkipLayerGuidanceDiT")
    simple = node("nodes_slg.SkipLayerGuidanceDiTSimple")
    without = Graph(lambda m: dit(m, 0.0, 0.0, 1.0, "1", "1"))
    yield Graph(lambda m: dit(m, 3.0, 0.0, 1.0, "1", "1"), without=without, off=True, name="DiT")
    yield Graph(lambda m: dit(m, 3.0, 0.0, 1.0, "1", "2", 0.5), name="DiT, rescaled")
    if kit.name != "qwen_image21":  # the node skips double blocks, and this model has none
        yield Graph(lambda m: sd3(m, "0, 2", 3.0, 0.0, 1.0), name="SD3")
    yield Graph(lambda m: simple(m, 0.0, 1.0, "1", "1"), name="DiT simple")


@row(GROUP, "Normalized Attention Guidance (NAG)", flux=unmerged(NEEDED, 6),
     others={"flux2": unmerged(NEEDED, 5), "chroma": unmerged(NEEDED, 5), "krea2": unmerged(NEEDED, 4)})  # fmt: skip
def nag(kit: Kit) -> Graph:
    patch = node("nodes_nag.NAGuidance")
    return Graph(lambda m: patch(m, 5.0, 0.5, 1.5))


@row(GROUP, "RenormCFG (Lumina 2)", only={"z_image": MERGED, "lumina2": MERGED})
def renorm(kit: Kit) -> Graph:
    patch = node("nodes_lumina2.RenormCFG")
    return Graph(lambda m: patch(m, 100.0, 1.0))


@row(GROUP, "RescaleCFG")
def rescale(kit: Kit) -> Graph:
    patch = node("nodes_model_advanced.RescaleCFG")
    return Graph(lambda m: patch(m, 0.7))


@row(
    GROUP,
    "CFG functions (CFGZeroStar, CFGNorm, CFGOverride, TCFG, FreSca, Mahiro, APG, Perp-Neg, epsilon scaling, TSR)",
)
def cfg_functions(kit: Kit) -> Iterator[Graph]:
    nodes: dict[str, tuple[Any, ...]] = {
        "nodes_cfg.CFGZeroStar": (),
        "nodes_cfg.CFGNorm": (0.8,),
        "nodes_custom_sampler.CFGOverride": (1.5, 0.0, 0.6),
        "nodes_tcfg.TCFG": (),
        "nodes_fresca.FreSca": (1.0, 1.5, 4),
        "nodes_mahiro.Mahiro": (),
        "nodes_apg.APG": (0.5, 5.0, -0.3),
        "nodes_perpneg.PerpNeg": (kit.prompt(4), 1.0),
        "nodes_eps.EpsilonScaling": (1.05,),
        "nodes_eps.TemporalScoreRescaling": (0.95, 1.0),
    }
    for name, inputs in nodes.items():
        yield Graph(partial(_second, node(name), inputs), options=SMALL, name=name)


@row(
    GROUP,
    "ModelSamplingDiscrete (eps, v, x0, LCM, zero SNR), ContinuousEDM, ContinuousV, StableCascade",
    flux=FOR_UNETS,
)
def model_sampling(kit: Kit) -> Iterator[Graph]:
    discrete = node("nodes_model_advanced.ModelSamplingDiscrete")
    edm = node("nodes_model_advanced.ModelSamplingContinuousEDM")
    nodes: dict[str, tuple[Any, tuple[Any, ...]]] = {
        **{f"Discrete {kind}": (discrete, (kind, False)) for kind in ("v_prediction", "lcm", "x0")},
        "Discrete v, zero SNR": (discrete, ("v_prediction", True)),
        **{f"EDM {kind}": (edm, (kind, 120.0, 0.002)) for kind in ("v_prediction", "edm", "eps")},
        "V": (node("nodes_model_advanced.ModelSamplingContinuousV"), ("v_prediction", 500.0, 0.03)),
        "StableCascade": (node("nodes_model_advanced.ModelSamplingStableCascade"), (2.0,)),
    }
    for name, (patch, inputs) in nodes.items():
        yield Graph(partial(_second, patch, inputs), options=SMALL, steered=False, name=name)


@row(GROUP, "ModelSamplingFlux, ModelSamplingSD3, ModelSamplingAuraFlow", sdxl=FOR_FLUX, others=CHEAP)
def model_sampling_flow(kit: Kit) -> Iterator[Graph]:
    nodes = {"Flux": (1.15, 0.5, 1024, 1536), "SD3": (3.0,), "AuraFlow": (1.73,)}
    for name, inputs in nodes.items():
        patch = node(f"nodes_model_advanced.ModelSampling{name}")
        yield Graph(partial(_second, patch, inputs), options=SMALL, steered=False, name=name)


@row(GROUP, "Differential Diffusion", others=MERGED, quick=True)
def differential(kit: Kit) -> Graph:
    patch, slope = node("nodes_differential_diffusion.DifferentialDiffusion"), _slope()
    masked = {"noise_mask": slope, "steps": 3}
    return Graph(lambda m: patch(m, 1.0), options=masked, without=Graph(options=masked))


@row(GROUP, "Context windows over a batch (ContextWindowsManual)", others=CHEAP)
def context_windows(kit: Kit) -> Graph:
    patch = node("nodes_context_windows.ContextWindowsManualNode")
    windows = {"context_schedule": "standard_static", "context_stride": 1, "closed_loop": False}
    return Graph(
        lambda m: patch(m, 2, 1, **windows, fuse_method="pyramid", dim=0, freenoise=False),
        options={"batch": 5},
        steered=False,
    )


@row(GROUP, "Context windows over frames (WanContextWindowsManual)", only={"wan": MERGED})
def context_windows_of_a_video(kit: Kit) -> Graph:
    patch = node("nodes_context_windows.WanContextWindowsManualNode")
    windows = ("standard_static", 1, False, "pyramid", False)
    return Graph(lambda m: patch(m, 9, 4, *windows), options={"frames": 5}, steered=False)


def _second(patch: Any, inputs: tuple[Any, ...], model: Any) -> Any:
    return patch(model, *inputs)


def _slope() -> Any:
    """Return a mask from 0 on the left to 1 on the right."""
    import torch

    return torch.linspace(0, 1, SIDE).expand(1, 1, SIDE, SIDE)
