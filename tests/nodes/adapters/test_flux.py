"""Test the Flux adapter with skipped blocks, ControlNets, references and other nodes."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from scripts.comfy_pack import pack_module
from testbed import models
from tests.loop import loop
from tests.nodes.adapters.helpers import Control, prompts_of

Reason = pack_module("toma_core.reasons").Reason
report_text = pack_module("nodes.adapters.report_text")

HEIGHT, WIDTH = 20, 28  # a grid of 10 x 14, in windows of 5 x 7
TOKENS, TEXT = 140, 7
FIRST_TWO = {"double.0", "double.1", "single.0", "single.1"}


@loop(
    ("settings", "unmerged", "merged"),
    [
        ({"skip_first_blocks": 2}, {Reason.SKIP_FIRST_BLOCKS(count=2): FIRST_TWO}, {"double.2", "single.2"}),
        ({"skip_first_blocks": 0.5}, {Reason.SKIP_FIRST_BLOCKS(count=0.5): FIRST_TWO}, {"double.2", "single.2"}),
        ({"skip_last_blocks": 2, "skip_first_blocks": 1},
         {Reason.SKIP_FIRST_BLOCKS(count=1): {"double.0", "single.0"},
          Reason.SKIP_LAST_BLOCKS(count=2): {"single.1", "single.2"}}, {"double.1", "double.2"}),
    ],
)  # fmt: skip
def test_skipped_blocks(settings: Any, unmerged: Any, merged: Any, flux: Any, attach: Any, stats_of: Any) -> None:
    """`skip_first_blocks` skips blocks of each kind, `skip_last_blocks` only blocks of the last kind."""
    model = attach(flux, **settings)
    models.sample(model, HEIGHT, WIDTH, steps=1)
    assert stats_of(model).unmerged_names() == unmerged
    assert stats_of(model).merged_blocks == merged


def test_blocks_with_dropped_tokens_are_not_merged(flux: Any, attach: Any, stats_of: Any) -> None:
    """A post_input patch removes image tokens, so the remaining tokens form no grid."""

    def drop(args: dict[str, Any]) -> dict[str, Any]:
        args["img"], args["img_ids"] = args["img"][:, :100], args["img_ids"][:, :100]
        return args

    foreign = flux.clone()
    foreign.set_model_post_input_patch(drop)
    model = attach(foreign)
    with pytest.raises(Exception, match=r"140|100"):  # the model itself fails without these tokens
        models.sample(model, HEIGHT, WIDTH, steps=1)
    stats = stats_of(model)
    assert (stats.merged_blocks, len(stats.blocks)) == (set(), 6)
    assert stats.unmerged_names() == {Reason.TOKENS_CHANGED(): stats.blocks}
    assert str(Reason.TOKENS_CHANGED()) in report_text.summary(stats)


@pytest.mark.compat
def test_control_is_added_to_the_right_tokens(flux: Any, attach: Any, record: Any) -> None:
    """In single blocks, image tokens are between text and references."""
    marks = torch.zeros(1, TOKENS, 48)
    marks[:, 33] = 1000.0
    network = flux.model.diffusion_model
    double, after_double = record(network.double_blocks[1]), record(network.double_blocks[2])
    single, after_single = record(network.single_blocks[1]), record(network.single_blocks[2])
    control = Control(lambda x, t: {"input": [None, marks], "output": [None, marks]})
    options = {"reference_latents": [torch.randn(1, 16, 12, 16)], "control": control, "control_apply_to_uncond": True}
    models.sample(attach(flux), HEIGHT, WIDTH, steps=1, **prompts_of(flux, **options))
    added = after_double[0].kwargs["img"] - double[0].out[0]
    assert added[:, :TOKENS].isclose(marks, atol=1e-3).all()
    assert not added[:, TOKENS:].any()
    added = after_single[0].args[0] - single[0].out
    assert added[:, TEXT : TEXT + TOKENS].isclose(marks, atol=1e-3).all()
    assert not added[:, :TEXT].any()
    assert not added[:, TEXT + TOKENS :].any()


@loop("granularity", ["stack", "module"])
def test_another_nodes_loop_over_the_blocks(flux: Any, attach: Any, stats_of: Any, granularity: str) -> None:
    """Step caches replace the loop over blocks, pass blocks no transformer_options, and read the tokens between
    blocks."""
    from comfy.ldm.flux.layers import timestep_embedding

    network, seen, told = flux.model.diffusion_model, set(), dict[str, Any]()

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
            x = block(x, vec=vec, pe=pe, attn_mask=None, **told)
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
    # Without transformer_options, no block knows how many reference tokens follow the image tokens.
    conds = prompts_of(flux, reference_latents=[torch.randn(1, 16, 12, 16)])
    out = models.sample(model, HEIGHT, WIDTH, steps=2, **conds)
    told["transformer_options"] = {"img_slice": [TEXT, TEXT + TOKENS + 48]}
    assert torch.equal(models.sample(model, HEIGHT, WIDTH, steps=2, **conds), out)
