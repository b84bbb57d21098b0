"""Test HunyuanVideo: frames that follow text and a reference, a mask of the text, and modulation by frame."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from scripts.comfy_pack import pack_module
from testbed import models
from tests.loop import loop
from tests.nodes.adapters.families.layouts import (
    CLOSE,
    DOUBLE,
    HEIGHT,
    PREDICTED,
    SINGLE,
    TEXT,
    WIDTH,
    Layout,
    arguments,
    current,
    merged_call,
    noise,
    restored,
    run,
)

Reason = pack_module("toma_core.reasons").Reason

# HunyuanVideo 1.5 has a token for each latent pixel, no single blocks and no pooled text.
NEW = {
    "base": "HunyuanVideo15",
    "kind": "HunyuanVideo15",
    "single": 0,
    "in_channels": 65,
    "out_channels": 32,
    "vec_in_dim": None,
    "guidance_embed": False,
    "use_cond_type_embedding": True,
    "vision_in_dim": 1152,
    "meanflow_sum": True,
}
FRAME = HEIGHT // 2 * (WIDTH // 2)


@pytest.fixture(scope="module")
def hunyuan() -> Any:
    return models.hunyuan(patch_size=[1, 2, 2])


def by_hand(layout: Layout, block: Any, call: Any, plan: Any, dense: Any) -> Tensor:
    """Run a recorded block as `layouts.by_hand` does, with the attention mask cut to the length of merged tokens."""
    M, U = dense(plan)
    merged_args, image, merged = merged_call(layout, arguments(block, layout, call), [plan], M)
    if merged_args["attn_mask"] is not None:
        merged_args["attn_mask"] = merged_args["attn_mask"][..., : layout.above + merged_args[layout.tokens].shape[1]]
    return restored(layout, run(block, layout, merged_args), image, merged, U)


@pytest.mark.compat
@loop("kind", ["double", "single"])
@loop(("frames", "batch", "masked", "reference"), [
    (5, 1, False, False), (5, 2, False, False), (3, 1, True, False), (3, 1, False, True), (3, 1, True, True),
])  # fmt: skip
def test_a_block_of_a_video(
    kind: str, frames: int, batch: int, masked: bool, reference: bool, hunyuan: Any, attach: Any, record: Any,
    plan_calls: Any, dense: Any, stats_of: Any,
) -> None:  # fmt: skip
    block = getattr(hunyuan.model.diffusion_model, f"{kind}_blocks")[1]
    options: dict[str, Any] = {}
    if masked:
        options["attention_mask"] = torch.tensor([[1] * 4 + [0] * (TEXT - 4)])
    if reference:
        options["ref_latent"] = noise(1, 16, 1, HEIGHT, WIDTH)
    conds = {"positive": models.conditioning(hunyuan, seed=1, **options)}
    calls, merged = record(block), attach(hunyuan, granularity="block")
    models.sample(merged, HEIGHT, WIDTH, frames=frames, batch=batch, steps=1, cfg=1.0, **conds)
    assert stats_of(merged).unmerged == {}
    (call,) = calls
    planned, before = plan_calls[call.first_plan], FRAME if reference else 0
    assert planned.grid == (frames, HEIGHT // 2, WIDTH // 2)
    assert planned.plan.num_destinations == frames * FRAME // 2
    layout = replace(DOUBLE, before=before) if kind == "double" else replace(SINGLE, before=TEXT + before)
    given = arguments(block, layout, call)
    assert (given["attn_mask"] is not None) == masked
    assert given[layout.tokens].shape[1] == layout.before + frames * FRAME
    out = call.out if layout.out is None else call.out[layout.out]
    torch.testing.assert_close(out, by_hand(layout, block, call, planned.plan, dense), **CLOSE)


@loop("settings", [{}, PREDICTED, {"full_step_interval": 2}], ids=repr)
@loop(("height", "width", "frames", "cfg"), [(20, 28, 5, 4.0), (18, 16, 1, 1.0), (16, 34, 21, 4.0)])
def test_videos_and_guidance(
    height: int, width: int, frames: int, cfg: float, settings: Any, hunyuan: Any, attach: Any, stats_of: Any
) -> None:
    merged, asked = attach(hunyuan, **settings), {"frames": frames, "steps": 3, "cfg": cfg}
    out = models.sample(merged, height, width, **asked)
    assert out.isfinite().all()
    assert not torch.equal(out, models.sample(hunyuan, height, width, **asked))
    (grid,) = stats_of(merged).grids
    assert grid[-2:] == (height // 2, width // 2)
    assert stats_of(merged).grids[grid] % frames == 0
    assert stats_of(merged).unmerged == {}
    assert torch.equal(models.sample(merged, height, width, **asked), out)


def test_blocks_are_not_merged_if_the_first_frame_has_its_own_sigma(hunyuan: Any, attach: Any, stats_of: Any) -> None:
    """In single blocks, which begin with text, ComfyUI's separate modulation of the first frame ends inside of a
    frame."""
    conds = {"positive": models.conditioning(hunyuan, seed=1, guiding_frame_index=0)}
    merged, asked = attach(hunyuan), {"frames": 3, "steps": 1, "cfg": 1.0, **conds}
    assert torch.equal(models.sample(merged, HEIGHT, WIDTH, **asked), models.sample(hunyuan, HEIGHT, WIDTH, **asked))
    assert set(stats_of(merged).unmerged) == {
        Reason.ARGUMENT_IN_USE(arguments=("modulation_dims_img", "modulation_dims_txt")),
        Reason.ARGUMENT_IN_USE(arguments=("modulation_dims",)),
    }


def test_hunyuan_video_1_5(attach: Any, stats_of: Any) -> None:
    if not current():
        pytest.skip("this ComfyUI may have another 1.5")
    model = models.hunyuan(**NEW)

    class Seen:
        last_hidden_state = noise(1, 5, 1152)

    first = noise(1, 32, 3, HEIGHT, WIDTH)
    conds = {"positive": models.conditioning(model, seed=1, clip_vision_output=Seen(), concat_latent_image=first)}
    merged, asked = attach(model, skip_last_blocks=1), {"frames": 3, "steps": 2, "cfg": 1.0, **conds}
    out = models.sample(merged, HEIGHT, WIDTH, **asked)
    assert out.isfinite().all()
    assert not torch.equal(out, models.sample(model, HEIGHT, WIDTH, **asked))
    assert stats_of(merged).grids == {(3, HEIGHT, WIDTH): 3 * HEIGHT * WIDTH // 2}
    assert stats_of(merged).merged_blocks == {"double.0", "double.1"}
    assert stats_of(merged).unmerged_names() == {Reason.SKIP_LAST_BLOCKS(count=1): {"double.2"}}


def test_hunyuan_image(attach: Any, stats_of: Any) -> None:
    """Latents of HunyuanImage have four dimensions, and positions have two axes."""
    model = models.hunyuan(
        base="HunyuanImage21", kind="HunyuanImage21", patch_size=[1, 1], axes_dim=[12, 12], vec_in_dim=None,
        in_channels=64, out_channels=64, guidance_embed=False,
    )  # fmt: skip
    merged = attach(model)
    out = models.sample(merged, HEIGHT, WIDTH, steps=2)
    assert out.isfinite().all()
    assert out.ndim == 4
    assert not torch.equal(out, models.sample(model, HEIGHT, WIDTH, steps=2))
    assert stats_of(merged).unmerged == {}
    assert stats_of(merged).grids == {(HEIGHT, WIDTH): HEIGHT * WIDTH // 2}


def test_another_patch_of_frames_is_not_known(pack: Any) -> None:
    from scripts.comfy_pack import pack_module

    family = pack_module("nodes.adapters.families.hunyuan")
    assert pack_module("nodes.adapters.registry").is_of(family, models.hunyuan().model.diffusion_model)
    assert not pack_module("nodes.adapters.registry").is_of(
        family, models.hunyuan(patch_size=[2, 2, 2]).model.diffusion_model
    )
