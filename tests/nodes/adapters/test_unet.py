"""Test the UNet adapter with each granularity, skipped blocks and other nodes."""

from typing import Any

import pytest
import torch
from comfy.ldm.modules.attention import SpatialVideoTransformer, optimized_attention
from torch import Tensor

from scripts.comfy_pack import pack_module
from testbed import models
from tests.loop import loop

Reason = pack_module("toma_core.reasons").Reason

SIDE = 24  # grids of 12 x 12 and 6 x 6, in windows of 6 x 6 and 3 x 3
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture
def stack(unet: Any) -> torch.nn.Module:
    """Return a stack of two blocks at the coarser resolution."""
    return unet.model.diffusion_model.input_blocks[7][1]


def options_of(call: Any) -> dict[str, Any]:
    return {"block": ("input", 7), "block_index": call.kwargs["transformer_options"]["block_index"]}


@pytest.mark.compat
@loop("granularity", ["block", "stack"])
def test_blocks_are_computed_on_merged_tokens(
    unet: Any, stack: Any, attach: Any, record: Any, plan_calls: Any, dense: Any, granularity: str
) -> None:
    """A stack stays merged between its blocks."""
    blocks = list(stack.transformer_blocks)
    recorded = [record(block) for block in blocks]
    models.sample(attach(unet, granularity=granularity), SIDE, SIDE, batch=2, steps=1)
    calls = [each[0] for each in recorded]
    for first, last in [(0, 1)] if granularity == "stack" else [(0, 0), (1, 1)]:
        start, end = calls[first], calls[last]
        M, U = dense(plan_calls[start.first_plan].plan)
        x = start.args[0]
        merged = out = M @ x
        assert merged.shape == (4, 18, x.shape[2])
        for block in blocks[first : last + 1]:
            out = block(out, context=start.kwargs["context"], transformer_options=options_of(start))
        torch.testing.assert_close(end.out, x + U @ (out - merged), **CLOSE)


@pytest.mark.compat
def test_modules_one_by_one(unet: Any, stack: Any, attach: Any, record: Any, plan_calls: Any, dense: Any) -> None:
    block = stack.transformer_blocks[0]
    calls = record(block)
    models.sample(attach(unet, granularity="module"), SIDE, SIDE, steps=1)
    (call,) = calls
    M, U = dense(plan_calls[call.first_plan].plan)
    x, context = call.args[0], call.kwargs["context"]
    for norm, module in zip(
        (block.norm1, block.norm2, block.norm3),
        (block.attn1, lambda n: block.attn2(n, context=context), block.ff),
        strict=True,
    ):
        x = x + U @ module(M @ norm(x))
    torch.testing.assert_close(call.out, x, **CLOSE)


@loop("granularity", ["block", "stack"])
@loop("amount", [4, 0.35])
def test_last_stacks_are_skipped(unet: Any, attach: Any, stats_of: Any, granularity: str, amount: float) -> None:
    """An amount below 1 is a share of the 11 stacks."""
    model = attach(unet, skip_last_blocks=amount, granularity=granularity)
    models.sample(model, SIDE, SIDE, steps=1)
    stats = stats_of(model)
    last = {"output.2.0", "output.2.1", "output.3.0", "output.4.0", "output.5.0"}
    assert stats.unmerged_names() == {Reason.SKIP_LAST_BLOCKS(count=amount): last}
    assert len(stats.merged_blocks) == 12


@loop("change", ["context", "value", "query", "longer context"])
def test_attention_patch_may_change_any_of_the_three(unet: Any, attach: Any, change: str) -> None:
    """An attention patch must return keys and values of equal length. Queries may have another length."""

    def patch(n: Tensor, context: Tensor, value: Tensor, extra_options: Any) -> Any:
        longer = torch.cat([context, context * 0.5], 1)
        changed = {"context": (n, context * 0.5, value), "value": (n, context, value * 0.5)}
        return {**changed, "query": (n * 0.5, context, value), "longer context": (n, longer, longer)}[change]

    foreign = unet.clone()
    foreign.set_model_attn1_patch(patch)
    out = models.sample(attach(foreign), SIDE, SIDE, steps=1)
    assert out.isfinite().all()
    plain = models.sample(attach(unet, granularity="module"), SIDE, SIDE, steps=1)
    assert (out - plain).abs().max() > 1, "the change of the patch was lost"


def test_cross_attention_replacement_sees_all_tokens_and_their_shape(unet: Any, attach: Any, stats_of: Any) -> None:
    """The replacement multiplies its output by a mask in the shape of the activations, as IPAdapter's does."""
    seen = []

    def replacement(q: Tensor, k: Tensor, v: Tensor, extra_options: Any) -> Tensor:
        height, width = extra_options["activations_shape"][-2:]
        mask = torch.linspace(0, 1, height * width).view(1, -1, 1)
        seen.append(q.shape[1])
        return optimized_attention(q, k, v, extra_options["n_heads"]) * mask

    foreign = unet.clone()
    for index in range(2):
        foreign.set_model_attn2_replace(replacement, "input", 7, index)
    model = attach(foreign)
    assert models.sample(model, SIDE, SIDE, steps=1).isfinite().all()
    assert seen == [36, 36]
    assert stats_of(model).unmerged_names()[Reason.BLOCK_REPLACED()] == {
        "input.7.0 cross-attention",
        "input.7.1 cross-attention",
    }


def test_video_unets_are_not_taken_for_image_unets(pack: Any) -> None:
    """Video UNets are not supported, because their stacks mix frames."""
    is_of, adapter = pack_module("nodes.adapters.registry").is_of, pack_module("nodes.adapters.families.unet")
    network = models.unet().model.diffusion_model
    assert is_of(adapter, network)
    assert not is_of(adapter, models.flux().model.diffusion_model)
    stack = SpatialVideoTransformer(64, 4, 16, depth=1, context_dim=48, use_linear=True, timesteps=2)
    network.input_blocks[4][1] = stack
    assert not is_of(adapter, network)
