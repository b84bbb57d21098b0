"""The token layout in transformer_options, which other nodes' attention reads, matches the tokens of every block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from testbed import models
from tests.loop import loop

GRANULARITIES = ["stack", "block", "module"]
SIDE = 24  # UNet: grids of 12 x 12 and 6 x 6
TEXT, IMAGE, REFERENCES = 7, 144, (48, 12)  # Flux: a grid of 12 x 12


@dataclass
class Told:
    """One call of the attention. length: number of queries. options: a copy of transformer_options. mask: whether the
    call has an attention mask."""

    length: int
    options: dict[str, Any]
    mask: bool


@pytest.fixture
def listening() -> Any:
    """listening(model): return a clone with an attention override, and a list of the override's calls."""

    def listen(model: Any) -> tuple[Any, list[Told]]:
        calls: list[Told] = []

        def override(func: Any, q: Tensor, *args: Any, transformer_options: Any, **kwargs: Any) -> Tensor:
            length = q.shape[2 if kwargs.get("skip_reshape") else 1]
            mask = kwargs.get("mask") if len(args) < 4 else args[3]
            calls.append(Told(length, dict(transformer_options), mask is not None))
            return func(q, *args, transformer_options=transformer_options, **kwargs)

        clone = model.clone()
        clone.model_options["transformer_options"]["optimized_attention_override"] = override
        return clone, calls

    return listen


def kontext(model: Any) -> dict[str, Any]:
    """Return conditioning with two reference images of 48 and 12 tokens, for both prompts."""
    g = torch.Generator().manual_seed(9)
    latents = [torch.randn(1, 16, *size, generator=g) for size in ((12, 16), (8, 6))]
    return {
        name: models.conditioning(model, seed=seed, reference_latents=latents)
        for seed, name in enumerate(("positive", "negative"))
    }


@pytest.mark.compat
@loop("granularity", GRANULARITIES)
@loop("settings", [{}, {"skip_last_blocks": 3}], ids=["all", "some"])
def test_the_grid_fits_the_tokens_in_a_unet(
    unet: Any, attach: Any, listening: Any, granularity: str, settings: dict[str, Any]
) -> None:
    """With D merged tokens, `activations_shape` is (B, C, 1, D). Blocks, attentions and steps that are not merged have
    ComfyUI's own shape."""
    plain, before = listening(unet)
    models.sample(plain, SIDE, SIDE, steps=2)
    foreign, calls = listening(unet)
    models.sample(attach(foreign, granularity=granularity, end_percent=0.5, **settings), SIDE, SIDE, steps=2)
    merged = 0
    for call, same in zip(calls, before, strict=True):
        full, shape = same.options["activations_shape"], call.options["activations_shape"]
        assert same.length == full[-2] * full[-1]
        assert shape == (full if call.length == same.length else [*full[:2], 1, call.length])
        for name in ("block", "block_index", "transformer_index", "original_shape"):
            assert call.options[name] == same.options[name]
        merged += call.length < same.length
    assert merged == len(calls) // 2 if not settings else 0 < merged < len(calls) // 2


@pytest.mark.compat
@loop("granularity", GRANULARITIES)
@loop("full_step_interval", [0, 2])
@loop("with_references", [False, True])
def test_the_image_lies_where_flux_says(
    flux: Any, attach: Any, listening: Any, granularity: str, full_step_interval: int, with_references: bool
) -> None:
    """`img_slice` is [text, text + D + references] for D merged image tokens."""
    foreign, calls = listening(flux)
    settings = {"granularity": granularity, "full_step_interval": full_step_interval, "skip_first_blocks": 1}
    model = attach(foreign, **settings)
    conds = kontext(flux) if with_references else {}
    models.sample(model, SIDE, SIDE, steps=4, **conds)
    extra = sum(REFERENCES) if with_references else 0
    lengths = set()
    for call in calls:
        single = call.options["block_type"] == "single"
        assert call.options.get("img_slice") == ([TEXT, call.length] if single else None)
        if extra and "reference_image_num_tokens" in call.options:  # not in ComfyUI 0.16.3
            assert call.options["reference_image_num_tokens"] == list(REFERENCES)
        lengths.add((call.options["block_type"], call.length - TEXT - extra))
    assert lengths == {(kind, n) for kind in ("double", "single") for n in (IMAGE, IMAGE // 2)}


@loop("granularity", GRANULARITIES)
def test_double_blocks_too_if_another_node_passes_it(flux: Any, attach: Any, listening: Any, granularity: str) -> None:
    """ComfyUI passes no `img_slice` to double blocks, but another node may."""
    foreign, calls = listening(flux)
    given = [TEXT, TEXT + IMAGE]

    def say(_: Any, args: Any, kwargs: Any) -> None:
        kwargs["transformer_options"]["img_slice"] = given

    handles = [
        block.register_forward_pre_hook(say, with_kwargs=True) for block in flux.model.diffusion_model.double_blocks
    ]
    try:
        models.sample(attach(foreign, granularity=granularity), SIDE, SIDE, steps=1)
        doubles = [call for call in calls if call.options["block_type"] == "double"]
        assert {call.length for call in doubles} == {TEXT + IMAGE // 2}
        assert all(call.options["img_slice"] == [TEXT, call.length] for call in doubles)
    finally:
        for handle in handles:
            handle.remove()
    assert given == [TEXT, TEXT + IMAGE]


@loop("kind", ["unet", "flux"])
@loop("granularity", GRANULARITIES)
def test_attention_patches_receive_all_tokens_and_their_layout(
    request: pytest.FixtureRequest, attach: Any, kind: str, granularity: str
) -> None:
    model, pairs = request.getfixturevalue(kind).clone(), []

    def fits(length: int, options: dict[str, Any]) -> None:
        if kind == "unet":
            pairs.append((length, options["activations_shape"][-2] * options["activations_shape"][-1]))
        else:
            pairs.append((length, options["img_slice"][1]))

    if kind == "unet":
        for name in ("attn1", "attn2"):
            model.set_model_patch(lambda n, c, v, options: (fits(n.shape[1], options), (n, c, v))[1], f"{name}_patch")
            model.set_model_patch(lambda n, options: (fits(n.shape[1], options), n)[1], f"{name}_output_patch")
        model.set_model_patch(lambda n, options: (fits(n.shape[1], options), n)[1], "middle_patch")
    else:
        model.set_model_patch(lambda out, options: (fits(out.shape[1], options), out)[1], "attn1_output_patch")
    models.sample(attach(model, granularity=granularity), SIDE, SIDE, steps=1)
    assert pairs
    assert all(length == said for length, said in pairs)
    assert {length for length, _ in pairs} == ({144, 36} if kind == "unet" else {TEXT + IMAGE})


@loop("kind", ["unet", "flux"])
def test_the_callers_options_stay_as_they_are(
    request: pytest.FixtureRequest, attach: Any, listening: Any, kind: str
) -> None:
    """Attention gets options with the layout of merged tokens. The options that the caller passed are unchanged after
    each block."""
    shared = request.getfixturevalue(kind)
    foreign, calls = listening(shared)
    foreign.model_options["transformer_options"]["mine"] = {"nested": [1]}
    before: dict[str, Any] = {}
    differing: set[str] = set()

    def enters(_: Any, args: Any, kwargs: Any) -> None:
        calls.clear()
        before.clear()
        before.update(kwargs["transformer_options"])

    def leaves(_: Any, args: Any, kwargs: Any, out: Any) -> None:
        assert kwargs["transformer_options"] == before
        assert calls
        for call in calls:
            assert call.options.keys() == before.keys()
            differing.update(name for name, value in before.items() if call.options[name] is not value)

    names = ("BasicTransformerBlock", "DoubleStreamBlock", "SingleStreamBlock")
    blocks = [m for m in shared.model.diffusion_model.modules() if type(m).__name__ in names]
    handles = [block.register_forward_pre_hook(enters, with_kwargs=True) for block in blocks]
    handles += [block.register_forward_hook(leaves, with_kwargs=True) for block in blocks]
    try:
        models.sample(attach(foreign), SIDE, SIDE, steps=2)
    finally:
        for handle in handles:
            handle.remove()
    assert "mine" in before
    assert differing == {"activations_shape" if kind == "unet" else "img_slice"}
