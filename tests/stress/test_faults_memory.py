"""Test scarce memory: models that are unloaded between or within prompts, weights that do not fit, and attention that
tries again."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from testbed import models

pytestmark = pytest.mark.usefixtures("families_made")


BOTH = ("unet", "flux")
both = pytest.mark.parametrize("kind", BOTH)


@both
def test_attention_that_recovers_from_no_memory_inside_a_merged_block(
    kind: str, model: Any, attach: Any, prompt: Any, nothing_alive: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an out-of-memory error, ComfyUI's split attention clears its caches and tries again. The picture equals
    that of a run without errors."""
    import comfy.model_management
    from comfy.ldm.modules import attention

    def split(func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return attention.attention_split(*args, **{**kwargs, "_inside_attn_wrapper": True})

    foreign = model.clone()
    foreign.model_options["transformer_options"]["optimized_attention_override"] = split
    patched = attach(foreign, **prompt.CASES["stack"])
    expected = prompt.digest(prompt.sample(patched))
    einsum, calls = attention.einsum, 0

    def scarce(*args: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls % 5 == 1:
            raise comfy.model_management.OOM_EXCEPTION("CUDA out of memory, as a test has it")
        return einsum(*args)

    monkeypatch.setattr(attention, "einsum", scarce)
    assert prompt.digest(prompt.sample(patched)) == expected
    assert calls > 5
    nothing_alive()


def test_model_unloaded_reloaded_and_loaded_anew(
    kind: str, model: Any, attach: Any, prompt: Any, fresh: Any, nothing_alive: Any
) -> None:
    import comfy.model_management as mm

    patched = attach(model, **prompt.CASES["stack"])
    for unload in (
        lambda: None,
        mm.unload_all_models,
        lambda: mm.free_memory(1e32, torch.device("cpu")),
        patched.detach,
    ):
        unload()
        assert prompt.digest(prompt.sample(patched)) == fresh[kind]["stack"]
    own = getattr(models, kind)()
    gone = weakref.ref(own.model.diffusion_model)
    assert prompt.digest(prompt.sample(attach(own, **prompt.CASES["stack"]))) == fresh[kind]["stack"]
    mm.unload_all_models()
    del own
    gc.collect()
    assert gone() is None, "a freed model is still referenced"
    assert (
        prompt.digest(prompt.sample(attach(getattr(models, kind)(), **prompt.CASES["stack"]))) == fresh[kind]["stack"]
    )
    nothing_alive()


def test_model_unloaded_while_sampling(
    kind: str, model: Any, attach: Any, prompt: Any, fresh: Any, nothing_alive: Any
) -> None:
    """Another model needs memory between two steps, so ComfyUI unloads a part of the sampled model."""
    patched = attach(model, **prompt.CASES["stack"])
    size, freed = model.model_size(), []

    def after(step: int, *_: Any) -> None:
        freed.append(patched.partially_unload(patched.offload_device, size // 2))

    assert prompt.digest(prompt.sample(patched, callback=after)) == fresh[kind]["stack"]
    assert freed[0] > 0
    patched.detach()
    assert prompt.digest(prompt.sample(patched)) == fresh[kind]["stack"]
    nothing_alive()


@pytest.fixture
def lowvram(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """lowvram(bytes): load models as on a card with this much memory for weights."""
    from comfy.model_management import LoadedModel

    load = LoadedModel.model_load

    def start(room: int) -> None:
        def loaded(self: Any, lowvram_model_memory: float = 0, force_patch_weights: bool = False) -> Any:
            return load(self, room, force_patch_weights)

        monkeypatch.setattr(LoadedModel, "model_load", loaded)

    return start


@pytest.mark.parametrize(
    ("kind", "lora", "share"),
    [(kind, lora, share) for kind in BOTH for lora in (False, True) for share in (0.0, 0.5)]
    + [(kind, True, 0.5) for kind in models.FAMILIES if kind not in BOTH],
)
def test_weights_that_do_not_fit(
    kind: str, attach: Any, prompt: Any, fresh: Any, lowvram: Any, nothing_alive: Any, share: float, lora: bool
) -> None:
    """ComfyUI's lowvram patcher casts weights, and patches them with a LoRA, at each use."""
    import comfy.model_management as mm

    model = getattr(models, kind)()
    if lora:
        g = torch.Generator().manual_seed(3)
        weights = model.model_state_dict()
        names = [n for n in weights if n.endswith("weight") and weights[n].ndim == 2]
        model.add_patches({n: ("diff", (0.01 * torch.randn(weights[n].shape, generator=g),)) for n in names}, 0.8)
    patched = attach(model, **prompt.CASES["stack"])
    expected = prompt.digest(prompt.sample(patched))
    assert (expected == fresh[kind]["stack"]) is not lora
    mm.unload_all_models()
    lowvram(max(1, int(share * model.model_size())))
    assert prompt.digest(prompt.sample(patched)) == expected
    assert model.model.model_lowvram
    assert bool(model.lowvram_patch_counter()) is lora
    cast = [m for m in model.model.diffusion_model.modules() if getattr(m, "comfy_cast_weights", False)]
    assert cast
    mm.unload_all_models()
    nothing_alive()


@both
def test_dynamic_patcher_on_a_cpu_is_the_plain_one(
    kind: str, model: Any, attach: Any, prompt: Any, fresh: Any, nothing_alive: Any
) -> None:
    """Without CUDA, ComfyUI's dynamic patcher itself reports that there is no dynamic VRAM."""
    import comfy.model_management as mm

    patcher = pytest.importorskip("comfy.model_patcher")
    if not hasattr(patcher, "ModelPatcherDynamic"):
        pytest.skip("this ComfyUI has no dynamic VRAM")
    dynamic = patcher.ModelPatcherDynamic(model.model, model.load_device, model.offload_device)
    if dynamic.is_dynamic():
        pytest.skip("dynamic VRAM is on: the other tests run on it")
    assert prompt.digest(prompt.sample(attach(dynamic, **prompt.CASES["stack"]))) == fresh[kind]["stack"]
    nothing_alive()
    # Unload the model. Otherwise ComfyUI would treat it as leaked when this patcher is deleted, and collect garbage
    # before every later run.
    mm.unload_all_models()
