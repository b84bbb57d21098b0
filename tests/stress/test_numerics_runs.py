"""Sample with small models in every dtype, with non-finite, constant, huge and tiny values. Results must not be worse
than without ToMA."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from scripts.comfy_pack import pack_module
from testbed import models

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
# Name -> dtype of the weights, dtype of the computation.
STORED = {
    "fp32": (FULL, FULL),
    "fp16": (HALF, HALF),
    "bf16": (BRAIN, BRAIN),
    "fp8 in fp16": (torch.float8_e4m3fn, HALF),
    "fp8 in bf16": (torch.float8_e4m3fn, BRAIN),
}
BOTH = ("unet", "flux")
# KINDS leaves out MiniMax H3, whose latents consist of video and sound. WITH_HALF has the models that these tests run
# in fp16. ComfyUI runs some of the other models only in bf16 or fp32. LOWEST leaves out Flux.2, whose 512 text tokens
# take as long as all other models together.
KINDS = [kind for kind in models.KINDS if kind != "h3"]
WITH_HALF = ("unet", "flux", "chroma", "z_image", "krea2", "sd3", "wan")
# Pairs of family and dtype. Each family of BOTH has every dtype except fp32. Every other family has either bf16, or fp8
# computed in bf16. Families in WITH_HALF also have fp16.
WAYS = [(kind, stored) for kind in BOTH for stored in STORED if stored != "fp32"]
WAYS += [(kind, ("bf16", "fp8 in bf16")[turn % 2]) for turn, kind in enumerate(KINDS) if kind not in BOTH]
WAYS += [(kind, "fp16") for kind in WITH_HALF if kind not in BOTH]
LOWEST = [(kind, "fp16" if kind in WITH_HALF else "bf16") for kind in KINDS if kind != "flux2"]
LOWEST += [(kind, "fp32") for kind in BOTH]


class DtypesUsed(TorchDispatchMode):
    """Counts the tensors that PyTorch operations take and return, by dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[torch.dtype] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.found.update(t.dtype for t in tree_iter((args, kwargs, out)) if isinstance(t, Tensor))
        return out


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


@pytest.fixture
def merged_runs(attach: Any, stats_of: Any) -> Callable[[Any, Tensor], Iterator[Tensor]]:
    """merged_runs(model, noise): sample with each of SETTINGS. Check that every run merges blocks."""

    def runs(model: Any, noise: Tensor) -> Iterator[Tensor]:
        for settings in SETTINGS.values():
            patched = attach(model, **settings)
            out = sampled(patched, noise)
            assert stats_of(patched).merged_blocks
            yield out

    return runs


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize(("kind", "stored"), WAYS)
def test_error_of_dtypes(kind: str, stored: str, model_in: Any, attach: Any, plan_calls: Any, merged_runs: Any) -> None:
    low, full = model_in(kind, stored), model_in(kind, stored, as_fp32=True)
    noise = noise_of(low)
    unmerged = distance(sampled(low, noise), sampled(full, noise))
    merged = distance(*(sampled(attach(model, **COMPARABLE), noise) for model in (low, full)))
    assert 0 < merged < 2 * unmerged
    computed = STORED[stored][1]
    assert {call.x.dtype for call in plan_calls} == {computed, FULL}
    assert all(call.plan.merge_weights.dtype is call.x.dtype for call in plan_calls)
    assert {p.dtype for p in low.model.diffusion_model.parameters()} - {FULL} == {STORED[stored][0]}
    assert all(out.isfinite().all() for out in merged_runs(low, noise))


@pytest.mark.parametrize(
    ("kind", "stored"),
    sorted({(kind, "fp16") for kind in WITH_HALF} | {(kind, way) for kind in BOTH for way in STORED}),
)
def test_no_other_float(kind: str, stored: str, model_in: Any, merged_runs: Any) -> None:
    """Merging must use no float type that the model does not use: some cards cannot compute in bf16, and Apple's GPUs
    cannot compute in fp64."""
    model = model_in(kind, stored)
    noise = noise_of(model)
    with DtypesUsed() as plain:
        sampled(model, noise)
    with DtypesUsed() as merged:
        runs = list(merged_runs(model, noise))
    for dtype in {HALF, BRAIN, torch.float64} - {STORED[stored][1]}:
        assert merged.found[dtype] <= len(runs) * plain.found[dtype], dtype


@pytest.mark.parametrize(
    ("kind", "stored", "value"),
    [(*way, float("nan")) for way in LOWEST] + [(*way, float("inf")) for way in LOWEST if way[0] in BOTH],
)
def test_broken_image_of_a_batch(kind: str, stored: str, value: float, model_in: Any, merged_runs: Any) -> None:
    """One number of the second latent is NaN or infinite. Values that are finite without ToMA must be finite with ToMA.
    The first image must be bit-identical to that of an intact batch."""
    model = model_in(kind, stored)
    noise = noise_of(model, batch=2)
    broken = noise.clone()
    broken[1, 2, ..., 5, 6] = value
    clean, plain = sampled(model, noise), sampled(model, broken)
    # In Flux in fp16 on the CPU, PyTorch's matrix product may spread NaN to the first image, even without ToMA.
    apart = plain[0].equal(clean[0])
    assert apart or (kind, stored) == ("flux", "fp16")
    assert not plain[1].isfinite().all()
    for merged, intact in zip(merged_runs(model, broken), merged_runs(model, noise), strict=True):
        assert merged[0].equal(intact[0]) or not apart
        assert merged.isfinite()[plain.isfinite()].all()
        assert merged[1].isfinite().any() == plain[1].isfinite().any()


@pytest.mark.parametrize(("kind", "stored"), LOWEST)
def test_images_without_content(kind: str, stored: str, model_in: Any, merged_runs: Any) -> None:
    """With latents of zeros or of a single number, all similarities are equal."""
    model = model_in(kind, stored)
    for noise in (torch.zeros_like(noise_of(model)), torch.full_like(noise_of(model), 0.5)):
        assert sampled(model, noise).isfinite().all()
        for first, again in zip(merged_runs(model, noise), merged_runs(model, noise), strict=True):
            assert first.isfinite().all()
            assert again.equal(first)


def entries(model: Any) -> list[Any]:
    """Return the layers whose outputs are the tokens that enter the blocks."""
    network = model.model.diffusion_model
    found = [getattr(network, name, None) for name in ("img_in", "x_embedder", "first", "patch_embedding")]
    return [m for m in found if m] or [m.proj_in for m in network.modules() if hasattr(m, "transformer_blocks")]


@pytest.fixture
def watched(record: Any) -> Callable[[Any], Callable[[], Tensor]]:
    """watched(model): return a function. Each call returns, for every token that blocks got since the call before, the
    token's largest magnitude, or NaN if the token contains NaN."""

    def watch(model: Any) -> Callable[[], Tensor]:
        pairs = pack_module("nodes.adapters.registry").find(model.model.diffusion_model).hook_pairs()
        records = [(record(block), hook.signature) for block, hook in pairs if hasattr(hook, "signature")]

        def largest() -> Tensor:
            found = []
            for calls, signature in records:
                given = [signature.call_args(tuple(call.args), call.kwargs) for call in calls]
                found += [signature.tokens(each).float().abs().amax(-1).flatten() for each in given]
                calls.clear()
            return torch.cat(found)

        return largest

    return watch


# Z-Image and SD3 cannot have tiny tokens, because they add values to image tokens before the first block.
POWERS = [(kind, 9 if kind == "unet" else 12) for kind in WITH_HALF]
POWERS += [(kind, -12) for kind in WITH_HALF if kind not in ("z_image", "sd3")]


@pytest.mark.parametrize(("kind", "power"), POWERS)
def test_huge_and_tiny_values_in_fp16(kind: str, power: int, model_in: Any, watched: Any, merged_runs: Any) -> None:
    """The norms of tokens exceed the range of fp16, or values are denormal."""
    model = model_in(kind, "fp16")
    noise = noise_of(model)
    for layer in entries(model):
        for parameter in layer.parameters():
            parameter.data = parameter.data * 2.0**power
    found = watched(model)
    assert sampled(model, noise).isfinite().all()
    magnitudes = found()
    assert 2.0**power < float(magnitudes.amax()) < LARGEST if power > 0 else float(magnitudes.amin()) < 1e-2
    assert all(out.isfinite().all() for out in merged_runs(model, noise))
    assert found().isfinite().all()


@pytest.mark.parametrize("kind", ["flux", "chroma"])
@pytest.mark.parametrize("settings", [*SETTINGS, "soft weights"])
def test_flux_in_fp16_at_the_limit(kind: str, settings: str, model_in: Any, watched: Any, attach: Any) -> None:
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
    assert float(found().amax()) == limit
    soft = {**EVERYTHING, "window_size": 4, "sharpness": 30.0}
    merged = sampled(attach(model, **SETTINGS.get(settings, soft)), noise)
    assert found().isfinite().all()
    assert merged.isfinite().all()
    assert distance(merged, plain) < 0.5
