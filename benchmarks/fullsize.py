"""SDXL's UNet and Flux.1 at their real widths, with random weights: right for time, meaningless for pictures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks import models

# One long row of noise that every weight is cut from: drawing 2.6 billion numbers would take minutes.
_NOISE = 1 << 24


# Text tokens, their width, the width of the pooled vector: of the whole models, and of those in benchmarks.models.
_TEXT = {
    ("sdxl", False): (77, 2048, 2816),
    ("flux", False): (512, 4096, 768),
    ("sdxl", True): (77, 48, 2816),
    ("flux", True): (32, 48, 24),
}


@dataclass(frozen=True)
class Shape:
    """One evaluation: `sdxl` or `flux`, picture sides in pixels, images in the batch. tiny: of the small models in
    `benchmarks.models`, to try a benchmark out."""

    model: str
    height: int = 1024
    width: int = 1024
    batch: int = 1
    tiny: bool = False

    @property
    def size(self) -> str:
        return f"{self.width}x{self.height}"

    def inputs(self, device: torch.device) -> dict[str, Any]:
        """Arguments of `apply_model`, the same on every device."""
        generator = torch.Generator().manual_seed(1)

        def noise(*shape: int) -> Tensor:
            return torch.randn(self.batch, *shape, generator=generator).to(device)

        def full(value: float) -> Tensor:
            return torch.full((self.batch,), value, device=device)

        text, width, pooled = _TEXT[self.model, self.tiny]
        x = noise(4 if self.model == "sdxl" else 16, self.height // 8, self.width // 8)
        inputs = {"x": x, "c_crossattn": noise(text, width), "y": noise(pooled)}
        return {**inputs, "t": full(5.0)} if self.model == "sdxl" else {**inputs, "t": full(0.7), "guidance": full(3.5)}

    def conditioning(self, seed: int) -> list[Any]:
        """CONDITIONING for a sampler: random text for one picture."""
        generator = torch.Generator().manual_seed(seed)
        text, width, pooled = _TEXT[self.model, self.tiny]
        # SDXL's vector is the pooled text and six sizes.
        pooled = 1280 if self.model == "sdxl" else pooled
        drawn = [torch.randn(1, *shape, generator=generator) for shape in ((text, width), (pooled,))]
        return [[drawn[0], {"pooled_output": drawn[1], "guidance": 3.5}]]


def patcher(
    name: str, dtype: torch.dtype, device: torch.device, *, tiny: bool = False, flux_blocks: tuple[int, int] = (19, 38)
) -> Any:
    """A `ModelPatcher` around `sdxl` or `flux`, at full width or, on the CPU in fp32, tiny."""
    if tiny:
        return models.unet() if name == "sdxl" else models.flux()
    from comfy.model_patcher import ModelPatcher

    model = sdxl(dtype, device) if name == "sdxl" else flux(dtype, device, *flux_blocks)
    return ModelPatcher(model, load_device=device, offload_device=device)


def _fill(model: Any, device: torch.device, seed: int) -> None:
    """Random weights, drawn on the CPU and so the same on every device; none on the meta device."""
    if device.type == "meta":
        model.diffusion_model.requires_grad_(False)
        return
    model.to(device)
    noise = torch.randn(_NOISE, generator=torch.Generator().manual_seed(seed)).to(device)
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
    _fill(model, device, seed)
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
    _fill(model, device, seed)
    return model
