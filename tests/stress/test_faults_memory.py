"""Test scarce memory: models that are unloaded between or within prompts, weights that do not fit, and attention that
tries again after an error."""

from typing import Any

import comfy.model_management as mm
import pytest
import torch

from testbed import models

pytestmark = pytest.mark.usefixtures("families_made")


BOTH = ("unet", "flux")


@pytest.mark.parametrize("kind", BOTH)
def test_attention_that_recovers_from_no_memory(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an out-of-memory error, ComfyUI's split attention clears its caches and tries again. The picture equals the
    picture of a run without errors."""
    from comfy.ldm.modules import attention

    def split(func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return attention.attention_split(*args, **{**kwargs, "_inside_attn_wrapper": True})

    foreign = rig.model.clone()
    foreign.model_options["transformer_options"]["optimized_attention_override"] = split
    patched = rig.patched(model=foreign)
    expected = rig.sampled(patched)
    einsum, calls = attention.einsum, 0

    def scarce(*args: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls % 5 == 1:
            raise mm.OOM_EXCEPTION("CUDA out of memory, as a test has it")
        return einsum(*args)

    monkeypatch.setattr(attention, "einsum", scarce)
    assert rig.sampled(patched) == expected
    assert calls > 5
    rig.check_clean()


def test_model_unloaded_and_reloaded(rig: Any) -> None:
    """The model is unloaded between runs, in three ways. It is also unloaded in part while sampling, as if another
    model needed memory."""
    patched, freed = rig.patched(), []
    size = patched.model_size()

    def after(step: int, *_: Any) -> None:
        freed.append(patched.partially_unload(patched.offload_device, size // 2))

    every = torch.device("cpu")
    for unload in (lambda: None, mm.unload_all_models, lambda: mm.free_memory(1e32, every), patched.detach):
        unload()
        assert rig.sampled(patched) == rig.expected["stack"]
    assert rig.sampled(patched, callback=after) == rig.expected["stack"]
    assert freed[0] > 0
    patched.detach()
    assert rig.sampled(patched) == rig.expected["stack"]
    rig.check_clean()


@pytest.mark.parametrize(
    ("kind", "lora", "share"),
    [(kind, lora, share) for kind in BOTH for lora in (False, True) for share in (0.0, 0.5)]
    + [(kind, True, 0.5) for kind in models.FAMILIES if kind not in BOTH],
)
def test_weights_that_do_not_fit(rig: Any, monkeypatch: pytest.MonkeyPatch, share: float, lora: bool) -> None:
    """ComfyUI's lowvram patcher casts weights, and patches them with a LoRA, at each use. share: the share of the
    weights for which the card has memory."""
    from comfy.model_management import LoadedModel

    model, load = getattr(models, rig.kind)(), LoadedModel.model_load
    room = max(1, int(share * model.model_size()))
    if lora:
        g = torch.Generator().manual_seed(3)
        weights = model.model_state_dict()
        names = [n for n in weights if n.endswith("weight") and weights[n].ndim == 2]
        model.add_patches({n: ("diff", (0.01 * torch.randn(weights[n].shape, generator=g),)) for n in names}, 0.8)
    patched = rig.patched(model=model)
    expected = rig.sampled(patched)
    assert (expected == rig.expected["stack"]) is not lora
    mm.unload_all_models()
    monkeypatch.setattr(LoadedModel, "model_load", lambda self, *_, **force: load(self, room, **force))
    assert rig.sampled(patched) == expected
    assert model.model.model_lowvram
    assert bool(model.lowvram_patch_counter()) is lora
    assert any(getattr(module, "comfy_cast_weights", False) for module in model.model.diffusion_model.modules())
    mm.unload_all_models()
    rig.check_clean()
