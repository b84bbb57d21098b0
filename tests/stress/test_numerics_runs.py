"""Sample with small models in every dtype, with non-finite, constant, huge and tiny values. Results must not be worse
than without ToMA."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from scripts.comfy_pack import pack_module
from testbed import models
from tests.stress.test_numerics import DtypesUsed

HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32
LARGEST = torch.finfo(HALF).max
SIDE = 16
EVERYTHING = {"min_tokens": 4}
# Fixed destinations and soft weights make results comparable between dtypes, which round differently.
COMPARABLE = {**EVERYTHING, "selector": "grid", "sharpness": 20.0}
SETTINGS = {
    "stack": EVERYTHING,
    "module": {**EVERYTHING, "granularity": "module"},
    "detail": {**EVERYTHING, "granularity": "block", "full_step_interval": 2},
}
# Dtype of the weights, and dtype of the computation.
STORED = {
    "fp32": (FULL, FULL),
    "fp16": (HALF, HALF),
    "bf16": (BRAIN, BRAIN),
    "fp8 in fp16": (torch.float8_e4m3fn, HALF),
    "fp8 in bf16": (torch.float8_e4m3fn, BRAIN),
}
BOTH = ("unet", "flux")
# KINDS leaves out MiniMax H3, whose latents have two streams. WITH_HALF has the models that these tests run in fp16.
# ComfyUI runs some of the other models only in bf16 or fp32. LOWEST leaves out Flux.2, whose 512 text tokens take as
# long as all other models together.
KINDS = [kind for kind in models.KINDS if kind != "h3"]
WITH_HALF = ("unet", "flux", "chroma", "z_image", "krea2", "sd3", "wan")
# Pairs of family and dtype. Each family of BOTH has every dtype except fp32. All other families have bf16, or fp8
# computed in bf16. Those in WITH_HALF also have fp16.
WAYS = [(kind, stored) for kind in BOTH for stored in STORED if stored != "fp32"]
WAYS += [(kind, ("bf16", "fp8 in bf16")[turn % 2]) for turn, kind in enumerate(KINDS) if kind not in BOTH]
WAYS += [(kind, "fp16") for kind in WITH_HALF if kind not in BOTH]
LOWEST = [(kind, "fp16" if kind in WITH_HALF else "bf16") for kind in KINDS if kind != "flux2"]
LOWEST += [(kind, "fp32") for kind in BOTH]


@pytest.fixture(scope="module")
def model_in(pack: Any) -> Callable[..., Any]:
    """model_in(kind, stored): build a model as ComfyUI's loaders do. Weights have one dtype, and are cast to the dtype
    of the computation at each use. as_fp32: use the same weights in fp32."""
    import comfy.supported_models_base

    def make(kind: str, stored: str, as_fp32: bool = False) -> Any:
        weights, computed = STORED[stored]
        fewest = {"z_image": {"layers": 2}, "krea2": {"layers": 2}}.get(kind, {})  # the slowest models
        with pytest.MonkeyPatch.context() as patch:
            cast = not as_fp32 and weights is not computed
            patch.setattr(comfy.supported_models_base.BASE, "manual_cast_dtype", computed if cast else None)
            model = getattr(models, kind)(dtype=FULL if as_fp32 else weights, **fewest)
        for name, parameter in model.model.diffusion_model.named_parameters():
            stays = kind == "wan" and name.startswith("patch_embedding")  # ComfyUI keeps this layer of Wan in fp32
            parameter.data = parameter.data.to(weights).to(FULL if as_fp32 or stays else weights)
        return model

    return make


def noise_of(model: Any, batch: int = 1) -> Tensor:
    latent = model.model.latent_format
    frames = (1,) if latent.latent_dimensions == 3 else ()
    size = batch, latent.latent_channels, *frames, SIDE, SIDE
    return torch.randn(size, generator=torch.Generator().manual_seed(7))


def sampled(model: Any, noise: Tensor, steps: int = 3) -> Tensor:
    import comfy.sample

    conds = [models.conditioning(model, seed=seed) for seed in (1, 2)]
    latent = torch.zeros_like(noise)
    return comfy.sample.sample(model, noise, steps, 3.0, "euler", "simple", *conds, latent, seed=5, disable_pbar=True)


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize(("kind", "stored"), WAYS)
def test_dtypes_cost_a_merged_run_no_more_than_an_unmerged_one(
    kind: str, stored: str, model_in: Any, attach: Any, plan_calls: Any, stats_of: Any
) -> None:
    low, full = model_in(kind, stored), model_in(kind, stored, as_fp32=True)
    noise = noise_of(low)
    unmerged = distance(sampled(low, noise), sampled(full, noise))
    patched = attach(low, **COMPARABLE)
    merged = distance(sampled(patched, noise), sampled(attach(full, **COMPARABLE), noise))
    assert 0 < merged < 2 * unmerged
    computed = STORED[stored][1]
    assert {call.x.dtype for call in plan_calls} == {computed, FULL}
    assert all(call.plan.merge_weights.dtype is call.x.dtype for call in plan_calls)
    assert {p.dtype for p in low.model.diffusion_model.parameters()} - {FULL} == {STORED[stored][0]}
    for settings in SETTINGS.values():
        patched = attach(low, **settings)
        assert sampled(patched, noise).isfinite().all()
        assert stats_of(patched).merged_blocks


@pytest.mark.parametrize(
    ("kind", "stored"), [(kind, "fp16") for kind in WITH_HALF] + [(kind, "fp8 in fp16") for kind in BOTH]
)
def test_no_bf16_on_the_path_of_an_fp16_model(
    kind: str, stored: str, model_in: Any, attach: Any, stats_of: Any
) -> None:
    """ToMA must add no operations in fp64. The model itself may have some."""
    model = model_in(kind, stored)
    noise = noise_of(model)
    with DtypesUsed() as plain:
        sampled(model, noise, steps=1)
    for settings in ("stack", "module"):
        patched = attach(model, **SETTINGS[settings])
        with DtypesUsed() as merged:
            sampled(patched, noise, steps=1)
        assert stats_of(patched).merged_blocks
        assert BRAIN not in merged.found
        assert merged.found[torch.float64] <= plain.found[torch.float64]


@pytest.mark.parametrize(
    ("kind", "stored", "value"),
    [(*way, float("nan")) for way in LOWEST] + [(*way, float("inf")) for way in LOWEST if way[0] in BOTH],
)
def test_broken_image_of_a_batch_is_alone_with_it(
    kind: str, stored: str, value: float, model_in: Any, attach: Any, stats_of: Any
) -> None:
    """One number of the second latent is NaN or infinite. Values that are finite without ToMA stay finite. The first
    image is bit-identical to the first image of an intact batch."""
    model = model_in(kind, stored)
    noise = noise_of(model, batch=2)
    broken = noise.clone()
    broken[1, 2, ..., 5, 6] = value
    clean, plain = sampled(model, noise), sampled(model, broken)
    # In Flux in fp16 on the CPU, PyTorch's matrix product may spread NaN to the first image, even without ToMA.
    apart = plain[0].equal(clean[0])
    assert apart or (kind, stored) == ("flux", "fp16")
    assert not plain[1].isfinite().all()
    for settings in SETTINGS.values():
        patched = attach(model, **settings)
        merged = sampled(patched, broken)
        assert stats_of(patched).merged_blocks
        assert merged[0].equal(sampled(patched, noise)[0]) or not apart
        assert merged.isfinite()[plain.isfinite()].all()
        assert merged[1].isfinite().any() == plain[1].isfinite().any()


@pytest.mark.parametrize(("kind", "stored"), LOWEST)
def test_images_without_content(kind: str, stored: str, model_in: Any, attach: Any, stats_of: Any) -> None:
    """With latents of zeros or of a single number, all similarities are equal."""
    model = model_in(kind, stored)
    for noise in (torch.zeros_like(noise_of(model)), torch.full_like(noise_of(model), 0.5)):
        assert sampled(model, noise).isfinite().all()
        for settings in SETTINGS.values():
            patched = attach(model, **settings)
            first = sampled(patched, noise)
            assert first.isfinite().all()
            assert sampled(patched, noise).equal(first)
            assert stats_of(patched).merged_blocks


def entries(model: Any) -> list[Any]:
    """Return the layers whose outputs are the blocks' tokens."""
    network = model.model.diffusion_model
    found = [getattr(network, name, None) for name in ("img_in", "x_embedder", "first", "patch_embedding")]
    return [m for m in found if m] or [m.proj_in for m in network.modules() if hasattr(m, "transformer_blocks")]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], list[Tensor]]:
    """watched(model): record the largest magnitude of each token that the blocks get, or NaN if the token contains
    NaN."""

    def watch(model: Any) -> list[Tensor]:
        found: list[Tensor] = []

        def seen(block: type[torch.nn.Module], signature: Any) -> None:
            original = block.forward

            @functools.wraps(original)
            def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
                tokens = signature.tokens(signature.call_args(args, kwargs))
                found.append(tokens.float().abs().amax(-1).flatten())
                return original(self, *args, **kwargs)

            monkeypatch.setattr(block, "forward", forward)

        places = pack_module("nodes.adapters.registry").find(model.model.diffusion_model).hook_pairs()
        signatures = {type(block): hook.signature for block, hook in places if hasattr(hook, "signature")}
        for block, signature in signatures.items():
            seen(block, signature)
        return found

    return watch


# Z-Image and SD3 cannot have tiny tokens, because they add values to image tokens before the first block.
POWERS = [(kind, 9 if kind == "unet" else 12) for kind in WITH_HALF]
POWERS += [(kind, -12) for kind in WITH_HALF if kind not in ("z_image", "sd3")]


@pytest.mark.parametrize(("kind", "power"), POWERS)
def test_huge_and_tiny_activations_in_fp16(kind: str, power: int, model_in: Any, watched: Any, attach: Any) -> None:
    """The norms of tokens exceed the range of fp16, or values are denormal."""
    model = model_in(kind, "fp16")
    noise = noise_of(model)
    for layer in entries(model):
        for parameter in layer.parameters():
            parameter.data = parameter.data * 2.0**power
    found = watched(model)
    plain = sampled(model, noise)
    largest = float(torch.cat(found).amax())
    assert plain.isfinite().all()
    assert 2.0**power < largest < LARGEST if power > 0 else float(found[0].amin()) < 1e-2
    for settings in SETTINGS.values():
        found.clear()
        merged = sampled(attach(model, **settings), noise)
        assert torch.cat(found).isfinite().all()
        assert merged.isfinite().all()


@pytest.mark.parametrize("kind", ["flux", "chroma"])
@pytest.mark.parametrize("settings", [*SETTINGS, "soft weights"])
def test_flux_in_fp16_with_tokens_at_the_limit(
    kind: str, settings: str, model_in: Any, watched: Any, attach: Any
) -> None:
    """ComfyUI's Flux clamps the tokens of its single blocks to the range of fp16, so a channel may be at the limit.
    Weights that sum to 1.0003 would turn such a channel into infinity. The next attention would turn infinity into NaN.
    Clamping replaces NaN by 0, so the image would be all zeros."""
    model = model_in(kind, "fp16")
    noise = noise_of(model)
    limit = float(LARGEST)

    def saturate(args: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
        out = extra["original_block"](args)
        img = out["img"].float()
        img[..., 0] = limit
        img[..., 1:9] *= limit / img[..., 1:9].abs().amax()
        return {**out, "img": img.to(HALF)}

    model.set_model_patch_replace(saturate, "dit", "double_block", len(model.model.diffusion_model.double_blocks) - 1)
    found = watched(model)
    plain = sampled(model, noise)
    assert plain.isfinite().all()
    assert float(torch.cat(found).amax()) == limit
    soft = {**EVERYTHING, "window_size": 4, "sharpness": 30.0}
    found.clear()
    merged = sampled(attach(model, **SETTINGS.get(settings, soft)), noise)
    assert torch.cat(found).isfinite().all()
    assert merged.isfinite().all()
    assert distance(merged, plain) < 0.5
