"""Build a small model of one of ComfyUI's classes with random weights."""

from __future__ import annotations

from typing import Any

import torch


def patcher(model: Any, seed: int) -> Any:
    """Wrap one of ComfyUI's models in a ModelPatcher, with weights drawn from the seed."""
    import comfy.model_patcher

    generator = torch.Generator().manual_seed(seed)
    for parameter in model.diffusion_model.parameters():
        # ComfyUI's layers are not initialised, so all weights are set here. Biases and norms are noisy too, so that
        # each of them has an effect.
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
    model_config.unet_config.update(config)  # needed because some config classes fix the sizes of their only checkpoint
    return patcher(base(model_config, device=torch.device("cpu")), seed)


def classes_of(model: str, recognised: str) -> tuple[Any, Any]:
    """Return `comfy.model_base.<model>` and `comfy.supported_models.<recognised>`."""
    import comfy.model_base
    import comfy.supported_models

    if model == "QwenImage21":
        import comfy.ldm.qwen_image21.model

    return getattr(comfy.model_base, model), getattr(comfy.supported_models, recognised)


def unet(seed: int = 0, *, depths: tuple[int, ...] = (0, 1, 2), middle: int = 2, **extra: Any) -> Any:
    """Return a ModelPatcher around a `comfy.model_base.SDXL` with a small `UNetModel`. depths: transformer blocks per
    level. With (0, 1, 2) attention is at a half and a quarter of the latent's side, as in SDXL. With (1, 1, 0) it
    begins at the full side, as in SD1.5."""
    import comfy.model_base
    import comfy.supported_models

    config = {
        "image_size": 32,
        "in_channels": 4,
        "out_channels": 4,
        "model_channels": 32,
        "num_res_blocks": [2] * len(depths),
        "channel_mult": tuple(2**i for i in range(len(depths))),
        "use_spatial_transformer": True,
        "transformer_depth": [d for d in depths for _ in range(2)],
        "transformer_depth_output": [d for d in depths for _ in range(3)],
        "transformer_depth_middle": middle,
        "context_dim": 48,
        "use_linear_in_transformer": True,
        "num_classes": "sequential",
        "adm_in_channels": 2816,
        "legacy": False,
        "dtype": torch.float32,
        **extra,
    }
    model_config = comfy.supported_models.SDXL(config)
    model_config.unet_config["num_head_channels"] = 16
    return patcher(comfy.model_base.SDXL(model_config, device=torch.device("cpu")), seed)
