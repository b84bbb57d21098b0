import gc
import weakref
from typing import Any

import comfy.model_management
import pytest
import torch

from scripts.comfy_pack import pack_module
from testbed import models
from tests.loop import loop
from tests.nodes.adapters.helpers import balanced

registry = pack_module("nodes.adapters.registry")
report_text = pack_module("nodes.adapters.report_text")


@pytest.mark.compat
def test_unknown_class_is_refused_with_what_is_supported(stranger: Any, attach: Any) -> None:
    with pytest.raises(registry.UnsupportedModelError, match="MMDiT") as refused:
        attach(stranger)
    message = str(refused.value)
    assert message.startswith("Bypass this node (Ctrl+B): ToMA cannot speed up this model")
    assert "Supported: UNet (SDXL, SD1.5, SD2), Flux (Flux.1, " in message
    assert "Supported" not in str(refused.value.message), "the node shows the list folded"
    assert isinstance(refused.value, ValueError)


@loop("built", ["derived", "copied"])
@loop("family", list(models.TRANSFORMERS))
def test_class_of_a_later_comfyui_is_refused_by_name(family: str, built: str, attach: Any, monkeypatch: Any) -> None:
    """The class of a future model may be derived from a supported class or resemble it."""
    model = models.TRANSFORMERS[family]()
    network = model.model.diffusion_model
    kind = type(network)
    bases, body = (kind,), dict[str, Any]()
    if built == "copied":
        bases = kind.__bases__
        body = {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__")}
    later = type(kind)(f"Later{kind.__name__}", bases, {**body, "__module__": "comfy.ldm.later.model"})
    monkeypatch.setattr(network, "__class__", later)
    with pytest.raises(registry.UnsupportedModelError, match=f"Later{kind.__name__}"):
        attach(model)


@loop("folder", ["/home/me/my.app/custom_nodes/", "C:\\app\\custom_nodes\\"])
def test_a_model_that_another_pack_runs_is_refused_with_what_to_do(folder: str, attach: Any) -> None:
    """Nunchaku's wrapper replaces ComfyUI's network."""
    model = models.flux()
    wrapper = type("ComfyFluxWrapper", (torch.nn.Module,), {"__module__": f"{folder}ComfyUI-nunchaku.wrappers.flux"})()
    wrapper.model = model.model.diffusion_model
    model.model.diffusion_model = wrapper
    with pytest.raises(registry.UnsupportedModelError) as refused:
        attach(model)
    advice = "Bypass this node (Ctrl+B), or load the model with one of ComfyUI's own loaders or as GGUF"
    assert str(refused.value).startswith(advice)
    assert str(refused.value).endswith(
        "ComfyUI-nunchaku.wrappers.flux runs it with code of its own (ComfyFluxWrapper)."
    )


@loop("steps", [1, 2])
def test_a_run_of_too_few_steps_says_so(steps: int, flux: Any, stats_of: Any) -> None:
    merged = balanced(flux)
    assert torch.equal(*(models.sample(each, 18, 26, steps=steps) for each in (merged, flux)))
    assert str(report_text.headline(stats_of(merged))) == "Nothing was merged: too few steps for this preset"


def test_known_models_have_hooks_of_their_own(unet: Any, flux: Any) -> None:
    hooks = [registry.find(model.model.diffusion_model) for model in (unet, flux, models.unet())]
    assert len({id(h) for h in hooks}) == 3
    for network in (unet.model.diffusion_model, torch.compile(unet.model.diffusion_model, backend="eager")):
        assert registry.find(network) is hooks[0]


@loop("kind", ["unet", "flux"])
def test_hooks_do_not_keep_a_model_alive(kind: str, new_model: Any, attach: Any) -> None:
    model = new_model(kind)
    gone = weakref.ref(model.model.diffusion_model)
    models.sample(attach(model), 8, 8, steps=1)
    comfy.model_management.unload_all_models()
    del model
    gc.collect()
    assert gone() is None
