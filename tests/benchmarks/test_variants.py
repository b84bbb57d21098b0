"""Test the benchmarks' variants: what ToMA's variants merge, and what rivals do."""

from types import ModuleType
from typing import Any

import torch

from benchmarks import variants
from scripts.comfy_pack import pack_module
from testbed import models


def config_of(model: Any) -> Any:
    run = pack_module("nodes.adapters.patch_model")
    return run.config_for(run.attachment_of(model).settings, model)


def test_rows_merge_every_step_and_the_blocks_of_the_released_method_unless_they_say_otherwise(
    pack: ModuleType,
) -> None:
    unet, flux = models.unet(), models.flux(double=19, single=38)  # as many blocks as Flux.1 has
    config = config_of(variants.toma("a", ratio=0.25).patch(unet))
    assert (config.ratio, config.full_step_interval, config.start_percent, config.end_percent) == (0.25, 0, 0.0, 1.0)
    assert config.skip_first_blocks == 0
    assert config_of(variants.toma("a").patch(flux)).skip_first_blocks == 5
    other = config_of(variants.toma("b", full_step_interval=3, **variants.TINY).patch(flux))
    assert (other.full_step_interval, other.skip_first_blocks) == (3, 0)
    balanced = config_of(variants.preset("balanced", ratio=0.75).patch(unet))
    assert (balanced.ratio, balanced.skip_last_blocks, balanced.selection_interval) == (0.75, 3, 3)
    first, second = variants.Variant("a", lambda m: [*m, 1], "one"), variants.Variant("b", lambda m: [*m, 2])
    both = variants.stacked(first, second)
    assert (both.patch([0]), both.name, both.note) == ([0, 1, 2], "a + b", "one")


def test_a_block_cache_skips_what_hardly_changes(pack: ModuleType) -> None:
    model = models.flux(double=2, single=4)
    runs = list[int]()
    blocks = model.get_model_object("diffusion_model").single_blocks
    handles = [block.register_forward_hook(lambda *_, n=n: runs.append(n)) for n, block in enumerate(blocks)]
    try:
        plain = models.sample(model, 16, 16, steps=3)
        assert torch.equal(models.sample(variants.block_cache(0.0).patch(model), 16, 16, steps=3), plain)
        runs.clear()
        cached = variants.block_cache(float("inf")).patch(model)
        out = models.sample(cached, 16, 16, steps=3)
        assert runs == [0, 1, 2, 3], "in the first step alone"
        assert out.isfinite().all()
        assert not torch.equal(out, plain)
        assert torch.equal(models.sample(cached, 16, 16, steps=3), out), "a run knows nothing of the one before"
    finally:
        for handle in handles:
            handle.remove()
