"""Test models that a later ComfyUI has changed: they run unmerged, and one warning names the change."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from scripts.comfy_pack import pack_module
from testbed import models
from tests.loop import loop

Reason = pack_module("toma_core.reasons").Reason
report_text = pack_module("nodes.adapters.report_text")


def sample(model: Any) -> torch.Tensor:
    return models.sample(model, 16, 16, steps=2)


FLUX = "comfy.ldm.flux.layers"
# By class of ComfyUI's UNet: a function that returns a `forward` with another signature. The returned `forward` calls
# the original `forward`.
CHANGED: dict[str, Callable[[Any], Any]] = {
    "BasicTransformerBlock": lambda own: (
        lambda self, x, emb=None, context=None, transformer_options=None: own(self, x, context, transformer_options)
    ),
    "CrossAttention": lambda own: lambda self, x, keys=None, **rest: own(self, x, rest.pop("context", keys), **rest),
    "FeedForward": lambda own: lambda self, x, scale=1.0: own(self, x) * scale,
}


@loop("name", CHANGED)
@loop("granularity", ["module", "stack"])
def test_forward_with_another_signature(
    monkeypatch: Any, attach: Any, stats_of: Any, warnings: Any, name: str, granularity: str
) -> None:
    cls = getattr(importlib.import_module("comfy.ldm.modules.attention"), name)
    monkeypatch.setattr(cls, "forward", CHANGED[name](cls.forward))
    model = models.unet()
    plain = sample(model)
    patched = attach(model, granularity=granularity)
    for _ in range(2):
        assert torch.equal(sample(patched), plain)
    (warning,) = warnings()
    assert f"{name}.forward(" in warning
    assert "Sampling goes on without merging" in warning
    reason = f"Nothing was merged: unknown to this version: {name}.forward("
    assert report_text.summary(stats_of(patched)).startswith(reason)


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
    # If a block gets a value for the new argument `region`, the block is not merged, and the report gives the reason.
    model = models.flux()
    for block in model.model.diffusion_model.double_blocks:
        block.register_forward_pre_hook(lambda _, args, kwargs: (args, {**kwargs, "region": 1}), with_kwargs=True)
    patched = attach(model)
    assert sample(patched).isfinite().all()
    assert set(regions) == {None, 1}
    assert stats_of(patched).unmerged_names() == {
        Reason.ARGUMENT_IN_USE(arguments=("region",)): {f"double.{i}" for i in range(3)}
    }


def move(owner: nn.Module, old: str, new: str) -> None:
    namespace = owner._modules if old in owner._modules else owner.__dict__
    namespace[new] = namespace.pop(old)


@loop(
    ("kind", "owner", "attribute"),
    [
        ("unet", "UNetModel", "input_blocks"),
        ("unet", "UNetModel", "output_blocks"),
        ("unet", "SpatialTransformer", "transformer_blocks"),
        ("unet", "BasicTransformerBlock", "attn1"),
        ("unet", "BasicTransformerBlock", "ff"),
        ("flux", "Flux", "double_blocks"),
        ("flux", "Flux", "single_blocks"),
        ("flux", "Flux", "patch_size"),
    ],
)
def test_attribute_with_another_name(
    monkeypatch: Any, attach: Any, stats_of: Any, warnings: Any, kind: str, owner: str, attribute: str
) -> None:
    model = getattr(models, kind)()
    plain = sample(model)
    owners = [m for m in model.model.diffusion_model.modules() if type(m).__name__ == owner]
    forward, new = type(owners[0]).forward, f"new_{attribute}"

    @functools.wraps(forward)
    def renamed(self: Any, *args: Any, **kwargs: Any) -> Any:
        # ComfyUI's `forward` still uses the old name of the attribute, so restore the old name while `forward` runs.
        move(self, new, attribute)
        try:
            return forward(self, *args, **kwargs)
        finally:
            move(self, attribute, new)

    monkeypatch.setattr(type(owners[0]), "forward", renamed)
    for each in owners:
        move(each, attribute, new)
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
    forget = lambda _, args, kwargs: kwargs["transformer_options"].pop(option, None) and None  # noqa: E731
    for module in model.model.diffusion_model.modules():
        if type(module).__name__ in ("BasicTransformerBlock", "SingleStreamBlock"):
            module.register_forward_pre_hook(forget, with_kwargs=True)
    patched = attach(model, skip_first_blocks=1)  # skips all double blocks
    assert torch.equal(sample(patched), plain)
    assert "Nothing was merged" in report_text.summary(stats_of(patched))


# By new form of the RoPE argument: a function from the present form to the new one, and a function back.
MOVED: dict[str, Any] = {
    "pair": (lambda pe: (None, pe), lambda pe: pe[1]),
    "two tables": (lambda pe: pe.unbind(-1), lambda pe: torch.stack(pe, -1)),
    "another first axis": (lambda pe: pe[None], lambda pe: pe[0]),
    "another order of axes": (lambda pe: pe.movedim(2, 1), lambda pe: pe.movedim(1, 2)),
}


@loop("granularity", ["module", "stack"])
@loop("shape", MOVED)
def test_positions_of_another_kind(monkeypatch: Any, attach: Any, stats_of: Any, granularity: str, shape: str) -> None:
    """FLUX.3 may pass the RoPE argument in a new form. Here a patched attention turns the new form back into the
    present one."""
    layers, model = importlib.import_module(FLUX), models.flux()
    attention, embedder = layers.attention, type(model.model.diffusion_model.pe_embedder)
    make, back = MOVED[shape]
    monkeypatch.setattr(layers, "attention", lambda q, k, v, pe, **kw: attention(q, k, v, pe=back(pe), **kw))
    forward = embedder.forward
    monkeypatch.setattr(embedder, "forward", lambda self, ids: make(forward(self, ids)))
    plain = sample(model)
    patched = attach(model, granularity=granularity)
    assert torch.equal(sample(patched), plain)
    shape_of_pe = Reason.ARGUMENT_SHAPE(argument="pe")
    assert set(stats_of(patched).unmerged) == {Reason.ARGUMENT_IN_USE(arguments=(shape_of_pe,))}
