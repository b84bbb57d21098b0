"""Numbers as they come: every dtype, huge and tiny, all alike, and broken ones. Never worse than without the node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from benchmarks import models
from scripts.comfy_pack import pack_module

config_module = pack_module("toma_core.config")
core = pack_module("toma_core")
SelectorKind, UnmergeKind = config_module.SelectorKind, config_module.UnmergeKind
GRID = (13, 9)
HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32
LARGEST = torch.finfo(HALF).max
KINDS = ("unet", "flux")

dtypes = pytest.mark.parametrize("dtype", [HALF, BRAIN, FULL], ids=str)
selectors = pytest.mark.parametrize("selector", list(SelectorKind), ids=lambda kind: kind.value)


def smooth(dtype: torch.dtype, batch: int = 2, channels: int = 40, seed: int = 0) -> Tensor:
    """Neighbours are alike, as in a picture; at most 8. (B, 117, C)"""
    x = torch.randn(batch, channels, *GRID, generator=torch.Generator().manual_seed(seed))
    x = torch.nn.functional.avg_pool2d(x, 3, 1, 1) + 0.1 * x
    return x.flatten(2).transpose(1, 2).clamp(-8, 8).contiguous().to(dtype)


def run_of(**settings: Any) -> Any:
    settings = {"min_tokens": 4, "window_size": 4, **settings}
    return core.RunState(core.Schedule(core.ToMAConfig(**settings)))


def plan_of(x: Tensor, **settings: Any) -> Any:
    """A plan at ratio 0.5 on windows of 2 to 4 x 3 tokens, some of them ragged."""
    return run_of(**settings).plan(x, GRID, "a", core.Decision(0, 0.5, 0, 0), (None,))


def check_picks(plan: Any) -> None:
    """As many as each window's budget, ascending, distinct, none of them padding; then the first one again."""
    for image in plan.picks.tolist():
        for row, kept, count in zip(image, plan.budget.counts, plan.windows.counts, strict=True):
            assert row[:kept] == sorted(set(row[:kept]))
            assert 0 <= row[0] <= row[kept - 1] < count
            assert all(pick == row[0] for pick in row[kept:])


def check_weights(plan: Any) -> None:
    """Finite, and rows of M in use sum to 1 up to the rounding of as many terms."""
    M = plan.merge_weights.float()
    assert M.isfinite().all()
    assert plan.unmerge_weights.isfinite().all()
    rows = plan.budget.pack(M.sum(-1)[..., None])
    tolerance = 16 * torch.finfo(plan.merge_weights.dtype).eps
    torch.testing.assert_close(rows, torch.ones_like(rows), rtol=0, atol=tolerance)


def same_plan(a: Any, b: Any) -> bool:
    return all(torch.equal(getattr(a, n), getattr(b, n)) for n in ("picks", "merge_weights", "unmerge_weights"))


def numbers(name: str, dtype: torch.dtype) -> Tensor:
    """Finite tokens that are hard to compare. (2, 117, 40)"""
    x, info = smooth(dtype), torch.finfo(dtype)
    if name == "huge":
        return x * (info.max / 32)
    if name == "tiny":  # denormal in each dtype
        return (x.double() * (info.smallest_normal / 64)).to(dtype)
    if name == "one huge channel":
        x[..., 3] = info.max / 2
        return x
    if name == "alternating signs at the limit":
        signs = 1.0 - 2.0 * (torch.arange(x.shape[-1]) % 2)
        return (signs.double() * info.max / 2).to(dtype).expand_as(x).clone()
    return torch.full_like(x, {"zero": 0.0, "constant": 3.0}[name])


@dtypes
@pytest.mark.parametrize("unmerge_kind", list(UnmergeKind), ids=lambda kind: kind.value)
@pytest.mark.parametrize(
    "name", ["huge", "tiny", "one huge channel", "alternating signs at the limit", "zero", "constant"]
)
def test_finite_tokens_give_finite_results(name: str, dtype: torch.dtype, unmerge_kind: Any) -> None:
    x = numbers(name, dtype)
    assert x.isfinite().all()
    for selector in SelectorKind:
        plan = plan_of(x, selector=selector, unmerge=unmerge_kind)
        check_picks(plan)
        check_weights(plan)
        merged = core.merge(x, plan)
        assert merged.dtype is plan.merge_weights.dtype is dtype
        assert merged.isfinite().all()
        assert core.restore(merged.clone(), merged, x, plan).equal(x), "a block that does nothing changes nothing"


@dtypes
@selectors
def test_scale_does_not_matter(dtype: torch.dtype, selector: Any) -> None:
    """The same tokens times a power of two, up to where their squares are far beyond the dtype, and down to denormal
    numbers: the very same plan."""
    x = smooth(dtype)
    up = 2.0**12 if dtype is HALF else 2.0**50
    assert (x.float().square().sum(-1) * up**2).min() > LARGEST
    assert same_plan(plan_of(x * up, selector=selector), plan_of(x, selector=selector))
    if dtype is HALF:
        tiny = x * 2.0**-18
        assert (tiny.abs().amax(-1) < torch.finfo(HALF).smallest_normal).any()
        assert same_plan(plan_of(tiny, selector=selector), plan_of(tiny * 2.0**18, selector=selector))
    else:
        assert same_plan(plan_of(x * 2.0**-30, selector=selector), plan_of(x, selector=selector))


# What is broken in the second of two images: (token, channel) -> value.
BROKEN: dict[str, Callable[[Tensor], None]] = {
    "one NaN": lambda x: x[1, 40, 3].fill_(float("nan")),
    "one infinity": lambda x: x[1, 40, 3].fill_(float("inf")),
    "both infinities": lambda x: x[1, 40, 3:5].copy_(torch.tensor([float("inf"), -float("inf")])),
    # Ragged windows repeat their first token in their padding.
    "the first of each window": lambda x: x[1].view(*GRID, -1)[::3, ::3].fill_(float("nan")),
    "a window of NaN": lambda x: x[1].view(*GRID, -1)[:4, :4].fill_(float("nan")),
    "all of it": lambda x: x[1].fill_(float("nan")),
}


@dtypes
@pytest.mark.parametrize("name", list(BROKEN))
@pytest.mark.parametrize("unmerge_kind", list(UnmergeKind), ids=lambda kind: kind.value)
def test_broken_tokens_spoil_their_own_window_only(name: str, dtype: torch.dtype, unmerge_kind: Any) -> None:
    """Every selector ends with valid picks; the other image, and every window without a broken token, are as ever."""
    x = smooth(dtype)
    broken = x.clone()
    BROKEN[name](broken)
    assert not broken.isfinite().all()
    for selector in SelectorKind:
        clean, plan = (plan_of(t, selector=selector, unmerge=unmerge_kind) for t in (x, broken))
        check_picks(plan)
        check_weights(plan)
        merged = core.merge(broken, plan)
        out = core.restore(merged * 2, merged, broken, plan)
        reference = core.merge(x, clean)
        expected = core.restore(reference * 2, reference, x, clean)
        assert out[0].equal(expected[0])
        windows = plan.windows.split(broken)[1].isfinite().flatten(1).all(1)
        spoiled = plan.windows.join((~windows)[None, :, None, None].expand(1, -1, plan.windows.slots, 1))[0, :, 0]
        assert spoiled.any()
        assert out[1][~spoiled].equal(expected[1][~spoiled])


@pytest.mark.parametrize("name", ["one NaN", "one infinity", "all of it"])
def test_a_later_weighing_of_broken_tokens(name: str) -> None:
    """Picks of sound tokens, weights of broken ones."""
    x, run = smooth(FULL), run_of()
    broken = x.clone()
    BROKEN[name](broken)
    run.plan(x, GRID, "a", core.Decision(0, 0.5, 0, 0), (None,))
    plan = run.plan(broken, GRID, "a", core.Decision(1, 0.5, 0, 1), (None,))
    check_picks(plan)
    check_weights(plan)
    assert plan.merge_weights[0].equal(plan_of(x).merge_weights[0])


class Seen(TorchDispatchMode):
    """Which dtypes and devices the results of every operation have, and how often."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: dict[torch.dtype, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in tree_iter((args, kwargs, out)):
            if isinstance(t, Tensor):
                self.dtypes[t.dtype] = self.dtypes.get(t.dtype, 0) + 1
        return out


@dtypes
@selectors
@pytest.mark.parametrize("unmerge_kind", list(UnmergeKind), ids=lambda kind: kind.value)
def test_no_other_float_than_the_tokens_own_and_fp32(dtype: torch.dtype, selector: Any, unmerge_kind: Any) -> None:
    """No bf16 on cards that have only fp16, and no fp64, which Apple's GPUs lack."""
    x = smooth(dtype)
    details = run_of(full_every=2, detail_reuse=True, granularity="block", selector=selector, unmerge=unmerge_kind)
    with Seen() as seen:
        for step in range(3):
            decision = core.Decision(step, 0.5, step, step, keeps_detail=step == 0)
            evaluation = core.Evaluation(details, decision)
            plan = core.plan_for(x, GRID, "a", evaluation)
            detail = evaluation.detail("block")
            reduced = core.reduce(x, plan, detail)
            core.restore(reduced * 2, reduced, x, plan, detail)
    floats = {d for d in seen.dtypes if d.is_floating_point}
    assert dtype in floats
    assert floats <= {dtype, FULL}


@pytest.mark.parametrize("devices", [("cuda:0", "cpu", "cuda:1", "cuda:0"), ("cpu", "cuda:0", "cpu")], ids=str)
@pytest.mark.parametrize("unmerge_kind", list(UnmergeKind), ids=lambda kind: kind.value)
def test_state_is_made_where_the_tokens_are(devices: tuple[str, ...], unmerge_kind: Any) -> None:
    """On stand-ins that know their device and have no values: an operation across two devices is an error. One run
    that moves, which multi-GPU sampling and offloading could make of it, and a new one each time."""
    moving = run_of(unmerge=unmerge_kind)
    moving.plan(smooth(HALF), GRID, "a", core.Decision(0, 0.5, 0, 0), (None,))  # the tables of this grid, on the CPU
    with FakeTensorMode(allow_non_fake_inputs=True):
        plans: dict[str, Any] = {}
        for device in devices:
            x = torch.empty(2, GRID[0] * GRID[1], 40, dtype=HALF, device=device)
            for run in (moving, run_of(unmerge=unmerge_kind)):
                plan = run.plan(x, GRID, "b", core.Decision(0, 0.5, 0, 0), ("l", "r"))
                merged = core.merge(x, plan)
                out = core.restore(merged * 2, merged, x, plan)
                own = [plan.picks, plan.merge_weights, plan.unmerge_weights, plan.destinations, plan.windows.source]
                assert {str(t.device) for t in (*own, merged, out)} == {device}
                if run is moving:
                    assert plans.setdefault(device, plan) is plan, "the plan of a device is still there afterwards"
        assert len(plans) == len(set(devices))


@pytest.mark.gpu
def test_moves_between_real_devices() -> None:
    """The same tokens on the CPU, the GPU and the CPU again, in one run."""
    x, run = smooth(FULL), run_of(selector="grid")
    results = []
    for device in ("cpu", "cuda", "cpu", "cuda"):
        tokens = x.to(device)
        plan = run.plan(tokens, GRID, "a", core.Decision(0, 0.5, 0, 0), (None,))
        merged = core.merge(tokens, plan)
        assert merged.device.type == device
        results.append(core.restore(merged * 2, merged, tokens, plan).cpu())
    assert results[0].equal(results[2])
    assert results[1].equal(results[3])
    torch.testing.assert_close(results[1], results[0], rtol=1e-3, atol=1e-3)


# Whole runs.

SIDE = 16
EVERYTHING = {"min_tokens": 4, "flux_whole_double": 0, "flux_whole_single": 0}
# Greedy gains tie, and rounding decides: with fixed destinations and soft weights numbers can be compared.
COMPARABLE = {**EVERYTHING, "selector": "grid", "scale": 20.0}
SETTINGS = {
    "stack": EVERYTHING,
    "module": {**EVERYTHING, "granularity": "module"},
    "detail": {**EVERYTHING, "granularity": "block", "full_every": 2, "detail_reuse": True},
}
# How weights are stored, and what is computed in.
STORED = {
    "fp32": (FULL, FULL),
    "fp16": (HALF, HALF),
    "bf16": (BRAIN, BRAIN),
    "fp8 in fp16": (torch.float8_e4m3fn, HALF),
    "fp8 in bf16": (torch.float8_e4m3fn, BRAIN),
}


@pytest.fixture(scope="module")
def model_of(pack: Any) -> Callable[..., Any]:
    """model_of(kind, stored): a model as ComfyUI's loaders make it, weights in one dtype and, where that is another,
    cast to the other each time they are used. as_fp32: a model of its own with the very same weights in fp32."""
    import comfy.supported_models

    def make(kind: str, stored: str, as_fp32: bool = False) -> Any:
        weights, computed = STORED[stored]
        config = comfy.supported_models.SDXL if kind == "unet" else comfy.supported_models.Flux
        with pytest.MonkeyPatch.context() as patch:
            cast = not as_fp32 and weights is not computed
            patch.setattr(config, "manual_cast_dtype", computed if cast else None)
            model = getattr(models, kind)(dtype=FULL if as_fp32 else weights)
        for parameter in model.model.diffusion_model.parameters():
            parameter.data = parameter.data.to(weights).to(FULL if as_fp32 else weights)
        return model

    return make


def noise_of(kind: str, batch: int = 1) -> Tensor:
    channels = 4 if kind == "unet" else 16
    return torch.randn(batch, channels, SIDE, SIDE, generator=torch.Generator().manual_seed(7))


def sampled(model: Any, noise: Tensor, steps: int = 2) -> Tensor:
    """What ComfyUI's sampler makes of this very noise."""
    import comfy.sample

    conds = [models.conditioning(model, seed=seed) for seed in (1, 2)]
    latent = torch.zeros_like(noise)
    return comfy.sample.sample(model, noise, steps, 3.0, "euler", "simple", *conds, latent, seed=5, disable_pbar=True)


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("stored", [s for s in STORED if s != "fp32"])
@pytest.mark.parametrize("kind", KINDS)
def test_dtypes_cost_a_merged_run_no_more_than_a_whole_one(
    kind: str, stored: str, model_of: Any, attach: Any, plan_calls: Any, stats_of: Any
) -> None:
    noise = noise_of(kind)
    low, full = model_of(kind, stored), model_of(kind, stored, as_fp32=True)
    whole = distance(sampled(low, noise), sampled(full, noise))
    patched = attach(low, **COMPARABLE)
    merged = distance(sampled(patched, noise), sampled(attach(full, **COMPARABLE), noise))
    assert 0 < merged < 2 * whole
    computed = STORED[stored][1]
    assert {call.x.dtype for call in plan_calls} == {computed, FULL}
    assert all(call.plan.merge_weights.dtype is call.x.dtype for call in plan_calls)
    assert {p.dtype for p in low.model.diffusion_model.parameters()} == {STORED[stored][0]}
    for settings in SETTINGS.values():
        patched = attach(low, **settings)
        assert sampled(patched, noise).isfinite().all()
        assert stats_of(patched).merged_blocks


@pytest.mark.parametrize("stored", ["fp16", "fp8 in fp16"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_bf16_on_the_path_of_an_fp16_model(
    kind: str, stored: str, model_of: Any, attach: Any, stats_of: Any
) -> None:
    """Nor more operations in fp64 than the model itself has."""
    model, noise = model_of(kind, stored), noise_of(kind)
    with Seen() as plain:
        sampled(model, noise, steps=1)
    for settings in ("stack", "module"):
        patched = attach(model, **SETTINGS[settings])
        with Seen() as merged:
            sampled(patched, noise, steps=1)
        assert stats_of(patched).merged_blocks
        assert BRAIN not in merged.dtypes
        assert merged.dtypes.get(torch.float64, 0) <= plain.dtypes.get(torch.float64, 0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("stored", ["fp32", "fp16"])
@pytest.mark.parametrize("kind", KINDS)
def test_broken_image_of_a_batch_is_alone_with_it(
    kind: str, stored: str, value: float, model_of: Any, attach: Any, stats_of: Any
) -> None:
    """One number of one of two latents: what is finite without the node is finite with it, and the other image is the
    same to the last bit."""
    model, noise = model_of(kind, stored), noise_of(kind, batch=2)
    broken = noise.clone()
    broken[1, 2, 5, 6] = value
    clean, plain = sampled(model, noise), sampled(model, broken)
    # PyTorch's fp16 product on the CPU lets NaN through to other rows (the text of Flux), whoever calls it.
    apart = plain[0].equal(clean[0])
    assert apart or (kind, stored) == ("flux", "fp16")
    assert not plain[1].isfinite().all()
    for settings in SETTINGS.values():
        patched = attach(model, **settings)
        merged = sampled(patched, broken)
        assert stats_of(patched).merged_blocks
        assert merged[0].equal(sampled(patched, noise)[0]) or not apart
        assert merged.isfinite()[plain.isfinite()].all()


@pytest.mark.parametrize("stored", ["fp32", "fp16"])
@pytest.mark.parametrize("kind", KINDS)
def test_images_without_content(kind: str, stored: str, model_of: Any, attach: Any, stats_of: Any) -> None:
    """Latents of zeros and of one number: similarities tie everywhere. Finite, and the same each time."""
    model = model_of(kind, stored)
    for noise in (torch.zeros_like(noise_of(kind)), torch.full_like(noise_of(kind), 0.5)):
        assert sampled(model, noise).isfinite().all()
        for settings in SETTINGS.values():
            patched = attach(model, **settings)
            first = sampled(patched, noise)
            assert first.isfinite().all()
            assert sampled(patched, noise).equal(first)
            assert stats_of(patched).merged_blocks


def entries(model: Any) -> list[Any]:
    """The layers through which tokens come into the blocks."""
    network = model.model.diffusion_model
    if hasattr(network, "img_in"):
        return [network.img_in]
    return [m.proj_in for m in network.modules() if hasattr(m, "transformer_blocks")]


def watched(model: Any) -> list[Tensor]:
    """What image tokens the model's blocks are given from now on: the largest magnitude, NaN if there is one."""
    network, found = model.model.diffusion_model, []
    blocks = [b for m in network.modules() if hasattr(m, "transformer_blocks") for b in m.transformer_blocks]
    blocks += [*getattr(network, "double_blocks", ()), *getattr(network, "single_blocks", ())]

    def before(_: Any, args: Any, kwargs: Any) -> None:
        x = kwargs.get("img", kwargs.get("x", args[0] if args else None))
        found.append(x.float().abs().amax())

    for block in blocks:
        block.register_forward_pre_hook(before, with_kwargs=True)
    return found


@pytest.mark.parametrize(("kind", "power"), [("unet", 9), ("unet", -12), ("flux", 12), ("flux", -12)])
def test_huge_and_tiny_activations_in_fp16(kind: str, power: int, model_of: Any, attach: Any) -> None:
    """Tokens with norms far beyond fp16, and denormal ones, at the entry of every stack of blocks."""
    model, noise = model_of(kind, "fp16"), noise_of(kind)
    for layer in entries(model):
        for parameter in layer.parameters():
            parameter.data = parameter.data * 2.0**power
    found = watched(model)
    plain = sampled(model, noise)
    largest = float(torch.stack(found).amax())
    assert plain.isfinite().all()
    assert 2.0**power < largest < LARGEST if power > 0 else float(found[0]) < 1e-2
    for settings in SETTINGS.values():
        found.clear()
        merged = sampled(attach(model, **settings), noise)
        assert torch.stack(found).isfinite().all()
        assert merged.isfinite().all()


@pytest.mark.parametrize("settings", [*SETTINGS, "pseudo-inverse", "soft weights"])
def test_flux_in_fp16_with_tokens_at_the_limit(settings: str, model_of: Any, attach: Any) -> None:
    """ComfyUI's Flux keeps the tokens of its single blocks in the range of fp16 by cutting off what is beyond, so a
    channel may sit at the limit itself, where weights that sum to 1.0003 are too many: an infinity, which is NaN
    everywhere after the next attention, and then cut off to an image of zeros."""
    model, noise = model_of("flux", "fp16"), noise_of("flux")
    limit = float(LARGEST)

    def saturate(args: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
        out = extra["original_block"](args)
        img = out["img"].float()
        img[..., 0] = limit
        img[..., 1:9] *= limit / img[..., 1:9].abs().amax()
        return {**out, "img": img.to(HALF)}

    model.set_model_patch_replace(saturate, "dit", "double_block", 2)
    found = watched(model)
    plain = sampled(model, noise)
    assert plain.isfinite().all()
    assert float(torch.stack(found).amax()) == limit
    extra = {"pseudo-inverse": {"unmerge": "pseudo-inverse"}, "soft weights": {"window_size": 4, "scale": 30.0}}
    found.clear()
    merged = sampled(attach(model, **SETTINGS.get(settings, {**EVERYTHING, **extra.get(settings, {})})), noise)
    assert torch.stack(found).isfinite().all()
    assert merged.isfinite().all()
    assert distance(merged, plain) < 0.5
