"""Real ComfyUI models, small: SDXL-shaped and SD1.5-shaped UNets and Flux, with random weights from a seed.

Random weights say nothing about image quality; they run every line of the real classes, samplers and hooks.
"""

from __future__ import annotations

from typing import Any

import torch


def _patcher(model: Any, seed: int) -> Any:
    import comfy.model_patcher

    generator = torch.Generator().manual_seed(seed)
    for parameter in model.diffusion_model.parameters():
        # ComfyUI's layers skip initialisation. Biases and norms get the same small noise: no path is dead.
        fan_in = parameter[0].numel() if parameter.ndim > 1 else 1
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = noise / fan_in**0.5 if parameter.ndim > 1 else 1.0 + 0.1 * noise
        parameter.requires_grad_(False)
    cpu = torch.device("cpu")
    return comfy.model_patcher.ModelPatcher(model.eval(), load_device=cpu, offload_device=cpu)


def unet(seed: int = 0, *, depths: tuple[int, ...] = (0, 1, 2), middle: int = 2, **extra: Any) -> Any:
    """A ModelPatcher around `comfy.model_base.SDXL` on a small `UNetModel`. depths: transformer blocks per level;
    (0, 1, 2) has attention at half and quarter of the latent's side, as SDXL; (1, 1, 0) starts at full size, as
    SD1.5."""
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
    return _patcher(comfy.model_base.SDXL(model_config, device=torch.device("cpu")), seed)


def flux(seed: int = 0, *, double: int = 3, single: int = 3, **extra: Any) -> Any:
    """A ModelPatcher around `comfy.model_base.Flux` with the given numbers of blocks."""
    import comfy.model_base
    import comfy.supported_models

    config = {
        "image_model": "flux",
        "in_channels": 16,
        "out_channels": 16,
        "patch_size": 2,
        "vec_in_dim": 24,
        "context_in_dim": 48,
        "hidden_size": 48,
        "mlp_ratio": 4.0,
        "num_heads": 2,
        "depth": double,
        "depth_single_blocks": single,
        "axes_dim": [8, 8, 8],
        "theta": 10000,
        "qkv_bias": True,
        "guidance_embed": True,
        "txt_ids_dims": [],
        "dtype": torch.float32,
        **extra,
    }
    model_config = comfy.supported_models.Flux(config)
    return _patcher(comfy.model_base.Flux(model_config, device=torch.device("cpu")), seed)


def conditioning(model: Any, tokens: int = 7, seed: int = 1, **options: Any) -> list[Any]:
    """CONDITIONING for one of the models above: `tokens` random text tokens; options such as `area` go along."""
    import comfy.model_base

    generator = torch.Generator().manual_seed(seed)
    width = 24 if isinstance(model.model, comfy.model_base.Flux) else 1280
    text = torch.randn(1, tokens, 48, generator=generator)
    return [[text, {"pooled_output": torch.randn(1, width, generator=generator), **options}]]


def sample(
    model: Any,
    height: int = 32,
    width: int = 32,
    *,
    batch: int = 1,
    steps: int = 3,
    cfg: float = 3.0,
    sampler: str = "euler",
    scheduler: str = "simple",
    seed: int = 5,
    positive: Any = None,
    negative: Any = None,
    **options: Any,
) -> torch.Tensor:
    """Sample a latent of `height` x `width` (in latent pixels) through ComfyUI's own sampler."""
    import comfy.sample

    channels = model.model.latent_format.latent_channels
    latent = torch.zeros(batch, channels, height, width)
    noise = comfy.sample.prepare_noise(latent, seed)
    positive = conditioning(model, seed=1) if positive is None else positive
    negative = conditioning(model, seed=2) if negative is None else negative
    return comfy.sample.sample(
        model,
        noise,
        steps,
        cfg,
        sampler,
        scheduler,
        positive,
        negative,
        latent,
        seed=seed,
        disable_pbar=True,
        **options,
    )
