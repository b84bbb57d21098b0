"""Small models of pictures."""

from __future__ import annotations

from typing import Any

import torch

from testbed.models.build import built, patcher


def unet(seed: int = 0, *, depths: tuple[int, ...] = (0, 1, 2), middle: int = 2, **extra: Any) -> Any:
    """Return a ModelPatcher around `comfy.model_base.SDXL` on a small `UNetModel`. depths: transformer blocks per
    level. (0, 1, 2) has attention at half and a quarter of the latent's side, as SDXL; (1, 1, 0) starts at full size,
    as SD1.5."""
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


def flux(seed: int = 0, *, double: int = 3, single: int = 3, **extra: Any) -> Any:
    """Return a ModelPatcher around `comfy.model_base.Flux` with these numbers of blocks."""
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
    return built("Flux", "Flux", config, seed)


def flux2(seed: int = 0, *, double: int = 2, single: int = 3, **extra: Any) -> Any:
    """Flux.2's layout: one modulation for all blocks, a token for each pixel of the latent, four axes of positions."""
    config = {
        "image_model": "flux2",
        "in_channels": 128,
        "out_channels": 128,
        "patch_size": 1,
        "vec_in_dim": None,
        "context_in_dim": 48,
        "hidden_size": 64,
        "mlp_ratio": 3.0,
        "num_heads": 2,
        "depth": double,
        "depth_single_blocks": single,
        "axes_dim": [8, 8, 8, 8],
        "theta": 2000,
        "qkv_bias": False,
        "ops_bias": False,
        "guidance_embed": False,
        "global_modulation": True,
        "mlp_silu_act": True,
        "default_ref_method": "index",
        "ref_index_scale": 10.0,
        "txt_ids_dims": [3],
        "dtype": torch.float32,
        **extra,
    }
    return built("Flux2", "Flux2", config, seed)


def chroma(seed: int = 0, *, double: int = 2, single: int = 3, **extra: Any) -> Any:
    """Chroma: Flux's blocks, modulated by a separate network."""
    config = {
        "image_model": "chroma",
        "in_channels": 64,
        "out_channels": 64,
        "patch_size": 2,
        "context_in_dim": 48,
        "hidden_size": 48,
        "mlp_ratio": 4.0,
        "num_heads": 2,
        "depth": double,
        "depth_single_blocks": single,
        "axes_dim": [8, 8, 8],
        "theta": 10000,
        "qkv_bias": True,
        "in_dim": 64,
        "out_dim": 48,
        "hidden_dim": 64,
        "n_layers": 2,
        "txt_ids_dims": [],
        "vec_in_dim": None,
        "dtype": torch.float32,
        **extra,
    }
    return built("Chroma", "Chroma", config, seed)


def z_image(seed: int = 0, *, layers: int = 4, **extra: Any) -> Any:
    """Z-Image's layout of `NextDiT`: text and image padded to multiples of 32."""
    config = {
        "image_model": "lumina2",
        "patch_size": 2,
        "in_channels": 16,
        "dim": 256,  # minimum width of the modulation's input
        "cap_feat_dim": 48,
        "n_layers": layers,
        "n_refiner_layers": 1,
        "n_heads": 4,
        "n_kv_heads": 4,
        "axes_dims": [16, 24, 24],
        "axes_lens": [64, 64, 64],
        "rope_theta": 256.0,
        "ffn_dim_multiplier": 2.0,
        "qk_norm": True,
        "z_image_modulation": True,
        "time_scale": 1000.0,
        "pad_tokens_multiple": 32,
        "dtype": torch.float32,
        **extra,
    }
    return built("Lumina2", "ZImage", config, seed)


def lumina2(seed: int = 0, **extra: Any) -> Any:
    """Lumina 2's layout of `NextDiT`: no padding, fewer keys and values than queries."""
    plain = {"z_image_modulation": False, "time_scale": 1.0, "pad_tokens_multiple": None}
    return z_image(seed, **{**plain, "dim": 96, "n_kv_heads": 2, "axes_dims": [8, 8, 8], **extra})


def omnigen2(seed: int = 0, *, layers: int = 4, **extra: Any) -> Any:
    """OmniGen2: one stream, fewer keys and values than queries."""
    config = {
        "image_model": "omnigen2",
        "hidden_size": 96,
        "num_layers": layers,
        "num_refiner_layers": 1,
        "num_attention_heads": 4,
        "num_kv_heads": 2,
        "axes_dim_rope": (8, 8, 8),
        "text_feat_dim": 48,
        "dtype": torch.float32,
        **extra,
    }
    return built("Omnigen2", "Omnigen2", config, seed)


def krea2(seed: int = 0, *, layers: int = 4, **extra: Any) -> Any:
    """Krea 2: one stream, keys and values in groups, latents of five dimensions."""
    import comfy.model_base
    import comfy.supported_models

    config = {
        "image_model": "krea2",
        "features": 128,
        "tdim": 32,
        "txtdim": 24,
        "heads": 4,
        "kvheads": 2,
        "multiplier": 2,
        "layers": layers,
        "patch": 2,
        "channels": 16,
        "txtlayers": 2,
        "txtheads": 2,
        "txtkvheads": 2,
        "dtype": torch.float32,
        **extra,
    }
    model_config = comfy.supported_models.Krea2(config)
    model = patcher(comfy.model_base.Krea2(model_config, device=torch.device("cpu")), seed)
    for name, parameter in model.model.diffusion_model.named_parameters():
        if name.endswith("norm.scale"):
            parameter.data -= 1.0  # stored as the difference from 1; otherwise each token would attend to one
    return model


def qwen_image(seed: int = 0, *, layers: int = 4, **extra: Any) -> Any:
    """Qwen-Image: double blocks only, latents of five dimensions."""
    config = {
        "image_model": "qwen_image",
        "in_channels": 64,
        "num_layers": layers,
        "attention_head_dim": 24,
        "num_attention_heads": 2,
        "joint_attention_dim": 48,
        "axes_dims_rope": (8, 8, 8),
        "dtype": torch.float32,
        **extra,
    }
    return built("QwenImage", "QwenImage", config, seed)


def qwen_image21(seed: int = 0, *, layers: int = 4, cache: str = "off", **extra: Any) -> Any:
    """Qwen-Image 2.1: one stream that ends with the image, a token for each pixel of the latent, one modulation.

    cache: where ComfyUI caches the keys of text and references, in the words of its node; "auto" without that node.
    """
    config = {
        "image_model": "qwen_image21",
        "num_layers": layers,
        "attention_head_dim": 24,
        "num_attention_heads": 2,
        "context_in_dim": 48,
        "axes_dims_rope": (8, 8, 8),
        "dtype": torch.float32,
        **extra,
    }
    model = built("QwenImage21", "QwenImage21", config, seed)
    model.model_options["transformer_options"]["qwen_image21_cache"] = {"device": cache}
    return model


def ernie(seed: int = 0, *, layers: int = 4, **extra: Any) -> Any:
    """ERNIE-Image: one stream that begins with the image, a token for each pixel of the latent."""
    config = {
        "image_model": "ernie",
        "hidden_size": 64,
        "num_attention_heads": 2,
        "num_layers": layers,
        "ffn_hidden_size": 192,
        "text_in_dim": 48,
        "rope_axes_dim": (8, 12, 12),
        "dtype": torch.float32,
        **extra,
    }
    return built("ErnieImage", "ErnieImage", config, seed)


def ideogram(seed: int = 0, *, layers: int = 4, **extra: Any) -> Any:
    """Ideogram 4: one stream, a token for each pixel of the latent."""
    config = {
        "image_model": "ideogram4",
        "num_layers": layers,
        "num_attention_heads": 3,
        "attention_head_dim": 16,
        "intermediate_size": 128,
        "adaln_dim": 32,
        "llm_features_dim": 48,
        "mrope_section": (4, 2, 2),
        "dtype": torch.float32,
        **extra,
    }
    return built("Ideogram4", "Ideogram4", config, seed)


def lens(seed: int = 0, *, layers: int = 4, **extra: Any) -> Any:
    """Lens: two streams, the image first, a token for each pixel of the latent."""
    config = {
        "image_model": "lens",
        "num_layers": layers,
        "attention_head_dim": 24,
        "num_attention_heads": 2,
        "enc_hidden_dim": 12,  # for each of four layers of the text encoder
        "axes_dims_rope": (8, 8, 8),
        "dtype": torch.float32,
        **extra,
    }
    return built("Lens", "Lens", config, seed)


def cosmos(seed: int = 0, *, layers: int = 4, **extra: Any) -> Any:
    """Cosmos-Predict2: tokens on their grid, latents of five dimensions. Anima differs only in its text."""
    config = {
        "image_model": "cosmos_predict2",
        "max_img_h": 240,
        "max_img_w": 240,
        "max_frames": 128,
        "in_channels": 16,
        "out_channels": 16,
        "patch_spatial": 2,
        "patch_temporal": 1,
        "model_channels": 48,
        "num_blocks": layers,
        "num_heads": 2,
        "crossattn_emb_channels": 48,
        "pos_emb_cls": "rope3d",
        "use_adaln_lora": True,
        "adaln_lora_dim": 16,
        "rope_enable_fps_modulation": False,
        "dtype": torch.float32,
        **extra,
    }
    return built("CosmosPredict2", "CosmosT2IPredict2", config, seed)


def sd3(seed: int = 0, *, layers: int = 2, **extra: Any) -> Any:
    """SD3: positions are added before the first block."""
    config = {
        "in_channels": 16,
        "input_size": None,
        "num_patches": 1024,
        "pos_embed_max_size": 32,
        "pos_embed_scaling_factor": None,
        "depth": layers,
        "adm_in_channels": 24,
        "qk_norm": "rms",
        "context_embedder_config": {
            "target": "torch.nn.Linear",
            "params": {"in_features": 48, "out_features": 64 * layers},
        },
        "dtype": torch.float32,
        **extra,
    }
    model = built("SD3", "SD3", config, seed)
    for name, buffer in model.model.diffusion_model.named_buffers():
        if name == "pos_embed":
            buffer.copy_(torch.randn(buffer.shape, generator=torch.Generator().manual_seed(seed)))
    return model
