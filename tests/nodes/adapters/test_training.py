"""Test that training with ToMA equals training without ToMA, in ComfyUI's TrainLoraNode on ComfyUI's model classes."""

from typing import Any

import pytest
import torch
from comfy.samplers import KSAMPLER

from scripts.comfy_pack import pack_module
from testbed import models
from tests.loop import loop
from tests.nodes.adapters.helpers import balanced, custom_sampled

report_text = pack_module("nodes.adapters.report_text")

# Kind of model, gradient checkpointing, and preset. ComfyUI's Flux overwrites tensors that the backward pass needs, so
# Flux can be trained only with gradient checkpointing.
CASES = [("unet", False, "paper"), ("unet", True, "balanced"), ("flux", True, "paper"), ("z_image", False, "balanced")]


@pytest.fixture
def model(kind: str, pack: Any) -> Any:
    """Build a model that ComfyUI can load a second time, because training loads it again."""

    def made(*_: Any, **__: Any) -> Any:
        return getattr(models, kind)()

    model = made()
    model.cached_patcher_init = (made, ())
    return model


def trained(model: Any, checkpointing: bool) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Return the LoRA and the losses of three steps of ComfyUI's training node."""
    module = pytest.importorskip("comfy_extras.nodes_train")
    inputs = {item.id: getattr(item, "default", None) for item in module.TrainLoraNode.define_schema().inputs}
    channels = model.model.latent_format.latent_channels
    latents = torch.randn(2, channels, 16, 16, generator=torch.Generator().manual_seed(0))
    conditioning = [*models.conditioning(model, seed=1), *models.conditioning(model, seed=2)]
    given = {
        **{"model": model, "latents": {"samples": latents}, "positive": conditioning, "steps": 3, "rank": 2},
        **{"training_dtype": "none", "lora_dtype": "fp32", "gradient_checkpointing": checkpointing, "seed": 3},
        **{"algorithm": "LoRA", "existing_lora": "[None]", "learning_rate": 0.01},
    }
    torch.manual_seed(7)
    with torch.inference_mode():
        out = module.TrainLoraNode.execute(**{name: [given.get(name, value)] for name, value in inputs.items()})
    lora, losses = out.result[:2]
    return lora, losses["loss"]


@loop(("kind", "checkpointing", "preset"), CASES)
def test_training_is_as_without(model: Any, stats_of: Any, preset: str, checkpointing: bool) -> None:
    patched = balanced(model, preset)
    lora, losses = trained(patched, checkpointing)
    expected, expected_losses = trained(model, checkpointing)
    assert losses == expected_losses
    assert len(losses) == 3
    assert lora.keys() == expected.keys() != set()
    assert all(torch.equal(lora[name], expected[name]) for name in lora)
    stats = stats_of(patched)
    assert stats.merged_in.total() == 0
    assert "gradients" in str(report_text.headline(stats))
    assert stats.cache_bytes == 0


def test_an_evaluation_with_gradients_is_full(unet: Any, attach: Any, stats_of: Any) -> None:
    """Gradient guidance enables gradients for one evaluation of a run."""

    def sampler(model: Any, x: Any, sigmas: Any, extra_args: Any, callback: Any = None, **_: Any) -> Any:
        for n, sigma in enumerate(sigmas[:-1]):
            level = sigma.expand(len(x))
            if n == 2:
                with torch.inference_mode(False), torch.enable_grad():
                    latent = x.clone().requires_grad_(True)
                    model(latent, level.clone(), **extra_args).square().mean().backward()
                    assert latent.grad.isfinite().all()
            denoised = model(x, level, **extra_args)
            x = denoised + (x - denoised) * sigmas[n + 1] / sigma
        return x

    patched = attach(unet, full_step_interval=3, granularity="stack")
    assert custom_sampled(patched, KSAMPLER(sampler), torch.linspace(1, 0, 7), cfg=1.0).isfinite().all()
    stats = stats_of(patched)
    assert sorted(stats.merged_steps) == [1, 2, 4]
    assert (stats.evaluations, stats.merged_in.total()) == (7, 3)
