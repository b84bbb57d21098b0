"""SDXL's UNet and Flux.1 at their real widths, with random weights: right for time, meaningless for pictures."""

from __future__ import annotations

from typing import Any

import torch

# One long row of noise that every weight is cut from: drawing 2.6 billion numbers would take minutes.
_NOISE = 1 << 24


def _fill(model: Any, seed: int) -> None:
    noise = torch.randn(_NOISE, generator=torch.Generator().manual_seed(seed))
    for index, parameter in enumerate(model.diffusion_model.parameters()):
        size = parameter.numel()
        start = index * 7919 % max(1, _NOISE - size)
        row = noise.repeat(-(-size // _NOISE))[:size] if size > _NOISE else noise[start : start + size]
        row = row / parameter[0].numel() ** 0.5 if parameter.ndim > 1 else 1 + 0.1 * row
        parameter.data.copy_(row.view(parameter.shape))
        parameter.requires_grad_(False)


def sdxl(dtype: torch.dtype, device: torch.device, seed: int = 0) -> Any:
    """`comfy.model_base.SDXL` with the 2.57 B parameters of SDXL base."""
    import comfy.model_base
    import comfy.supported_models

    config = comfy.supported_models.SDXL(
        {
            "image_size": 32,
            "in_channels": 4,
            "out_channels": 4,
            "model_channels": 320,
            "num_res_blocks": [2, 2, 2],
            "channel_mult": [1, 2, 4],
            "transformer_depth": [0, 0, 2, 2, 10, 10],
            "transformer_depth_output": [0, 0, 0, 2, 2, 2, 10, 10, 10],
            "transformer_depth_middle": 10,
            "context_dim": 2048,
            "use_spatial_transformer": True,
            "use_linear_in_transformer": True,
            "num_classes": "sequential",
            "adm_in_channels": 2816,
            "legacy": False,
            "dtype": dtype,
        }
    )
    model = comfy.model_base.SDXL(config, device=device).eval()
    _fill(model, seed)
    return model


def flux(dtype: torch.dtype, device: torch.device, double: int = 19, single: int = 38, seed: int = 0) -> Any:
    """`comfy.model_base.Flux` at Flux.1-dev's width; fewer blocks where memory forces it."""
    import comfy.model_base
    import comfy.supported_models

    config = comfy.supported_models.Flux(
        {
            "image_model": "flux",
            "in_channels": 16,
            "out_channels": 16,
            "patch_size": 2,
            "vec_in_dim": 768,
            "context_in_dim": 4096,
            "hidden_size": 3072,
            "mlp_ratio": 4.0,
            "num_heads": 24,
            "depth": double,
            "depth_single_blocks": single,
            "axes_dim": [16, 56, 56],
            "theta": 10000,
            "qkv_bias": True,
            "guidance_embed": True,
            "txt_ids_dims": [],
            "dtype": dtype,
        }
    )
    model = comfy.model_base.Flux(config, device=device).eval()
    _fill(model, seed)
    return model
