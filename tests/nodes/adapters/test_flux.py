"""The Flux adapter: the results of its blocks, text and references, and unmerged blocks."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from scripts.comfy_pack import pack_module
from testbed import models
from tests.loop import loop

Reason = pack_module("toma_core.reasons").Reason

HEIGHT, WIDTH = 20, 28  # a grid of 10 x 14: windows of 5 x 7
TOKENS, KEPT, TEXT = 140, 70, 7
CLOSE = {"rtol": 1e-5, "atol": 1e-4}  # values reach 30, where fp32 sums in another order differ by some 1e-5


def references(model: Any, *sizes: tuple[int, int], method: str | None = None) -> dict[str, Any]:
    """Return Kontext's conditioning: reference latents, for both prompts."""
    g = torch.Generator().manual_seed(9)
    options: dict[str, Any] = {"reference_latents": [torch.randn(1, 16, *size, generator=g) for size in sizes]}
    if method is not None:
        options["reference_latents_method"] = method
    return {
        "positive": models.conditioning(model, seed=1, **options),
        "negative": models.conditioning(model, seed=2, **options),
    }


def rows_of_destinations(pe: Tensor, destinations: Tensor, before: int, tokens: int) -> Tensor:
    """Return the RoPE rows of one image after the merge, by plain indexing. pe: (1, 1, T, ...), destinations: (D,)."""
    index = [*range(before), *(before + destinations).tolist(), *range(before + tokens, pe.shape[2])]
    return pe[:, :, index]


def one(value: Any, b: int) -> Any:
    return value[b : b + 1]


@pytest.mark.compat
@loop("with_references", [False, True])
def test_double_block_is_computed_on_merged_tokens(
    flux: Any, attach: Any, record: Any, plan_calls: Any, dense: Any, with_references: bool
) -> None:
    """Each image has its own destinations; text and references are unchanged."""
    block = flux.model.diffusion_model.double_blocks[1]
    calls = record(block)
    conds = references(flux, (12, 16), (8, 6)) if with_references else {}
    extra = 6 * 8 + 4 * 3 if with_references else 0
    models.sample(attach(flux, granularity="block"), HEIGHT, WIDTH, batch=2, steps=1, **conds)
    (call,) = calls
    plan = plan_calls[call.first_plan].plan
    M, U = dense(plan)
    img, txt, vec, pe = (call.kwargs[name] for name in ("img", "txt", "vec", "pe"))
    assert img.shape[:2] == (4, TOKENS + extra)
    for b in range(4):
        image, rest = img[b : b + 1, :TOKENS], img[b : b + 1, TOKENS:]
        merged = M[b] @ image
        rows = rows_of_destinations(one(pe, min(b, pe.shape[0] - 1)), plan.destinations[b], TEXT, TOKENS)
        assert rows.shape[2] == TEXT + KEPT + extra
        stream = torch.cat([merged, rest], 1)
        out, text = block(stream, one(txt, b).clone(), one(vec, b), rows, transformer_options={})
        expected = torch.cat([image + U[b] @ (out[:, :KEPT] - merged), out[:, KEPT:]], 1)
        torch.testing.assert_close(one(call.out[0], b), expected, **CLOSE)
        torch.testing.assert_close(one(call.out[1], b), text, **CLOSE)

        wrong, _ = block(
            torch.cat([merged, rest], 1),
            one(txt, b).clone(),
            one(call.kwargs["vec"], b),
            pe[:1],
            transformer_options={},
        )
        assert (wrong - out).abs().max() > 1e-2, "this test would not notice the rows of other positions"


@pytest.mark.compat
@loop("with_references", [False, True])
def test_single_block_is_computed_on_merged_tokens(
    flux: Any, attach: Any, record: Any, plan_calls: Any, dense: Any, with_references: bool
) -> None:
    block = flux.model.diffusion_model.single_blocks[2]
    calls = record(block)
    conds = references(flux, (12, 16)) if with_references else {}
    models.sample(attach(flux, granularity="block"), HEIGHT, WIDTH, batch=2, steps=1, **conds)
    (call,) = calls
    plan = plan_calls[call.first_plan].plan
    M, U = dense(plan)
    x, pe, vec = call.args[0], call.kwargs["pe"], call.kwargs["vec"]
    end = TEXT + TOKENS
    for b in range(4):
        text, image, rest = x[b : b + 1, :TEXT], x[b : b + 1, TEXT:end], x[b : b + 1, end:]
        merged = M[b] @ image
        rows = rows_of_destinations(one(pe, min(b, pe.shape[0] - 1)), plan.destinations[b], TEXT, TOKENS)
        out = block(torch.cat([text, merged, rest], 1), one(vec, b), rows, transformer_options={})
        new = image + U[b] @ (out[:, TEXT : TEXT + KEPT] - merged)
        expected = torch.cat([out[:, :TEXT], new, out[:, TEXT + KEPT :]], 1)
        torch.testing.assert_close(one(call.out, b), expected, **CLOSE)

        wrong = block(torch.cat([text, merged, rest], 1), one(vec, b), pe[:1], transformer_options={})
        assert (wrong - out).abs().max() > 1e-2, "this test would not notice the rows of other positions"


@pytest.mark.compat
@loop("kind", ["double", "single"])
@loop("with_references", [False, True])
def test_consecutive_blocks_stay_merged(
    flux: Any, attach: Any, record: Any, plan_calls: Any, dense: Any, kind: str, with_references: bool
) -> None:
    """All three blocks of a kind run on M x with the destinations' positions, with one unmerge of their joint
    residual."""
    blocks = getattr(flux.model.diffusion_model, f"{kind}_blocks")
    starts, ends = record(blocks[0]), record(blocks[2])
    conds = references(flux, (12, 16)) if with_references else {}
    models.sample(attach(flux), HEIGHT, WIDTH, steps=1, cfg=1.0, **conds)
    (start,), (end,) = starts, ends
    plan = plan_calls[start.first_plan].plan
    M, U = dense(plan)
    double = kind == "double"
    x = start.kwargs["img"] if double else start.args[0]
    before = 0 if double else TEXT
    image = slice(before, before + TOKENS)
    merged = M @ x[:, image]
    given = {"vec": start.kwargs["vec"], "transformer_options": {}}
    given["pe"] = rows_of_destinations(start.kwargs["pe"], plan.destinations[0], TEXT, TOKENS)
    stream, txt = torch.cat([x[:, :before], merged, x[:, image.stop :]], 1), start.kwargs.get("txt")
    for block in blocks:
        if double:
            stream, txt = block(img=stream.clone(), txt=txt.clone(), **given)
        else:
            stream = block(stream.clone(), **given)
    out = end.out[0] if double else end.out
    assert out.shape == x.shape
    new = x[:, image] + U @ (stream[:, before : before + KEPT] - merged)
    torch.testing.assert_close(
        out, torch.cat([stream[:, :before], new, stream[:, before + KEPT :]], 1), rtol=1e-4, atol=1e-3
    )
    if double:
        torch.testing.assert_close(end.out[1], txt, **CLOSE)


@loop("amount", [2, 0.5])
def test_first_blocks_of_each_kind_are_skipped(flux: Any, attach: Any, stats_of: Any, amount: float) -> None:
    model = attach(flux, skip_first_blocks=amount)
    models.sample(model, HEIGHT, WIDTH, steps=1)
    first = {"double.0", "double.1", "single.0", "single.1"}
    assert stats_of(model).unmerged_names() == {Reason.SKIP_FIRST_BLOCKS(count=amount): first}
    assert stats_of(model).merged_blocks == {"double.2", "single.2"}


def test_last_blocks_of_the_last_kind_are_skipped(flux: Any, attach: Any, stats_of: Any) -> None:
    model = attach(flux, skip_last_blocks=2, skip_first_blocks=1)
    models.sample(model, HEIGHT, WIDTH, steps=1)
    assert stats_of(model).unmerged_names() == {
        Reason.SKIP_FIRST_BLOCKS(count=1): {"double.0", "single.0"},
        Reason.SKIP_LAST_BLOCKS(count=2): {"single.1", "single.2"},
    }
    assert stats_of(model).merged_blocks == {"double.1", "double.2"}


def test_blocks_of_a_kind_share_a_plan(flux: Any, attach: Any, stats_of: Any) -> None:
    model = attach(flux, granularity="block")
    models.sample(model, HEIGHT, WIDTH, steps=1)
    assert stats_of(model).selections == 2


def full_step_intervalwhere(model: Any, stats_of: Any, reason: Any) -> None:
    stats = stats_of(model)
    assert stats.merged_blocks == set()
    assert stats.unmerged_names() == {reason: stats.blocks}
    assert len(stats.blocks) == 6
    assert str(reason) in stats.summary()


@pytest.fixture
def flux2(pack: Any) -> Any:
    """Build a model with the layout of Flux.2, one modulation for all blocks, which `index_timestep_zero` needs."""
    return models.flux(guidance_embed=False, vec_in_dim=None, global_modulation=True)


def test_one_modulation_for_all_blocks_is_merged_too(flux2: Any, attach: Any, stats_of: Any) -> None:
    for granularity in ("module", "block", "stack"):
        model = attach(flux2, granularity=granularity)
        assert models.sample(model, HEIGHT, WIDTH, batch=2, steps=2, **references(flux2, (16, 12))).isfinite().all()
        assert len(stats_of(model).merged_blocks) == 6


def test_blocks_with_dropped_tokens_are_not_merged(flux: Any, attach: Any, stats_of: Any) -> None:
    """A post_input patch removes image tokens, so there is no grid."""

    def drop(args: dict[str, Any]) -> dict[str, Any]:
        args["img"], args["img_ids"] = args["img"][:, :100], args["img_ids"][:, :100]
        return args

    foreign = flux.clone()
    foreign.set_model_post_input_patch(drop)
    model = attach(foreign)
    with pytest.raises(Exception, match=r"140|100"):  # the model itself cannot put such an image together
        models.sample(model, HEIGHT, WIDTH, steps=1)
    full_step_intervalwhere(model, stats_of, Reason.TOKENS_CHANGED())


@pytest.mark.compat
@loop("kind", ["double_block", "single_block"])
@loop("order", ["before", "after"])
def test_foreign_block_replacement_sees_all_tokens(
    flux: Any, attach: Any, stats_of: Any, kind: str, order: str
) -> None:
    seen = []

    def replacement(args: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
        text = args["txt"].shape[1] if kind == "double_block" else args["transformer_options"]["img_slice"][0]
        seen.append((args["img"].shape[1], args["pe"].shape[2] - text))
        out = extra["original_block"](args)
        return {**out, "img": out["img"] * 1.01}

    model = flux if order == "before" else attach(flux)
    model = model.clone()
    model.set_model_patch_replace(replacement, "dit", kind, 1)
    if order == "before":
        model = attach(model)
    out = models.sample(model, HEIGHT, WIDTH, steps=1)
    assert seen == [(TOKENS + (TEXT if kind == "single_block" else 0), TOKENS)]
    assert out.isfinite().all()
    assert len(stats_of(model).merged_blocks) == 6
    assert not torch.equal(out, models.sample(attach(flux), HEIGHT, WIDTH, steps=1))


@pytest.mark.compat
def test_control_is_added_to_the_right_tokens(flux: Any, attach: Any, record: Any) -> None:
    """A ControlNet adds to all image tokens after every block, between text and references."""
    import comfy.controlnet

    marks = torch.zeros(1, TOKENS, 48)
    marks[:, 33] = 1000.0

    class Residuals(comfy.controlnet.ControlBase):
        def get_control(self, x: Tensor, t: Any, cond: Any, batched: int, options: Any) -> Any:
            return {"input": [None, marks], "output": [None, marks]}

        def copy(self) -> Any:
            return self

        def get_models(self) -> list[Any]:
            return []

    network = flux.model.diffusion_model
    double, after_double = record(network.double_blocks[1]), record(network.double_blocks[2])
    single, after_single = record(network.single_blocks[1]), record(network.single_blocks[2])
    control = {"control": Residuals(), "control_apply_to_uncond": True}
    conds = references(flux, (12, 16))
    for cond in conds.values():
        cond[0][1].update(control)
    models.sample(attach(flux), HEIGHT, WIDTH, steps=1, **conds)
    added = after_double[0].kwargs["img"] - double[0].out[0]
    assert added[:, :TOKENS].isclose(marks, atol=1e-3).all()
    assert not added[:, TOKENS:].any()
    added = after_single[0].args[0] - single[0].out
    assert added[:, TEXT : TEXT + TOKENS].isclose(marks, atol=1e-3).all()
    assert not added[:, :TEXT].any()
    assert not added[:, TEXT + TOKENS :].any()


@loop("granularity", ["stack", "module"])
def test_another_nodes_loop_over_the_blocks(flux: Any, attach: Any, stats_of: Any, granularity: str) -> None:
    """Step caches (TeaCache, WaveSpeed) replace the model's loop, call the blocks without transformer_options and read
    the tokens between them."""
    from comfy.ldm.flux.layers import timestep_embedding

    network, seen = flux.model.diffusion_model, set()

    def loop(
        img: Tensor, img_ids: Tensor, txt: Tensor, txt_ids: Tensor, t: Tensor, y: Tensor, *_: Any, **__: Any
    ) -> Any:
        img, txt = network.img_in(img), network.txt_in(txt)
        vec = network.time_in(timestep_embedding(t, 256)) + network.vector_in(y)
        pe = network.pe_embedder(torch.cat([txt_ids, img_ids], 1))
        for block in network.double_blocks:
            img, txt = block(img=img, txt=txt, vec=vec, pe=pe, attn_mask=None)
            seen.add(img.shape[1])
        x = torch.cat([txt, img], 1)
        for block in network.single_blocks:
            x = block(x, vec=vec, pe=pe, attn_mask=None)
            seen.add(x.shape[1] - TEXT)
        return network.final_layer(x[:, TEXT:], vec)

    def looped(apply_model: Any, args: dict[str, Any]) -> Tensor:
        with mock.patch.object(network, "forward_orig", loop):
            return apply_model(args["input"], args["timestep"], **args["c"])

    foreign = flux.clone()
    foreign.set_model_unet_function_wrapper(looped)
    plain = models.sample(foreign, HEIGHT, WIDTH, steps=2)
    model = attach(foreign, granularity=granularity)
    out = models.sample(model, HEIGHT, WIDTH, steps=2)
    assert seen == {TOKENS}
    assert len(stats_of(model).merged_blocks) == 6
    assert stats_of(model).unmerged == {}
    assert out.isfinite().all()
    assert not torch.equal(out, plain)
    assert torch.equal(models.sample(attach(foreign, min_tokens=1000), HEIGHT, WIDTH, steps=2), plain)


def test_attention_override_still_runs_and_sees_merged_tokens(flux: Any, attach: Any) -> None:
    """Packs with other attention kernels use it; their speed-up adds to ToMA's."""
    lengths = []

    def override(func: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        lengths.append((q.shape[2], k.shape[2]))
        return func(q, k, v, *args, **kwargs)

    other = flux.clone()
    other.model_options["transformer_options"]["optimized_attention_override"] = override
    out = models.sample(attach(other), HEIGHT, WIDTH, steps=1)
    assert set(lengths) == {(TEXT + KEPT, TEXT + KEPT)}
    assert torch.equal(out, models.sample(attach(flux), HEIGHT, WIDTH, steps=1))
