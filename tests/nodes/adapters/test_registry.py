from __future__ import annotations

import gc
import inspect
import weakref
from typing import Any

import pytest
import torch

from scripts.comfy_pack import pack_module
from testbed import models
from tests.loop import loop

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
def test_class_of_a_later_comfyui_is_refused_by_name(
    family: str, built: str, attach: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The class of a future model, such as Qwen-Image 2.1 or FLUX.3, may be derived from a supported class or resemble
    it."""
    model = models.TRANSFORMERS[family]()
    network = model.model.diffusion_model
    kind = type(network)
    bases, body = (
        ((kind,), {})
        if built == "derived"
        else (
            kind.__bases__,
            {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__")},
        )
    )
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
    message = str(refused.value)
    assert message.startswith(
        "Bypass this node (Ctrl+B), or load the model with one of ComfyUI's own loaders or as GGUF"
    )
    assert message.endswith("ComfyUI-nunchaku.wrappers.flux runs it with code of its own (ComfyFluxWrapper).")


@loop("steps", [1, 2])
def test_a_run_of_too_few_steps_says_so(steps: int, pack: Any, stats_of: Any) -> None:
    model = models.flux()
    merged = pack_module("nodes.adapters.patch_model").apply_toma(
        model, pack_module("toma_core").UserSettings("balanced", {"min_tokens": 4})
    )
    outs = [models.sample(each, 18, 26, steps=steps) for each in (merged, model)]
    assert torch.equal(*outs)
    assert str(report_text.headline(stats_of(merged))) == "Nothing was merged: too few steps for this preset"


def test_known_models_have_hooks_of_their_own(unet: Any, flux: Any) -> None:
    hooks = [registry.find(model.model.diffusion_model) for model in (unet, flux, models.unet())]
    assert len({id(h) for h in hooks}) == 3
    assert registry.find(unet.model.diffusion_model) is hooks[0]


def test_compiled_model_is_unwrapped(unet: Any) -> None:
    compiled = torch.compile(unet.model.diffusion_model, backend="eager")
    assert registry.find(compiled) is registry.find(unet.model.diffusion_model)


def test_hooks_do_not_keep_a_model_alive(pack: Any, attach: Any) -> None:
    model = models.flux()
    gone = weakref.ref(model.model.diffusion_model)
    models.sample(attach(model), 8, 8, steps=1)
    import comfy.model_management

    comfy.model_management.unload_all_models()
    del model
    gc.collect()
    assert gone() is None


# By change of a later Flux: the arguments that its blocks get in addition to the present ones or in place of them, and
# a word that the report must contain.
LATER: dict[str, Any] = {
    "an unknown argument": ({"times": lambda given: torch.rand(given["pe"].shape[:3:2])}, "times"),
    "an unknown stream": ({"audio": lambda given: torch.rand(1, 5, 48)}, "audio"),
    "another rotary layout": ({"pe": lambda given: given["pe"].movedim(2, 1)}, "pe"),
    "rotary positions in two tables": ({"pe": lambda given: given["pe"].unbind(-1)}, "pe"),
}


@loop("what", list(LATER))
def test_blocks_of_a_later_flux_are_not_merged_by_guess(
    what: str, attach: Any, stats_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FLUX.3 may change the blocks of Flux's own class. The report names the changed arguments."""
    model, (changes, named) = models.flux(), LATER[what]
    kinds = {type(block) for blocks in ("double_blocks", "single_blocks") for block in model_blocks(model, blocks)}
    for kind in kinds:
        monkeypatch.setattr(kind, "forward", later_forward(kind.forward))
        monkeypatch.setattr(kind, "__call__", later_call(kind.__call__, changes))
    plain = models.sample(model, 20, 28, steps=2)
    merged = attach(model)
    assert torch.equal(models.sample(merged, 20, 28, steps=2), plain)
    stats = stats_of(merged)
    assert stats.merged_blocks == set()
    assert {part.block for parts in stats.unmerged.values() for part in parts} == {
        *(f"double.{n}" for n in range(3)), *(f"single.{n}" for n in range(3))
    }  # fmt: skip
    assert all(named in str(reason) for reason in stats.unmerged)


def model_blocks(model: Any, name: str) -> Any:
    return getattr(model.model.diffusion_model, name)


def later_forward(forward: Any) -> Any:
    """Return a `forward` with two additional arguments, which converts changed layouts of `pe` back to the present
    one."""

    def later(self: Any, *args: Any, times: Any = None, audio: Any = None, **kwargs: Any) -> Any:
        pe = kwargs["pe"]
        if isinstance(pe, tuple):
            pe = torch.stack(pe, -1)
        elif pe.shape[2] == 1:
            pe = pe.movedim(1, 2)
        return forward(self, *args, **{**kwargs, "pe": pe})

    known = inspect.signature(forward)
    more = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in ("times", "audio")]
    rest = [p for p in known.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    last = inspect.Parameter("rest", inspect.Parameter.VAR_KEYWORD)
    later.__signature__ = known.replace(parameters=[*rest, *more, last])  # type: ignore[attr-defined]
    return later


def later_call(call: Any, changes: Any) -> Any:
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        return call(self, *args, **{**kwargs, **{name: made(kwargs) for name, made in changes.items()}})

    return called
