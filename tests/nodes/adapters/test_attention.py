"""The report names the attention that computes, and merged tokens go to it as whole ones do: dense, without a mask."""

from __future__ import annotations

import functools
import importlib
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import models
from scripts.comfy_pack import pack_module

SIDE = 16
OWN, FLUX, LAYERS = "comfy.ldm.modules.attention", "comfy.ldm.flux.math", "comfy.ldm.flux.layers"
KINDS = ["unet", "flux"]
CALLERS = pack_module("nodes.adapters.attention")._CALLERS


@pytest.fixture
def told(request: pytest.FixtureRequest, attach: Any, stats_of: Any) -> Any:
    """told(kind): what the report of a run names."""

    def run(kind: str) -> str:
        model = attach(request.getfixturevalue(kind))
        models.sample(model, SIDE, SIDE, steps=1)
        attention: str = stats_of(model).attention
        return attention

    return run


def replace(monkeypatch: pytest.MonkeyPatch, module: str, name: str, made: Any) -> list[Any]:
    """Put what `made` gives for the original in its place, as packs do. Returns a list that grows with every call."""
    place, calls = importlib.import_module(module), []
    inside = made(getattr(place, name))

    @functools.wraps(inside)
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return inside(*args, **kwargs)

    monkeypatch.setattr(place, name, counted)
    return calls


@pytest.mark.compat
@pytest.mark.parametrize("kind", KINDS)
def test_comfyuis_own_choice(told: Any, kind: str) -> None:
    chosen = importlib.import_module(OWN).optimized_attention
    assert told(kind) == chosen.__name__.removeprefix("attention_")


@pytest.mark.parametrize("family", models.TRANSFORMERS)
def test_every_familys_attention_is_named(family: str, attach: Any, stats_of: Any) -> None:
    chosen = importlib.import_module(OWN).optimized_attention
    model = attach(models.TRANSFORMERS[family]())
    models.sample(model, SIDE, SIDE, steps=1)
    assert stats_of(model).attention == chosen.__name__.removeprefix("attention_")
    width = pack_module("nodes.adapters.attention")._width
    heads = [m for m in model.model.diffusion_model.modules() if type(m).__name__ in CALLERS]
    assert all(8 <= width(m) <= 64 for m in heads)


@pytest.mark.compat
@pytest.mark.parametrize(("module", "name"), [(OWN, "optimized_attention"), (FLUX, "optimized_attention")])
def test_a_name_that_another_pack_has_replaced(
    told: Any, monkeypatch: pytest.MonkeyPatch, module: str, name: str
) -> None:
    """Flux has its own: a pack that replaces one of the two changes one kind of model."""
    calls = replace(monkeypatch, module, name, lambda original: original)
    chosen = importlib.import_module(OWN).attention_pytorch.__name__.removeprefix("attention_")
    for kind in KINDS:
        calls.clear()
        attention = told(kind)
        assert bool(calls) == (kind == ("unet" if module == OWN else "flux"))
        assert attention == (f"attention_pytorch of {__name__}" if calls else chosen)


def test_a_block_or_function_of_another_pack(told: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = replace(monkeypatch, LAYERS, "attention", lambda original: original)
    assert told("flux") == f"attention of {__name__}"
    assert calls
    monkeypatch.undo()

    block = importlib.import_module(OWN).CrossAttention
    forward = block.forward

    def other(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(block, "forward", other)
    pack_module("nodes.adapters.registry")._hooks.clear()
    assert told("unet") == f"other of {__name__}"


@pytest.mark.compat
@pytest.mark.parametrize("kind", KINDS)
def test_flash_that_falls_back_is_not_named(told: Any, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """ComfyUI's function for FlashAttention, on a CPU: PyTorch's computes, and the picture is the same."""
    own = importlib.import_module(OWN)
    for place in (own, importlib.import_module(FLUX)):
        monkeypatch.setattr(place, "optimized_attention", own.attention_flash)
    original, calls = torch.nn.functional.scaled_dot_product_attention, []

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(args)
        return original(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    assert told(kind) == "pytorch (in place of flash, which needs a GPU)"
    assert calls


H100, T4 = ((9, 0), "cuda"), ((7, 5), "cuda")
HALF, FULL = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("name", "card", "dtype", "widths", "expected"),
    [
        ("attention_flash", H100, HALF, (64, 64), "flash (pytorch for a mask)"),
        ("attention_flash", H100, HALF, (40, 320), "flash (pytorch for a mask and heads wider than 256)"),
        ("attention_flash", H100, FULL, (64, 64), "pytorch (in place of flash, which takes no float32)"),
        ("attention_flash", T4, HALF, (64, 64), "pytorch (in place of flash, which takes no card of this age)"),
        ("attention_flash", (None, "cuda"), FULL, (64, 64), "flash (pytorch for a mask)"),
        ("attention_flash", (None, "mps"), HALF, (64, 64), "pytorch (in place of flash, which needs a GPU)"),
        ("attention_sage", H100, HALF, (64, 64), "sage"),
        ("attention_sage", H100, HALF, (40, 80, 160), "sage (pytorch for heads wider than 128)"),
        ("attention_sage", H100, FULL, (64, 64), "pytorch (in place of sage, which takes no float32)"),
        ("attention_xformers", H100, FULL, (64, 64), "xformers"),
        ("attention_sub_quad", (None, "cpu"), FULL, (64, 64), "sub_quad"),
    ],
)
def test_what_a_library_refuses_on_described_cards(
    pack: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    card: tuple[Any, str],
    dtype: torch.dtype,
    widths: tuple[int, ...],
    expected: str,
) -> None:
    """Of an AMD card, which is none that its driver describes, nothing is said: its libraries differ."""
    adapter, own = pack_module("nodes.adapters.attention"), importlib.import_module(OWN)
    payoff = pack_module("toma_core.payoff")
    capability, kind = card
    described = None if capability is None else payoff.Card("a card", capability, 100)
    monkeypatch.setattr(adapter, "card_of", lambda device: described)
    monkeypatch.setattr(own, "optimized_attention", getattr(own, name))
    network = torch.nn.Sequential(*(own.CrossAttention(8, heads=1, dim_head=width) for width in widths))
    inner = SimpleNamespace(diffusion_model=network, get_dtype_inference=lambda: dtype)
    model = SimpleNamespace(model=inner, load_device=torch.device(kind))
    assert adapter.attention_in_use(model, {}) == expected


def test_the_path_of_a_pack_is_nobodys_business(pack: ModuleType, unet: Any) -> None:
    """ComfyUI loads packs under the path that they lie in."""
    adapter = pack_module("nodes.adapters.attention")
    own = importlib.import_module(OWN).optimized_attention.__name__.removeprefix("attention_")
    for module in ("/home/me/ComfyUI/custom_nodes/Fast_x_1.kernels", "C:\\me\\custom_nodes\\Fast_x_1.kernels"):
        override = FunctionType((lambda f, *a, **k: f(*a, **k)).__code__, {"__name__": module})
        options = {"optimized_attention_override": override}
        assert adapter.attention_in_use(unet, options) == f"{own}, overridden by Fast_x_1.kernels"


def test_what_nobody_can_tell_costs_no_run(pack: ModuleType, unet: Any) -> None:
    adapter = pack_module("nodes.adapters.attention")
    assert adapter.attention_in_use(SimpleNamespace(model=None), {}) == "unknown"
    plain = SimpleNamespace(model=SimpleNamespace(diffusion_model=torch.nn.Linear(2, 2)), load_device="cpu")
    assert adapter.attention_in_use(plain, {}) == "unknown"


@pytest.mark.compat
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("granularity", ["stack", "block", "module"])
def test_merging_hands_attention_no_mask_and_no_bias(
    request: pytest.FixtureRequest, attach: Any, kind: str, granularity: str
) -> None:
    """Flash takes none. Arguments are those of the run without ToMA, also where a condition brings a mask; only the
    tokens are fewer, one after the other in memory."""
    shared = request.getfixturevalue(kind)
    calls: list[tuple[set[str], bool, int]] = []

    def override(func: Any, q: Tensor, k: Tensor, v: Tensor, heads: int, *args: Any, **kwargs: Any) -> Tensor:
        given = {name for name, value in kwargs.items() if value is not None}
        calls.append((given, bool(args and args[0] is not None) or "mask" in given, q.shape[-2]))
        assert all(t.stride(-1) == 1 for t in (q, k, v))
        return func(q, k, v, heads, *args, **kwargs)

    foreign = shared.clone()
    foreign.model_options["transformer_options"]["optimized_attention_override"] = override
    masks = {"attention_mask": torch.ones(1, 7 + 64, 7 + 64), "attention_mask_img_shape": (8, 8)}
    for masked in ({}, masks) if kind == "flux" else ({},):
        conds = {
            side: models.conditioning(shared, seed=seed, **masked) for seed, side in enumerate(("positive", "negative"))
        }
        calls.clear()
        models.sample(foreign, SIDE, SIDE, steps=1, **conds)
        plain = list(calls)
        assert any(mask for _, mask, _ in plain) == bool(masked)
        calls.clear()
        models.sample(attach(foreign, granularity=granularity), SIDE, SIDE, steps=1, **conds)
        assert [call[:2] for call in calls] == [call[:2] for call in plain]
        fewer = [call[2] < whole[2] for call, whole in zip(calls, plain, strict=True)]
        assert any(fewer) != bool(masked)
