"""Keys and values alone on fewer tokens: what a block gives is what it gives with K and V averaged by hand."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import models
from tests.nodes.adapters.families.layouts import CLOSE, HEIGHT, WIDTH

FRAME = HEIGHT // 2 * (WIDTH // 2)


def averaged(M: Tensor, before: int) -> Any:
    """An attention whose first call in a block looks at means of keys and values."""
    calls = 0

    def attention(function: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 1:
            after = before + M.shape[2]
            k, v = (torch.cat([t[:, :before], M @ t[:, before:after], t[:, after:]], 1) for t in (k, v))
        return function(q, k, v, *args, **kwargs)

    return attention


@pytest.mark.parametrize(
    ("frames", "reference", "text"), [(1, False, 7), (3, False, 7), (3, True, 7), (1, False, FRAME)]
)
def test_a_block_looks_at_fewer_keys(
    frames: int, reference: bool, text: int, attach: Any, record: Any, plan_calls: Any, dense: Any, stats_of: Any
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
    M, _ = dense(plan_calls[call.first_plan].plan)
    told = {**call.kwargs["transformer_options"], "optimized_attention_override": averaged(M, before)}
    found = block(call.args[0], **{**call.kwargs, "transformer_options": told})
    torch.testing.assert_close(call.out, found, **CLOSE)
    assert (call.out - block(call.args[0], **call.kwargs)).abs().max() > 1e-2
    assert call.kwargs["transformer_options"].get("optimized_attention_override") is None


def test_less_is_lost_than_by_merging_tokens(model_of: Any, attach: Any) -> None:
    model, asked = model_of("wan"), {"frames": 3, "steps": 3}
    plain, keys, tokens = (
        models.sample(m, HEIGHT, WIDTH, **asked) for m in (model, attach(model, keys_only=True), attach(model))
    )
    assert 0 < (keys - plain).norm() < 0.8 * (tokens - plain).norm()


def test_whoever_computes_attention_gets_fewer_keys_and_no_mask(model_of: Any, attach: Any) -> None:
    seen = []

    def override(function: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append((q.shape[1], k.shape[1], v.shape[1], kwargs.get("mask")))
        return function(q, k, v, *args, **kwargs)

    patched = model_of("wan").clone()
    patched.model_options["transformer_options"]["optimized_attention_override"] = override
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


@pytest.mark.parametrize("kind", ["unet", "flux", "qwen_image"])
def test_other_models_are_left_whole(kind: str, model_of: Any, attach: Any, stats_of: Any) -> None:
    model = model_of(kind)
    merged = attach(model, keys_only=True)
    assert torch.equal(models.sample(merged, 16, 16, steps=2), models.sample(model, 16, 16, steps=2))
    assert list(stats_of(merged).left_whole) == ["keys_only is for Wan"]


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


def test_compiled_by_comfyui(model_of: Any, attach: Any, no_state_left: None) -> None:
    """Its torch.compile does not look at what rides in transformer_options: steps with fewer keys, whole steps and runs
    without ToMA take turns all the same."""
    from comfy_api.torch_helpers import set_torch_compile_wrapper
    from comfy_extras.nodes_torch_compile import skip_torch_compile_dict

    def compiled(model: Any) -> Any:
        model = model.clone()
        options = {"guard_filter_fn": skip_torch_compile_dict}
        set_torch_compile_wrapper(model=model, backend="eager", options=options, keys=["diffusion_model"])
        return model

    model, asked = models.wan(layers=2), {"frames": 3, "steps": 4, "cfg": 1.0}
    torch._dynamo.reset()
    for _ in range(2):
        for one in (model, attach(model, keys_only=True, whole_every=2), attach(model)):
            given = models.sample(compiled(one), HEIGHT, WIDTH, **asked)
            assert torch.equal(given, models.sample(one, HEIGHT, WIDTH, **asked))
