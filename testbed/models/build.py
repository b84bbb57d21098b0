"""Build a small model of one of ComfyUI's classes with random weights."""

from __future__ import annotations

from typing import Any

import torch


def patcher(model: Any, seed: int) -> Any:
    """Wrap one of ComfyUI's models in a ModelPatcher, with weights drawn from the seed."""
    import comfy.model_patcher

    generator = torch.Generator().manual_seed(seed)
    for parameter in model.diffusion_model.parameters():
        # ComfyUI's layers skip initialisation, so all weights are set here. Biases and norms get the same small noise,
        # so that every path has an effect.
        fan_in = parameter[0].numel() if parameter.ndim > 1 else 1
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = noise / fan_in**0.5 if parameter.ndim > 1 else 1.0 + 0.1 * noise
        parameter.requires_grad_(False)
    cpu = torch.device("cpu")
    return comfy.model_patcher.ModelPatcher(model.eval(), load_device=cpu, offload_device=cpu)


def built(model: str, recognised: str, config: dict[str, Any], seed: int) -> Any:
    """Return a ModelPatcher around `comfy.model_base.<model>`, set up as `comfy.supported_models.<recognised>`."""
    base, kind = classes_of(model, recognised)
    model_config = kind(config)
    model_config.unet_config.update(config)  # some already have the sizes of their only checkpoint
    return patcher(base(model_config, device=torch.device("cpu")), seed)


def classes_of(model: str, recognised: str) -> tuple[Any, Any]:
    """Return `comfy.model_base.<model>` and `comfy.supported_models.<recognised>`."""
    import comfy.model_base
    import comfy.supported_models

    if model == "QwenImage21":
        import comfy.ldm.qwen_image21.model

    return getattr(comfy.model_base, model), getattr(comfy.supported_models, recognised)
