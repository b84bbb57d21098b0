"""Keys and values alone on fewer tokens: what a block gives is what it gives with K and V picked by hand."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import models
from scripts.comfy_pack import pack_module
from tests.nodes.adapters.families.layouts import (
    CLOSE,
    HEIGHT,
    LAYOUTS,
    PREDICTED,
    WIDTH,
    Layout,
    arguments,
    grid_of,
    of_references,
    run,
)

FRAME = HEIGHT // 2 * (WIDTH // 2)
REASON = "keys_only does not go with torch.compile in this kind of block"
OVERRIDE = "optimized_attention_override"
# ERNIE-Image hands its attention no options.
BLOCKS = [(family, layout) for family, layouts in LAYOUTS.items() if family != "ernie" for layout in layouts]


def rows_of(plan: Any) -> Tensor:
    """M of (B, D, N): M x are the destinations themselves."""
    return torch.nn.functional.one_hot(plan.destinations, plan.tokens).float()


def picked(M: Tensor, before: int, calls: int = 1) -> Any:
    """An attention whose first calls in a block look at fewer keys and values, M k and M v; of the second none come
    before the image. A mask is of the text: it ends with the keys that are left."""
    made = 0

    def attention(function: Any, q: Tensor, k: Tensor, v: Tensor, heads: int, *args: Any, **kwargs: Any) -> Tensor:
        nonlocal made
        made += 1
        if made <= calls:
            by_head, first = bool(kwargs.get("skip_reshape")), before if made == 1 else 0
            weights, tokens = (M[:, None] if by_head else M), M.shape[2]
            if not by_head:
                k, v = k.flatten(2), v.flatten(2)
            parts = [t.split([first, tokens, t.shape[-2] - first - tokens], -2) for t in (k, v)]
            k, v = (torch.cat([ahead, weights @ image, after], -2) for ahead, image, after in parts)
            if args and args[0] is not None:
                args = (args[0][..., : k.shape[-2]], *args[1:])
            elif kwargs.get("mask") is not None:
                kwargs["mask"] = kwargs["mask"][..., : k.shape[-2]]
        return function(q, k, v, heads, *args, **kwargs)

    return attention


def by_hand(block: Any, layout: Layout, call: Any, plan: Any, *, calls: int = 1, before: int = -1) -> Any:
    """What a recorded block gives where it looks at destinations that were picked by hand; and on all keys."""
    given, M = arguments(block, layout, call), rows_of(plan)
    joint = given["context"].shape[1] if layout.names else layout.above
    attention = picked(M, layout.before + joint if before < 0 else before, calls)
    told = {**given["transformer_options"], OVERRIDE: attention}
    outs = run(block, layout, {**given, "transformer_options": told}), run(block, layout, given)
    return tuple(out if layout.out is None else out[layout.out] for out in outs)


def compiled(model: Any, keys: list[str] | None = None) -> Any:
    """What ComfyUI's node does, with a backend that runs what it gets as it is."""
    from comfy_api.torch_helpers import set_torch_compile_wrapper
    from comfy_extras.nodes_torch_compile import skip_torch_compile_dict

    model = model.clone()
    options = {"guard_filter_fn": skip_torch_compile_dict}
    set_torch_compile_wrapper(model=model, backend="eager", options=options, keys=keys or ["diffusion_model"])
    return model


def shown(layout: Layout, call: Any) -> Any:
    return call.out if layout.out is None else call.out[layout.out]


@pytest.mark.compat
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(("family", "layout"), BLOCKS, ids=[f"{f}-{la.blocks}" for f, la in BLOCKS])
def test_a_block_of_every_family_looks_at_fewer_keys(
    family: str, layout: Layout, batch: int, model_of: Any, attach: Any, record: Any, plan_calls: Any
) -> None:
    """Every query is there, and text and padding keep their keys."""
    model = model_of(family)
    block = getattr(model.model.diffusion_model, layout.blocks)[1]
    calls = record(block)
    models.sample(attach(model, keys_only=True), HEIGHT, WIDTH, batch=batch, steps=1, cfg=1.0)
    (call,) = calls
    tokens = arguments(block, layout, call)[layout.tokens]
    assert tokens.shape[1] >= layout.before + grid_of(layout)[0] * grid_of(layout)[1]
    found, all_keys = by_hand(block, layout, call, plan_calls[call.first_plan].plan)
    torch.testing.assert_close(shown(layout, call), found, **CLOSE)
    assert (shown(layout, call) - all_keys).abs().max() > 1e-2
    assert OVERRIDE not in call.kwargs["transformer_options"]


@pytest.mark.parametrize("settings", [{}, PREDICTED], ids=["tokens", "prediction"])
@pytest.mark.parametrize("kind", ["unet", *dict(BLOCKS)])
def test_runs_of_odd_sizes_and_several_conditions(
    kind: str, settings: Any, model_of: Any, attach: Any, stats_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two pictures, prompt and negative prompt, a side of odd length; the same twice, and of the model nothing left."""
    monkeypatch.setattr(pack_module("toma_core.prediction"), "_MOST_NOISE", 0.999)
    model, asked = model_of(kind), {"batch": 2, "steps": 2, "cfg": 4.0}
    plain = models.sample(model, 19, 15, **asked)
    merged = attach(model, keys_only=True, **settings)
    out = models.sample(merged, 19, 15, **asked)
    assert out.isfinite().all()
    assert not torch.equal(out, plain)
    assert stats_of(merged).left_whole == {}
    assert torch.equal(models.sample(merged, 19, 15, **asked), out)
    assert torch.equal(models.sample(model, 19, 15, **asked), plain)


@pytest.mark.parametrize("kind", ["unet", "flux2", "z_image", "lumina2", "krea2", "wan"])
def test_less_is_lost_than_by_merging_tokens(kind: str, model_of: Any, attach: Any) -> None:
    model, asked = model_of(kind), {"steps": 2, "cfg": 1.0}
    plain, keys, tokens = (
        models.sample(m, HEIGHT, WIDTH, **asked) for m in (model, attach(model, keys_only=True), attach(model))
    )
    assert 0 < (keys - plain).norm() < 0.8 * (tokens - plain).norm()


@pytest.mark.parametrize("kind", ["unet", *dict(BLOCKS)])
def test_off_and_whole_steps_are_the_models_own(kind: str, model_of: Any, attach: Any) -> None:
    model = model_of(kind)
    assert attach(model, ratio=0.0, keys_only=True) is model
    first = attach(model, keys_only=True, whole_every=9)
    assert torch.equal(models.sample(first, 16, 16, steps=1), models.sample(model, 16, 16, steps=1))


@pytest.mark.compat
def test_a_block_of_a_unet_looks_at_fewer_keys(
    unet: Any, attach: Any, record: Any, plan_calls: Any, stats_of: Any
) -> None:
    """Its attention to the text keeps all of them."""
    blocks = [m for m in unet.model.diffusion_model.modules() if hasattr(m, "attn1")]
    recorded, merged = [record(block) for block in blocks], attach(unet, keys_only=True)
    models.sample(merged, HEIGHT, WIDTH, steps=1, cfg=1.0)
    assert stats_of(merged).left_whole == {}
    assert len(stats_of(merged).merged_blocks) == len(blocks)
    for block, (call,) in zip(blocks, recorded, strict=True):
        given = dict(zip(("x", "context", "transformer_options"), call.args, strict=False)) | call.kwargs
        M = rows_of(plan_calls[call.first_plan].plan)
        told = {**given, "transformer_options": {**given["transformer_options"], OVERRIDE: picked(M, 0)}}
        torch.testing.assert_close(call.out, block(**told), **CLOSE)


@pytest.mark.parametrize("family", ["flux", "flux2", "krea2", "qwen_image"])
def test_references_keep_all_keys(family: str, model_of: Any, attach: Any, record: Any, plan_calls: Any) -> None:
    """Also where references are to be merged: keys alone are of the image."""
    model = model_of(family)
    for layout in LAYOUTS[family]:
        block = getattr(model.model.diffusion_model, layout.blocks)[1]
        for settings in ({}, {"merge_references": True}):
            calls, first = record(block), len(plan_calls)
            method = {"qwen_image": "index_timestep_zero", "krea2": "index"}.get(family)
            conds = {"positive": models.conditioning(model, seed=1, **of_references(model, layout, method))}
            models.sample(attach(model, keys_only=True, **settings), HEIGHT, WIDTH, steps=1, cfg=1.0, **conds)
            assert len({p.plan.tokens for p in plan_calls[first:]}) == 1
            (call,) = calls
            image = grid_of(layout)[0] * grid_of(layout)[1]
            assert arguments(block, layout, call)[layout.tokens].shape[1] > layout.before + image
            found, _ = by_hand(block, layout, call, plan_calls[call.first_plan].plan)
            torch.testing.assert_close(shown(layout, call), found, **CLOSE)


def test_the_second_attention_of_sd3_medium(attach: Any, record: Any, plan_calls: Any) -> None:
    """It is about the image alone, and looks at means of it too."""
    (layout,), model = LAYOUTS["sd3"], models.sd3(x_block_self_attn_layers=[0, 1])
    block = model.model.diffusion_model.joint_blocks[0]
    calls = record(block)
    models.sample(attach(model, keys_only=True), HEIGHT, WIDTH, steps=1, cfg=1.0)
    (call,) = calls
    for attentions, same in ((2, True), (1, False)):
        found, _ = by_hand(block, layout, call, plan_calls[call.first_plan].plan, calls=attentions)
        assert bool((shown(layout, call) - found).abs().max() < 1e-3) is same


@pytest.mark.parametrize("layout", LAYOUTS["hunyuan"], ids=["double", "single"])
def test_a_mask_of_the_text_ends_with_the_keys_that_are_left(
    layout: Layout, model_of: Any, attach: Any, record: Any, plan_calls: Any, stats_of: Any
) -> None:
    model = model_of("hunyuan")
    block = getattr(model.model.diffusion_model, layout.blocks)[1]
    calls, merged = record(block), attach(model, keys_only=True)
    mask = torch.tensor([[1, 1, 1, 1, 1, 0, 0]])
    conds = {"positive": models.conditioning(model, seed=1, attention_mask=mask)}
    models.sample(merged, HEIGHT, WIDTH, frames=2, steps=1, cfg=1.0, **conds)
    assert stats_of(merged).left_whole == {}
    (call,) = calls
    assert arguments(block, layout, call)["attn_mask"] is not None
    found, _ = by_hand(block, layout, call, plan_calls[call.first_plan].plan)
    torch.testing.assert_close(shown(layout, call), found, **CLOSE)


@pytest.mark.parametrize(
    ("frames", "reference", "text"), [(1, False, 7), (3, False, 7), (3, True, 7), (1, False, FRAME)]
)
def test_a_block_of_a_video_looks_at_fewer_keys(
    frames: int, reference: bool, text: int, attach: Any, record: Any, plan_calls: Any, stats_of: Any
) -> None:
    """Every query is there, and text, also as much of it as there are tokens, and a reference are whole."""
    model = models.wan(**({"in_dim_ref_conv": 16} if reference else {}))
    noise = torch.randn(1, 16, 1, HEIGHT, WIDTH, generator=torch.Generator().manual_seed(9))
    options: dict[str, Any] = {"reference_latents": [noise]} if reference else {}
    block = model.model.diffusion_model.blocks[1]
    calls, merged = record(block), attach(model, keys_only=True)
    conds = {"positive": models.conditioning(model, text, seed=1, **options)}
    out = models.sample(merged, HEIGHT, WIDTH, frames=frames, steps=1, cfg=1.0, **conds)
    assert out.isfinite().all()
    assert stats_of(merged).left_whole == {}
    assert len(stats_of(merged).merged_blocks) == 4
    (call,) = calls
    before = FRAME if reference else 0
    assert call.args[0].shape[1] == before + frames * FRAME
    (layout,) = LAYOUTS["wan"]
    found, all_keys = by_hand(block, layout, call, plan_calls[call.first_plan].plan, before=before)
    torch.testing.assert_close(call.out, found, **CLOSE)
    assert (call.out - all_keys).abs().max() > 1e-2


def test_whoever_computes_attention_gets_fewer_keys_and_no_mask(model_of: Any, attach: Any) -> None:
    seen = []

    def override(function: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append((q.shape[1], k.shape[1], v.shape[1], kwargs.get("mask")))
        return function(q, k, v, *args, **kwargs)

    patched = model_of("wan").clone()
    patched.model_options["transformer_options"][OVERRIDE] = override
    models.sample(attach(patched, keys_only=True), HEIGHT, WIDTH, frames=3, steps=1, cfg=1.0)
    assert seen == [(3 * FRAME, 3 * FRAME // 2, 3 * FRAME // 2, None), (3 * FRAME, 7, 7, None)] * 4


def test_whole_steps_and_blocks(model_of: Any, attach: Any, stats_of: Any) -> None:
    """Detail is of no use here: nothing is restored."""
    model = model_of("wan")
    settings = {"keys_only": True, "whole_every": 2, "detail_reuse": True, "whole_first": 1}
    merged = attach(model, **settings)
    out = models.sample(merged, HEIGHT, WIDTH, frames=3, steps=4, cfg=1.0)
    stats = stats_of(merged)
    assert sorted(stats.merged_steps) == [1]
    assert stats.merged_blocks == {"double.1", "double.2", "double.3"}
    assert stats.detail_bytes == 0
    assert torch.equal(models.sample(merged, HEIGHT, WIDTH, frames=3, steps=4, cfg=1.0), out)


def test_a_model_whose_attention_is_told_nothing_is_left_whole(model_of: Any, attach: Any, stats_of: Any) -> None:
    model = model_of("ernie")
    merged = attach(model, keys_only=True)
    assert torch.equal(models.sample(merged, 16, 16, steps=2), models.sample(model, 16, 16, steps=2))
    assert list(stats_of(merged).left_whole) == ["keys_only is not for this kind of model"]


def test_an_attention_of_a_unet_that_another_node_computes(unet: Any, attach: Any, stats_of: Any) -> None:
    """As guidance by perturbed attention does it."""
    merged = attach(unet, keys_only=True).clone()
    merged.set_model_attn1_replace(lambda q, k, v, options: v, "middle", 0, 0)
    models.sample(merged, HEIGHT, WIDTH, steps=1, cfg=1.0)
    assert stats_of(merged).left_whole == {"another node's attention takes no fewer keys": {"middle.0.0"}}


@pytest.mark.parametrize("masked", [False, True])
def test_an_attention_of_another_pack_that_cannot_take_fewer_keys(masked: bool, attach: Any, stats_of: Any) -> None:
    """One takes no override, another has a mask of every key. The report does not call merged what was not."""
    from comfy.ldm.modules.attention import optimized_attention

    def attending(attention: Any, x: Tensor, freqs: Any, transformer_options: Any) -> Tensor:
        if not masked:
            return attention.o(attention.v(x))
        mask = torch.zeros(x.shape[1], x.shape[1])
        q, k, v = attention.q(x), attention.k(x), attention.v(x)
        return attention.o(
            optimized_attention(q, k, v, attention.num_heads, mask=mask, transformer_options=transformer_options)
        )

    model = models.wan()
    for block in model.model.diffusion_model.blocks[1:]:
        block.self_attn.forward = partial(attending, block.self_attn)
    merged = attach(model, keys_only=True)
    out = models.sample(merged, HEIGHT, WIDTH, frames=3, steps=2, cfg=1.0)
    assert stats_of(merged).merged_blocks == {"double.0"}
    assert stats_of(merged).left_whole == {
        "another node's attention takes no fewer keys": {"double.1", "double.2", "double.3"}
    }
    assert not torch.equal(out, models.sample(model, HEIGHT, WIDTH, frames=3, steps=2, cfg=1.0))


@pytest.mark.parametrize("kind", ["wan", "qwen_image", "krea2", "lumina2", "small_unet"])
def test_compiled_by_comfyui(kind: str, attach: Any, no_state_left: None) -> None:
    """Its torch.compile does not look at what rides in transformer_options: steps with fewer keys, whole steps and runs
    without ToMA take turns all the same."""
    model = models.unet(depths=(0, 1), middle=1) if kind == "small_unet" else getattr(models, kind)(layers=2)
    asked = {"frames": 3 if kind == "wan" else 1, "steps": 4, "cfg": 1.0}
    torch._dynamo.reset()
    for _ in range(2):
        for one in (model, attach(model, keys_only=True, whole_every=2), attach(model)):
            given = models.sample(compiled(one), HEIGHT, WIDTH, **asked)
            assert torch.equal(given, models.sample(one, HEIGHT, WIDTH, **asked))


@pytest.mark.parametrize("keys", [["diffusion_model"], ["diffusion_model.double_blocks.0"]], ids=["model", "block"])
def test_compiled_blocks_without_an_attention_of_their_own_stay_whole(
    keys: list[str], attach: Any, stats_of: Any
) -> None:
    """The override would be frozen into them, for later steps and runs without any."""
    model = models.flux(double=2, single=2)
    plain, merged = (models.sample(m, 16, 16, steps=2) for m in (model, attach(model, keys_only=True)))
    torch._dynamo.reset()
    toma = compiled(attach(model, keys_only=True), keys)
    out = models.sample(toma, 16, 16, steps=2)
    whole = stats_of(toma).left_whole
    if len(keys[0].split(".")) == 1:
        assert torch.equal(out, plain)
        assert set(whole) == {REASON}
    else:
        assert not torch.equal(out, plain)
        assert whole == {REASON: {"double.0"}}
    assert torch.equal(models.sample(compiled(model, keys), 16, 16, steps=2), plain)
    assert torch.equal(models.sample(attach(model, keys_only=True), 16, 16, steps=2), merged)
