"""Samplers, schedulers, guiders, and workflows with several samplers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor

from ..judge import attach, close
from ..kit import SIDE, SMALL, STEPS, Kit, node, part
from ..row import CHEAP, FEWER_SIZES, MERGED, NOT_TRIED, OTHERS, Graph
from ..tiles import corners, tiled
from .table import row

GROUP = "Sampling"

Maker = Callable[[Any], Any]  # makes a part of sampling, such as a guider, for a model


@row(GROUP, "Every sampler that ComfyUI lists", others={**dict.fromkeys(OTHERS, NOT_TRIED), "qwen_image": MERGED})
def samplers(kit: Kit) -> Iterator[Graph]:
    for sampler in part("nodes.KSampler").INPUT_TYPES()["required"]["sampler_name"][0]:
        options = {"sampler": sampler, "scheduler": "normal", "steps": 3, **SMALL}
        yield Graph(options=options, steered=False, name=sampler)


@row(GROUP, "Every scheduler that ComfyUI lists")
def schedulers(kit: Kit) -> Iterator[Graph]:
    for scheduler in part("nodes.KSampler").INPUT_TYPES()["required"]["scheduler"][0]:
        options = {"scheduler": scheduler, "steps": 3, **SMALL}
        yield Graph(options=options, steered=False, name=scheduler)


@row(GROUP, "A batch of images, guidance 1, image to image", others=CHEAP, latest={})
def everyday(kit: Kit) -> Iterator[Graph]:
    sampler = node("nodes.KSampler")
    yield Graph(options={"batch": 3}, steered=False, name="batch")
    yield Graph(options={"cfg": 1.0}, steered=False, name="cfg 1")

    def redrawn(model: Any) -> Tensor:
        return sampler(model, 5, 3, 3.0, "euler", "simple", *kit.prompts, kit.latent(seed=6), 0.6)["samples"]

    yield Graph(sample=redrawn, steered=False, name="image to image")


@row(GROUP, "Sizes that no window and no patch divides", others=MERGED, sound=True, latest={"wandancer": FEWER_SIZES})
def odd_sizes(kit: Kit) -> Iterator[Graph]:
    for height, width in ((19, 15), (33, 10)):
        yield Graph(options={"height": height, "width": width}, steered=False, name=f"{height} x {width}")


@row(GROUP, "KSampler (Advanced): ranges of steps, leftover noise", others=CHEAP, quick=True)
def ranges(kit: Kit) -> Graph:
    """Sample the first half of the steps with leftover noise, then the second half without new noise."""
    sampler = node("nodes.KSamplerAdvanced")

    def sample(model: Any) -> Tensor:
        common = (5, 2 * STEPS, 3.0, "euler", "simple", *kit.prompts)
        first = sampler(model, "enable", *common, kit.latent(), 0, STEPS, "enable")
        return sampler(model, "disable", *common, first, STEPS, 2 * STEPS, "disable")["samples"]

    return Graph(sample=sample, steered=False)


@row(GROUP, "Two samplers: a larger second pass (hires fix)", others=CHEAP)
def hires(kit: Kit) -> Graph:
    sampler, upscale = node("nodes.KSampler"), node("nodes.LatentUpscaleBy")

    def sample(model: Any) -> Tensor:
        first = sampler(model, 5, STEPS, 3.0, "euler", "simple", *kit.prompts, kit.latent(), 1.0)
        larger = upscale(first, "bislerp", 1.5)
        return sampler(model, 6, STEPS, 3.0, "dpmpp_2m", "karras", *kit.prompts, larger, 0.6)["samples"]

    return Graph(sample=sample, steered=False)


def custom(kit: Kit, guider: Any, sigmas: Any, sampler: Any = None, latent: Any = None, noise: Any = None) -> Tensor:
    sampler = node("nodes_custom_sampler.KSamplerSelect")("euler") if sampler is None else sampler
    noise = node("nodes_custom_sampler.RandomNoise")(5) if noise is None else noise
    latent = kit.latent(SMALL["height"]) if latent is None else latent
    return node("nodes_custom_sampler.SamplerCustomAdvanced")(noise, guider, sampler, sigmas, latent)[0]["samples"]


def sigmas_of(model: Any, steps: int = 3) -> Any:
    return node("nodes_custom_sampler.BasicScheduler")(model, "simple", steps, 1.0)


@row(GROUP, "Guiders: basic, CFG, dual CFG (regular, nested), Perp-Neg", others=CHEAP, quick=True)
def guiders(kit: Kit) -> Iterator[Graph]:
    positive, negative = kit.prompts
    third = kit.prompt(3)
    dual = node("nodes_custom_sampler.DualCFGGuider")
    makers: dict[str, Maker] = {
        "basic": lambda m: node("nodes_custom_sampler.BasicGuider")(m, positive),
        "CFG": lambda m: node("nodes_custom_sampler.CFGGuider")(m, positive, negative, 3.0),
        "dual CFG": lambda m: dual(m, positive, third, negative, 3.0, 2.0, "regular"),
        "dual CFG, nested": lambda m: dual(m, positive, third, negative, 3.0, 2.0, "nested"),
        "Perp-Neg": lambda m: node("nodes_perpneg.PerpNegGuider")(m, positive, negative, third, 3.0, 1.0),
    }

    def sample(make: Maker, model: Any) -> Tensor:
        return custom(kit, make(model), sigmas_of(model))

    for name, make in makers.items():
        yield Graph(sample=partial(sample, make), steered=False, name=name)


@row(GROUP, "Dual-model guider", others=CHEAP)
def dual_model(kit: Kit) -> Graph:
    """Run the negative prompt on a second model, with different weights but the first model's options. Both models are
    merged."""
    make = node("nodes_custom_sampler.DualModelGuider")
    positive, negative = kit.prompts

    def sample(negative_model: Any, model: Any) -> Tensor:
        return custom(kit, make(model, positive, 3.0, negative_model, negative), sigmas_of(model))

    return Graph(sample=partial(sample, kit.other_model), without=Graph(sample=partial(sample, kit.model)))


@row(GROUP, "Custom sigmas: karras, exponential, polyexponential, laplace, VP, beta, AYS, GITS, optimal steps, manual")
def sigma_nodes(kit: Kit) -> Iterator[Graph]:
    largest = 1.0 if kit.is_flux else 14.6
    at, n = "nodes_custom_sampler.", 3
    made: dict[str, Maker] = {
        "karras": lambda m: node(at + "KarrasScheduler")(n, largest, 0.03, 7.0),
        "exponential": lambda m: node(at + "ExponentialScheduler")(n, largest, 0.03),
        "polyexponential": lambda m: node(at + "PolyexponentialScheduler")(n, largest, 0.03, 1.0),
        "laplace": lambda m: node(at + "LaplaceScheduler")(n, largest, 0.03, 0.0, 0.5),
        "beta": lambda m: node(at + "BetaSamplingScheduler")(m, n, 0.6, 0.6),
        "AYS": lambda m: node("nodes_align_your_steps.AlignYourStepsScheduler")("SDXL", n, 1.0),
        "GITS": lambda m: node("nodes_gits.GITSScheduler")(1.2, n, 1.0),
        "manual": lambda m: node(at + "ManualSigmas")("1.0, 0.7, 0.2, 0.0"),
        "extended": lambda m: node(at + "ExtendIntermediateSigmas")(sigmas_of(m), 2, -1.0, 0.0, "cosine"),
        "first set": lambda m: node(at + "SetFirstSigma")(sigmas_of(m), largest * 1.1),
        "split": lambda m: node(at + "SplitSigmas")(sigmas_of(m, 5), 2)[1],
        "split by denoise": lambda m: node(at + "SplitSigmasDenoise")(sigmas_of(m, 5), 0.6)[1],
    }
    if kit.is_flux:
        made["optimal steps"] = lambda m: node("nodes_optimalsteps.OptimalStepsScheduler")("FLUX", n, 1.0)
        made = {name: make for name, make in made.items() if name not in ("AYS", "GITS")}
    else:
        made["VP"] = lambda m: node(at + "VPScheduler")(n, 19.9, 0.1, 0.001)
        made["turbo"] = lambda m: node(at + "SDTurboScheduler")(m, n, 1.0)
    sampler, euler = node(at + "SamplerCustom"), node(at + "KSamplerSelect")("euler")
    latent = kit.latent(SMALL["height"])

    def sample(make: Maker, model: Any) -> Tensor:
        return sampler(model, True, 5, 3.0, *kit.prompts, euler, make(model), latent)[0]["samples"]

    for name, make in made.items():
        yield Graph(sample=partial(sample, make), steered=False, name=name)


@row(GROUP, "Tiles of the latent, in any order, one by one or side by side, resting or moving", others=CHEAP)
def tiles(kit: Kit) -> Iterator[Graph]:
    """Call the model as MultiDiffusion and SpotDiffusion do. The plan for a tile is made from the tile's content."""
    at = corners(SIDE)

    def in_order(result: Tensor) -> None:
        for tiles, at_once in ((at[::-1], 1), (at, 2), (at[::-1], 4)):
            again = kit.sample(attach(tiled(kit.model, tiles, at_once)))
            assert close(again, result), "what a tile becomes depends on the others"

    yield Graph(lambda m: tiled(m, at), steered=False, check=in_order, name="resting")
    yield Graph(lambda m: tiled(m, at, 4, lambda step: 3 * step), steered=False, name="moving")


@row(GROUP, "Unsampling: sigmas from low to high (FlipSigmas)", others=CHEAP)
def unsampling(kit: Kit) -> Graph:
    """Stop before pure noise, because ComfyUI divides Flux's last latent by 1 - sigma."""
    flip, still = node("nodes_custom_sampler.FlipSigmas"), node("nodes_custom_sampler.DisableNoise")
    make, part_of = node("nodes_custom_sampler.CFGGuider"), node("nodes_custom_sampler.SplitSigmasDenoise")

    def sample(model: Any) -> Tensor:
        guider, sigmas = make(model, *kit.prompts, 1.0), part_of(sigmas_of(model, 5), 0.8)[1]
        return custom(kit, guider, flip(sigmas), latent=kit.latent(seed=6), noise=still())

    return Graph(sample=sample, steered=False)


@row(GROUP, "Sampler nodes with their own settings: LMS, LCM, LCM upscale, Euler, DPM++, ER-SDE, SEEDS, SA")
def sampler_nodes(kit: Kit) -> Iterator[Graph]:
    at, more = "nodes_custom_sampler.", "nodes_advanced_samplers."
    made: dict[str, Maker] = {
        "LMS": lambda m: node(at + "SamplerLMS")(3),
        "LCM": lambda m: node(more + "SamplerLCM")(1.0, 1.0, 0.0),
        "LCM upscale": lambda m: node(more + "SamplerLCMUpscale")(1.5, -1, "bislerp"),
        "Euler CFG++": lambda m: node(more + "SamplerEulerCFGpp")("regular"),
        "Euler ancestral": lambda m: node(at + "SamplerEulerAncestral")(0.7, 1.0),
        "Euler ancestral CFG++": lambda m: node(at + "SamplerEulerAncestralCFGPP")(0.7, 1.0),
        "DPM++ 2S": lambda m: node(at + "SamplerDPMPP_2S_Ancestral")(0.7, 1.0),
        "DPM++ SDE": lambda m: node(at + "SamplerDPMPP_SDE")(0.7, 1.0, 0.4, "cpu"),
        "DPM++ 2M SDE": lambda m: node(at + "SamplerDPMPP_2M_SDE")("heun", 0.7, 1.0, "cpu"),
        "DPM++ 3M SDE": lambda m: node(at + "SamplerDPMPP_3M_SDE")(0.7, 1.0, "cpu"),
        "ER-SDE": lambda m: node(at + "SamplerER_SDE")("ER-SDE", 3, 1.0, 1.0),
        "SEEDS-2": lambda m: node(at + "SamplerSEEDS2")("phi_1", 0.7, 1.0, 0.4),
        "SA": lambda m: node(at + "SamplerSASolver")(m, 1.0, 0.2, 0.8, 1.0, 3, 4, True, True),
    }
    guider = node("nodes_custom_sampler.CFGGuider")

    def sample(make: Maker, model: Any) -> Tensor:
        return custom(kit, guider(model, *kit.prompts, 3.0), sigmas_of(model, 4), make(model))

    for name, make in made.items():
        yield Graph(sample=partial(sample, make), steered=False, name=name)
