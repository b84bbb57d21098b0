"""The tiny models: a Flux-format DiT, an SDXL-shaped UNet and a Wan, built from ComfyUI's own classes.

The DiT's state dict is recognised by ComfyUI's stock diffusion-model loader. No loader recognises a UNet this small, so
`load_unet` builds it from `UNET_CONFIG`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import comfy.latent_formats
import comfy.ldm.flux.model
import comfy.ldm.wan.model
import comfy.model_base
import comfy.model_management
import comfy.model_patcher
import comfy.ops
import comfy.sd
import comfy.supported_models
import torch
from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel
from comfy.patcher_extension import WrappersMP
from torch import nn

from .clips import phrased
from .compact import is_packed, load_weights
from .data import PIXELS_PER_TOKEN
from .latents import LATENT_CHANNELS, UNSHUFFLE
from .positions import AddPositions
from .scenes import TEXT_DIM, in_phrases

# head_dim is 128 in every Flux checkpoint, and ComfyUI computes heads = width / 128. So a width of 128 has one head.
DIT_CONFIG: dict[str, Any] = {
    "in_channels": LATENT_CHANNELS,
    "out_channels": LATENT_CHANNELS,
    "vec_in_dim": TEXT_DIM,
    "context_in_dim": TEXT_DIM,
    "hidden_size": 128,
    "mlp_ratio": 4.0,
    "num_heads": 1,
    "depth": 2,
    "depth_single_blocks": 5,
    "axes_dim": [16, 56, 56],
    "theta": 10000,
    "patch_size": 2,
    "qkv_bias": True,
    "guidance_embed": True,
    "txt_ids_dims": [],
}
# SDXL's layout: no attention at the first resolution, shallow stacks at the second, deep stacks at the third.
UNET_CONFIG: dict[str, Any] = {
    "image_size": 32,
    "in_channels": LATENT_CHANNELS,
    "out_channels": LATENT_CHANNELS,
    "model_channels": 64,
    "num_res_blocks": [2, 2, 2],
    "channel_mult": [1, 1, 2],
    "transformer_depth": [0, 0, 1, 1, 2, 2],
    "transformer_depth_middle": 2,
    "transformer_depth_output": [0, 0, 0, 1, 1, 1, 2, 2, 2],
    "context_dim": TEXT_DIM,
    "adm_in_channels": TEXT_DIM + 6 * 256,
    "num_classes": "sequential",
    "num_heads": -1,
    "num_head_channels": 32,
    "use_linear_in_transformer": True,
    "use_spatial_transformer": True,
    "legacy": False,
    "use_temporal_attention": False,
}


# Nearly SDXL's depths: two blocks at the second resolution and seven at the third, whereas SDXL has two and ten.
DEEP_UNET_CONFIG: dict[str, Any] = {
    **UNET_CONFIG,
    "transformer_depth": [0, 0, 2, 2, 7, 7],
    "transformer_depth_middle": 7,
    "transformer_depth_output": [0, 0, 0, 2, 2, 2, 7, 7, 7],
}


CLIP_SHIFT = 3.0
# Wan's layers, with a token for each cell of the latent.
WAN_CONFIG: dict[str, Any] = {
    "model_type": "t2v",
    "patch_size": (1, 1, 1),
    "in_dim": LATENT_CHANNELS,
    "out_dim": LATENT_CHANNELS,
    "dim": 128,
    "ffn_dim": 512,
    "freq_dim": 128,
    "text_dim": TEXT_DIM,
    "num_heads": 2,
    "num_layers": 10,
    "qk_norm": True,
    "cross_attn_norm": True,
}


class TrainingOps(comfy.ops.disable_weight_init):
    """ComfyUI's layers with LayerNorms that copy their input during training.

    Flux blocks add residuals to their input in place. Without the copy, these additions would overwrite values that
    LayerNorm needs for its backward pass.
    """

    class LayerNorm(comfy.ops.disable_weight_init.LayerNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x.clone() if torch.is_grad_enabled() else x)


def dit_config(width: int, blocks: tuple[int, int], token: int) -> dict[str, Any]:
    """Return `DIT_CONFIG` with another width, number of (double, single) blocks and side of a token in pixels (2 or 4).

    The head dimension is the greatest common divisor of the width and Flux's head dimension, 128.
    """
    head = math.gcd(width, 128)
    return {
        **DIT_CONFIG,
        "hidden_size": width,
        "num_heads": width // head,
        "axes_dim": [head // 8, head // 16 * 7, head // 16 * 7],
        "depth": blocks[0],
        "depth_single_blocks": blocks[1],
        "patch_size": token // UNSHUFFLE,
    }


def _initialise(network: nn.Module, zero: tuple[str, ...], generator: torch.Generator) -> None:
    """Initialise a fresh network. ComfyUI's layers do not do so, because they expect weights from a file."""
    for name, module in network.named_modules():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, nn.Parameter):
            continue
        with torch.no_grad():
            if weight.ndim == 1:
                weight.fill_(1.0)
            elif name.endswith(zero):
                weight.zero_()
            else:
                fan_in, fan_out = weight[0].numel(), weight.shape[0] * weight[0, 0].numel()
                weight.normal_(0.0, math.sqrt(2.0 / (fan_in + fan_out)), generator=generator)
            if getattr(module, "bias", None) is not None:
                module.bias.zero_()


def new_dit(
    seed: int = 0, operations: Any = TrainingOps, config: dict[str, Any] | None = None, to_train: bool = True
) -> nn.Module:
    """Build a fresh DiT (comfy.ldm.flux.model.Flux, float32, CPU) with weights drawn from `seed`.

    to_train: initialise every block as the identity. A new model then outputs zero. If False, no weight is zero, and
    the output depends on every block.
    """
    network = comfy.ldm.flux.model.Flux(dtype=torch.float32, operations=operations, **(config or DIT_CONFIG))
    # adaLN-Zero as in the DiT paper: every block starts as the identity. guidance_in stays zero, because the model is
    # not guidance-distilled. So the value of a FluxGuidance node has no effect.
    zero = (
        "img_mod.lin",
        "txt_mod.lin",
        "modulation.lin",
        "adaLN_modulation.1",
        "final_layer.linear",
        "guidance_in.out_layer",
    )
    _initialise(network, zero if to_train else (), torch.Generator().manual_seed(seed))
    return network


def load_dit(path: str) -> Any:
    """Load a DiT of any width and token size from a safetensors file, as a MODEL.

    ComfyUI's own loader assumes tokens of 4 pixels and a head dimension of 128. Models with other tokens or head
    dimensions are built here.
    """
    weights = load_weights(path)
    width, numbers = weights["img_in.weight"].shape
    blocks = tuple(len({key.split(".")[1] for key in weights if key.startswith(kind)}) for kind in ("double", "single"))
    token = UNSHUFFLE * math.isqrt(numbers // LATENT_CHANNELS)
    if width % 128 == 0 and token == PIXELS_PER_TOKEN and not is_packed(path):
        return comfy.sd.load_diffusion_model(path)
    model_config = comfy.supported_models.Flux(dit_config(width, blocks, token))  # type: ignore[arg-type]
    return _patcher(comfy.model_base.Flux, model_config, weights)


def token_pixels(model: Any) -> int:
    """Return the side of a tiny MODEL's token in pixels, at the finest resolution with attention."""
    return UNSHUFFLE * getattr(model.get_model_object("diffusion_model"), "patch_size", PIXELS_PER_TOKEN // UNSHUFFLE)


def _patcher(make: Callable[..., Any], model_config: Any, weights: dict[str, torch.Tensor], *kind: Any) -> Any:
    """Build a model with these weights in a ModelPatcher, on ComfyUI's own devices and in the dtype that ComfyUI uses
    on them."""
    load_device = comfy.model_management.get_torch_device()
    offload_device = comfy.model_management.unet_offload_device()
    dtype = comfy.model_management.unet_dtype(device=load_device, supported_dtypes=[torch.bfloat16, torch.float32])
    cast = comfy.model_management.unet_manual_cast(dtype, load_device, [torch.bfloat16, torch.float32])
    model_config.set_inference_dtype(dtype, cast)
    model = make(model_config, *kind, device=offload_device)
    if isinstance(model.diffusion_model, UNetModel):
        _widen_groups(model.diffusion_model)
    model.diffusion_model.load_state_dict(weights, strict=True)
    model.diffusion_model.to(dtype)
    if isinstance(model.diffusion_model, comfy.ldm.wan.model.WanModel):
        model.diffusion_model.patch_embedding.float()  # Wan's patch embedding always computes in fp32
    return comfy.model_patcher.ModelPatcher(model, load_device=load_device, offload_device=offload_device)


def _widen_groups(network: nn.Module) -> nn.Module:
    """Set four groups in every GroupNorm, in place, and return the network.

    ComfyUI's UNet always uses 32 groups. In SDXL a group has ten or more channels, in this UNet it could have only two.
    Normalisation would remove the mean of these two, and so the colour of a flat background.
    """
    for module in network.modules():
        if isinstance(module, nn.GroupNorm):
            module.num_groups = 4
    return network


def new_unet(
    seed: int = 0, operations: Any = TrainingOps, config: dict[str, Any] | None = None, to_train: bool = True
) -> nn.Module:
    """Build a fresh UNet (ComfyUI's UNetModel, float32, CPU) with weights from `seed`. to_train: see `new_dit`."""
    network = _widen_groups(UNetModel(dtype=torch.float32, operations=operations, **(config or UNET_CONFIG)))
    zero = ("out_layers.3", "proj_out", "out.2") if to_train else ()
    _initialise(network, zero, torch.Generator().manual_seed(seed))
    return network


def _read_clips(executor: Any, x: Any, timesteps: Any, context: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return executor(x, timesteps, phrased(context), *args, **kwargs)


def _read_phrases(executor: Any, x: Any, timesteps: Any, context: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return executor(x, timesteps, in_phrases(context), *args, **kwargs)


def new_wan(
    seed: int = 0, operations: Any = TrainingOps, config: dict[str, Any] | None = None, to_train: bool = True
) -> nn.Module:
    """Build a fresh Wan (ComfyUI's WanModel, float32, CPU) with weights drawn from `seed`. to_train: see `new_dit`."""
    generator = torch.Generator().manual_seed(seed)
    network = comfy.ldm.wan.model.WanModel(dtype=torch.float32, operations=operations, **(config or WAN_CONFIG))
    zero = ("self_attn.o", "cross_attn.o", "ffn.2", "time_projection.1", "head.head")
    _initialise(network, zero if to_train else (), generator)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if name.endswith("modulation"):
                # Set shift and scale to 0, and gates to 1.
                parameter.zero_()
                if name != "head.modulation":
                    parameter[:, [2, 5]] = 1.0
    return network


class ClipLatents(comfy.latent_formats.Flux):
    """Latent format of clips: each frame has the latent format of a picture."""

    latent_dimensions = 3


def load_wan(path: str) -> Any:
    """Load a tiny Wan from a safetensors file, as a MODEL that is sampled with a shift of 3."""
    weights = load_weights(path)
    width, _, *patch = weights["patch_embedding.weight"].shape
    config = {
        **WAN_CONFIG,
        "dim": width,
        "patch_size": tuple(patch),
        "ffn_dim": len(weights["blocks.0.ffn.0.weight"]),
        "num_heads": width // 64,
        "num_layers": len({key.split(".")[1] for key in weights if key.startswith("blocks.")}),
    }
    model_config = comfy.supported_models.WAN21_T2V({**config, "image_model": "wan2.1"})
    model_config.latent_format = ClipLatents()
    model_config.sampling_settings = {"shift": CLIP_SHIFT}
    patcher = _patcher(comfy.model_base.WAN21, model_config, weights)
    patcher.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "demo", _read_clips)
    return patcher


def unet_patcher(
    state_dict: dict[str, torch.Tensor] | None, seed: int = 0, config: dict[str, Any] | None = None
) -> Any:
    """Build a MODEL (ModelPatcher around comfy.model_base.SDXL) of the tiny UNet, on ComfyUI's own devices.

    `state_dict` holds the UNet's weights. If it is None, they are drawn from `seed`. Raises RuntimeError if its keys do
    not fit.
    """
    model_config = comfy.supported_models.SDXL({})
    model_config.unet_config = dict(config or UNET_CONFIG)
    model_config.latent_format = comfy.latent_formats.Flux()
    model_config.sampling_settings = {"zsnr": True}  # zero terminal SNR, see `VelocityObjective`
    weights = state_dict if state_dict is not None else new_unet(seed, config=config, to_train=False).state_dict()
    patcher = _patcher(comfy.model_base.SDXL, model_config, weights, comfy.model_base.ModelType.V_PREDICTION)
    patcher.set_model_input_block_patch(AddPositions())
    patcher.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "demo", _read_phrases)
    return patcher


def load_unet(path: str | None, seed: int = 0, disable_dynamic: bool = False) -> Any:
    """Load a tiny UNet from a safetensors file, as a MODEL. If `path` is None, draw its weights from `seed`.

    ComfyUI passes `disable_dynamic` when it loads a model again for torch.compile. The argument has no effect, because
    the tiny UNet is never offloaded in parts.
    """
    weights = None if path is None else load_weights(path)
    deep = weights is not None and "middle_block.1.transformer_blocks.2.norm1.weight" in weights
    patcher = unet_patcher(weights, seed, DEEP_UNET_CONFIG if deep else UNET_CONFIG)
    patcher.cached_patcher_init = (load_unet, (path, seed))
    return patcher
