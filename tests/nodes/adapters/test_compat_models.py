"""Test models that a later ComfyUI has changed: they run unmerged, and one warning names the change.

The tests change ComfyUI's own classes as a later release might. The changed models still run without ToMA.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest
import torch
from torch import nn

from scripts.comfy_pack import pack_module
from testbed import models
from tests.loop import loop

Reason = pack_module("toma_core.reasons").Reason
report_text = pack_module("nodes.adapters.report_text")

SIDE = 16
STEPS = 2


def sample(model: Any) -> torch.Tensor:
    return models.sample(model, SIDE, SIDE, steps=STEPS)


# --- signatures -------------------------------------------------------------------------------------------------------


def block_with_an_argument_between(cls: Any, original: Any) -> Any:
    def forward(self: Any, x: Any, emb: Any = None, context: Any = None, transformer_options: Any = {}) -> Any:  # noqa: B006
        return original(self, x, context, transformer_options)

    return forward


def attention_with_renamed_context(cls: Any, original: Any) -> Any:
    def forward(self: Any, x: Any, keys: Any = None, **kwargs: Any) -> Any:
        return original(self, x, kwargs.pop("context", keys), **kwargs)

    return forward


def feed_forward_with_two_inputs(cls: Any, original: Any) -> Any:
    def forward(self: Any, x: Any, scale: float = 1.0) -> Any:
        return original(self, x) * scale

    return forward


def double_with_another_order(cls: Any, original: Any) -> Any:
    def forward(self: Any, txt: Any, img: Any, vec: Any, pe: Any, attn_mask: Any = None, **kwargs: Any) -> Any:
        return original(self, img, txt, vec, pe, attn_mask, **kwargs)

    return forward


def double_without_options(cls: Any, original: Any) -> Any:
    def forward(
        self: Any, img: Any, txt: Any, vec: Any, pe: Any, attn_mask: Any = None, *, options: Any = None, **kwargs: Any
    ) -> Any:
        return original(self, img, txt, vec, pe, attn_mask, **kwargs)

    return forward


def single_with_a_second_stream(cls: Any, original: Any) -> Any:
    def forward(self: Any, x: Any, y: Any = None, vec: Any = None, pe: Any = None, **kwargs: Any) -> Any:
        return original(self, x, vec, pe, **kwargs)

    return forward


UNET, FLUX = "comfy.ldm.modules.attention", "comfy.ldm.flux.layers"


@loop(
    ("kind", "module", "name", "change"),
    [
        ("unet", UNET, "BasicTransformerBlock", block_with_an_argument_between),
        ("unet", UNET, "CrossAttention", attention_with_renamed_context),
        ("unet", UNET, "FeedForward", feed_forward_with_two_inputs),
        ("flux", FLUX, "DoubleStreamBlock", double_with_another_order),
        ("flux", FLUX, "DoubleStreamBlock", double_without_options),
        ("flux", FLUX, "SingleStreamBlock", single_with_a_second_stream),
    ],
)
@loop("granularity", ["module", "stack"])
def test_forward_with_another_signature(
    monkeypatch: pytest.MonkeyPatch,
    attach: Any,
    stats_of: Any,
    warnings: Any,
    kind: str,
    module: str,
    name: str,
    change: Any,
    granularity: str,
) -> None:
    cls = getattr(importlib.import_module(module), name)
    monkeypatch.setattr(cls, "forward", change(cls, cls.forward))
    model = getattr(models, kind)()
    plain = sample(model)
    patched = attach(model, granularity=granularity)
    for _ in range(2):
        assert torch.equal(sample(patched), plain)
    (warning,) = warnings()
    assert f"{name}.forward(" in warning
    assert "Sampling goes on without merging" in warning
    assert report_text.summary(stats_of(patched)).startswith(
        f"Nothing was merged: unknown to this version: {name}.forward("
    )


def test_new_unused_argument_is_no_obstacle_in_flux(
    monkeypatch: pytest.MonkeyPatch, attach: Any, stats_of: Any, warnings: Any
) -> None:
    cls = importlib.import_module(FLUX).DoubleStreamBlock
    original = cls.forward

    def forward(
        self: Any, img: Any, txt: Any, vec: Any, pe: Any, attn_mask: Any = None, transformer_options: Any = None,
        region: Any = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        regions.append(region)
        return original(self, img, txt, vec, pe, attn_mask, transformer_options=transformer_options, **kwargs)

    regions: list[Any] = []
    monkeypatch.setattr(cls, "forward", forward)
    model = models.flux()
    patched = attach(model)
    assert not torch.equal(sample(patched), sample(model))
    assert warnings() == []
    # If the new argument `region` has a value, blocks that get it are not merged, and the report gives the reason.
    from comfy.ldm.flux.model import Flux

    model = models.flux()
    for block in model.model.diffusion_model.double_blocks:
        block.register_forward_pre_hook(lambda _, args, kwargs: (args, {**kwargs, "region": 1}), with_kwargs=True)
    assert isinstance(model.model.diffusion_model, Flux)
    patched = attach(model)
    assert sample(patched).isfinite().all()
    assert set(regions) == {None, 1}
    assert stats_of(patched).unmerged_names() == {
        Reason.ARGUMENT_IN_USE(arguments=("region",)): {f"double.{i}" for i in range(3)}
    }


# --- attributes -------------------------------------------------------------------------------------------------------


def rename(monkeypatch: pytest.MonkeyPatch, cls: Any, method: str, old: str, new: str, owners: list[Any]) -> None:
    """Rename the attribute `old` of the owners to `new`, also in ComfyUI's own `method`."""
    original = getattr(cls, method)

    def renamed(self: Any, *args: Any, **kwargs: Any) -> Any:
        # ComfyUI's code in `method` still uses the old name, so restore this name while `method` runs.
        move(self, new, old)
        try:
            return original(self, *args, **kwargs)
        finally:
            move(self, old, new)

    renamed.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    monkeypatch.setattr(cls, method, renamed)
    for owner in owners:
        move(owner, old, new)


def move(owner: nn.Module, old: str, new: str) -> None:
    namespace = owner._modules if old in owner._modules else owner.__dict__
    namespace[new] = namespace.pop(old)


@loop(
    ("kind", "owner", "method", "attribute"),
    [
        ("unet", "UNetModel", "forward", "input_blocks"),
        ("unet", "UNetModel", "forward", "output_blocks"),
        ("unet", "SpatialTransformer", "forward", "transformer_blocks"),
        ("unet", "BasicTransformerBlock", "forward", "attn1"),
        ("unet", "BasicTransformerBlock", "forward", "ff"),
        ("flux", "Flux", "forward", "double_blocks"),
        ("flux", "Flux", "forward", "single_blocks"),
        ("flux", "Flux", "forward", "patch_size"),
    ],
)
def test_attribute_with_another_name(
    monkeypatch: pytest.MonkeyPatch,
    attach: Any,
    stats_of: Any,
    warnings: Any,
    kind: str,
    owner: str,
    method: str,
    attribute: str,
) -> None:
    model = getattr(models, kind)()
    plain = sample(model)
    owners = [m for m in model.model.diffusion_model.modules() if type(m).__name__ == owner]
    rename(monkeypatch, type(owners[0]), method, attribute, f"new_{attribute}", owners)
    assert torch.equal(sample(model), plain)
    patched = attach(model)
    assert torch.equal(sample(patched), plain)
    (warning,) = warnings()
    assert attribute in warning
    assert attribute in report_text.summary(stats_of(patched))


@loop(("kind", "option"), [("unet", "activations_shape"), ("flux", "img_slice")])
def test_blocks_without_token_offsets(attach: Any, stats_of: Any, kind: str, option: str) -> None:
    model = models.unet() if kind == "unet" else models.flux(double=1)
    plain = sample(model)
    names = ("BasicTransformerBlock", "SingleStreamBlock")
    for module in model.model.diffusion_model.modules():
        if type(module).__name__ in names:
            module.register_forward_pre_hook(
                lambda _, args, kwargs: kwargs["transformer_options"].pop(option, None) and None, with_kwargs=True
            )
    patched = attach(model, skip_first_blocks=1)  # skips the double blocks
    assert torch.equal(sample(patched), plain)
    assert "Nothing was merged" in report_text.summary(stats_of(patched))


@loop("granularity", ["module", "stack"])
@loop("shape", ["pair", "short"])
def test_positions_of_another_kind(
    monkeypatch: pytest.MonkeyPatch, attach: Any, stats_of: Any, granularity: str, shape: str
) -> None:
    """The RoPE argument is a pair of tensors, or has an additional first axis."""

    class Rows(tuple):  # type: ignore[type-arg]
        """A pair (None, RoPE tensor), which the patched attention unpacks."""

    layers = importlib.import_module(FLUX)
    attention = layers.attention
    monkeypatch.setattr(layers, "attention", lambda q, k, v, pe, **kw: attention(q, k, v, pe=pe[-1], **kw))
    model = models.flux()
    embed = model.model.diffusion_model.pe_embedder
    forward = type(embed).forward
    make = (lambda pe: Rows((None, pe))) if shape == "pair" else (lambda pe: pe[None].unsqueeze(1)[:, 0])
    monkeypatch.setattr(type(embed), "forward", lambda self, ids: make(forward(self, ids)))
    if shape == "short":
        monkeypatch.setattr(layers, "attention", lambda q, k, v, pe, **kw: attention(q, k, v, pe=pe[0], **kw))
    plain = sample(model)
    patched = attach(model, granularity=granularity)
    assert torch.equal(sample(patched), plain)
    assert set(stats_of(patched).unmerged) == {
        Reason.ARGUMENT_IN_USE(arguments=(Reason.ARGUMENT_SHAPE(argument="pe"),))
    }
