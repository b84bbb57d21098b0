"""Test HunyuanVideo: frames that follow text and a reference, a mask of the text, and modulation by frame."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scripts.comfy_pack import pack_module
from testbed import models
from tests.loop import loop
from tests.nodes.adapters.families.layouts import DOUBLE, HEIGHT, SINGLE, TEXT, WIDTH, Layout, current, noise

Reason = pack_module("toma_core.reasons").Reason

# HunyuanVideo 1.5 has a token for each latent pixel, no single blocks and no pooled text.
NEW = {
    "base": "HunyuanVideo15", "kind": "HunyuanVideo15", "single": 0, "in_channels": 65, "out_channels": 32,
    "vec_in_dim": None, "guidance_embed": False, "use_cond_type_embedding": True, "vision_in_dim": 1152,
    "meanflow_sum": True,
}  # fmt: skip
FRAME = HEIGHT // 2 * (WIDTH // 2)


@pytest.fixture(scope="module")
def hunyuan() -> Any:
    return models.hunyuan(patch_size=[1, 2, 2])


@pytest.mark.compat
@loop("layout", [DOUBLE, SINGLE], ids=["double", "single"])
@loop(("masked", "reference"), [(True, False), (False, True), (True, True)])
def test_a_block_of_a_video(layout: Layout, masked: bool, reference: bool, hunyuan: Any, merged_block: Any) -> None:
    """A reference comes before the video. After merging, the attention mask is cut to the new number of tokens."""
    frames, before, options = 3, FRAME if reference else 0, dict[str, Any]()
    if masked:
        options["attention_mask"] = torch.tensor([[1] * 4 + [0] * (TEXT - 4)])
    if reference:
        options["ref_latent"] = noise(1, 16, 1, HEIGHT, WIDTH)
    positive = models.conditioning(hunyuan, seed=1, **options)
    layout = replace(layout, before=layout.before + before)
    block = merged_block(hunyuan, layout, frames=frames, positive=positive)
    assert block.planned[0].grid == (frames, HEIGHT // 2, WIDTH // 2)
    assert block.plan.num_destinations == frames * FRAME // 2
    assert block.tokens.shape[1] == layout.before + frames * FRAME
    mask = block.given["attn_mask"]
    assert (mask is not None) == masked
    if masked:
        length = layout.above + block.tokens.shape[1] - block.plan.tokens + block.plan.num_destinations
        block.seen["attn_mask"] = mask[..., :length]
    block.agrees()


def test_blocks_are_not_merged_if_the_first_frame_has_its_own_sigma(hunyuan: Any, run_unmerged: Any) -> None:
    """ComfyUI modulates the tokens of the first frame separately. Single blocks count these tokens from the start of
    the text, so the separate modulation ends inside of the frame."""
    conds = {"positive": models.conditioning(hunyuan, seed=1, guiding_frame_index=0)}
    assert set(run_unmerged(hunyuan, frames=3, **conds).unmerged) == {
        Reason.ARGUMENT_IN_USE(arguments=("modulation_dims_img", "modulation_dims_txt")),
        Reason.ARGUMENT_IN_USE(arguments=("modulation_dims",)),
    }


def test_hunyuan_video_1_5(attach: Any, stats_of: Any) -> None:
    if not current():
        pytest.skip("this ComfyUI may have another 1.5")
    model = models.hunyuan(**NEW)

    options = {"clip_vision_output": SimpleNamespace(last_hidden_state=noise(1, 5, 1152))}
    options["concat_latent_image"] = noise(1, 32, 3, HEIGHT, WIDTH)
    conds = {"positive": models.conditioning(model, seed=1, **options)}
    merged, asked = attach(model, skip_last_blocks=1), {"frames": 3, "steps": 2, "cfg": 1.0, **conds}
    out = models.sample(merged, HEIGHT, WIDTH, **asked)
    assert out.isfinite().all()
    assert not torch.equal(out, models.sample(model, HEIGHT, WIDTH, **asked))
    assert stats_of(merged).grids == {(3, HEIGHT, WIDTH): 3 * HEIGHT * WIDTH // 2}
    assert stats_of(merged).merged_blocks == {"double.0", "double.1"}
    assert stats_of(merged).unmerged_names() == {Reason.SKIP_LAST_BLOCKS(count=1): {"double.2"}}


def test_hunyuan_image(run_merged: Any) -> None:
    """Latents of HunyuanImage have four dimensions, and positions have two axes."""
    model = models.hunyuan(
        base="HunyuanImage21", kind="HunyuanImage21", patch_size=[1, 1], axes_dim=[12, 12], vec_in_dim=None,
        in_channels=64, out_channels=64, guidance_embed=False,
    )  # fmt: skip
    assert run_merged(model, {}, steps=2).grids == {(HEIGHT, WIDTH): HEIGHT * WIDTH // 2}


def test_another_patch_of_frames_is_not_known(pack: Any) -> None:
    family, registry = pack_module("nodes.adapters.families.hunyuan"), pack_module("nodes.adapters.registry")
    assert registry.is_of(family, models.hunyuan().model.diffusion_model)
    assert not registry.is_of(family, models.hunyuan(patch_size=[2, 2, 2]).model.diffusion_model)
