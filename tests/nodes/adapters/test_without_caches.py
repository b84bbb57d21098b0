"""A model to measure: step caches and torch.compile are taken out of a clone, and stay in the model."""

from __future__ import annotations

from typing import Any

import torch
import torch._inductor.decomposition  # opcheck, in tests that run before these, leaves it unable to be imported

from benchmarks import models
from scripts.comfy_pack import pack_module

without_caches = pack_module("nodes.adapters.without_caches").without_caches


def test_nothing_to_take_out(unet: Any) -> None:
    plain, found = without_caches(unet)
    assert found == []
    assert plain is not unet
    assert plain.is_clone(unet)


def test_step_caches(unet: Any) -> None:
    from comfy_extras.nodes_easycache import EasyCacheNode, LazyCacheNode

    whole = models.sample(unet, 24, 24, steps=8)
    for node, name in ((EasyCacheNode, "EasyCache"), (LazyCacheNode, "LazyCache")):
        cached = node.execute(unet, 3.0, 0.0, 1.0, False).args[0]
        hurried = models.sample(cached, 24, 24, steps=8)
        assert not torch.equal(hurried, whole), "it skips evaluations, so that this can fail"
        plain, found = without_caches(cached)
        assert found == [name]
        assert torch.equal(models.sample(plain, 24, 24, steps=8), whole)
        assert torch.equal(models.sample(cached, 24, 24, steps=8), hurried)


def test_compiled(unet: Any) -> None:
    """As ComfyUI's node does it, and block by block as other packs do. Nothing is compiled here: that is lazy."""
    from comfy_api.torch_helpers import set_torch_compile_wrapper

    compiled = unet.clone()
    set_torch_compile_wrapper(compiled, "inductor")
    plain, found = without_caches(compiled)
    assert found == ["torch.compile"]
    assert "torch_compile_kwargs" in compiled.model_options
    assert "torch_compile_kwargs" not in plain.model_options
    assert not plain.get_wrappers("apply_model", "torch.compile")
    assert compiled.get_wrappers("apply_model", "torch.compile")
    by_block = unet.clone()
    place = "diffusion_model.middle_block.1"
    by_block.add_object_patch(place, torch.compile(unet.get_model_object(place)))
    plain, found = without_caches(by_block)
    assert found == ["torch.compile"]
    assert plain.get_model_object(place) is unet.get_model_object(place)
    assert place in by_block.object_patches
