"""Models as their checkpoints are: widths, depths, and what they are given. Taken from comfy/model_detection.py, and
where that reads them off the weights, from what is published."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Whole:
    """One model.

    base, kind: its classes in `comfy.model_base` and `comfy.supported_models`. config: what the second is made of.
    depths: the names in it that say how many blocks there are of each kind. few: so many of them as a machine with
    10 GB takes at full width. text: tokens and width of the text: what ComfyUI pads to, else a prompt of a hundred
    tokens or so. pooled: width of the pooled vector, 0 if there is none. channels: of the latent. pixel: side of one of
    its pixels in the picture. video: latents have five dimensions. guidance: it is told one. audio: the shape of a
    second stream beside so many frames of the latent.
    """

    base: str
    kind: str
    config: Mapping[str, Any]
    depths: tuple[str, ...] = ()
    few: tuple[int, ...] = ()
    text: tuple[int, int] = (512, 4096)
    pooled: int = 0
    channels: int = 16
    pixel: int = 8
    video: bool = False
    guidance: bool = False
    audio: Callable[[int], tuple[int, ...]] | None = None

    def at(self, blocks: tuple[int, ...] | None) -> dict[str, Any]:
        """The config with so many blocks of each kind; all of them if None, or if there are no kinds."""
        if blocks is None or not self.depths:
            return dict(self.config)
        return {**self.config, **dict(zip(self.depths, blocks, strict=True))}


_BOTH = ("depth", "depth_single_blocks")
_FLUX1 = {
    "patch_size": 2,
    "context_in_dim": 4096,
    "hidden_size": 3072,
    "mlp_ratio": 4.0,
    "num_heads": 24,
    "depth": 19,
    "depth_single_blocks": 38,
    "axes_dim": [16, 56, 56],
    "theta": 10000,
    "qkv_bias": True,
    "txt_ids_dims": [],
}
_FLUX2 = {
    "image_model": "flux2",
    "in_channels": 128,
    "out_channels": 128,
    "patch_size": 1,
    "vec_in_dim": None,
    "mlp_ratio": 3.0,
    "depth": 8,
    "axes_dim": [32, 32, 32, 32],
    "theta": 2000,
    "qkv_bias": False,
    "ops_bias": False,
    "global_modulation": True,
    "mlp_silu_act": True,
    "default_ref_method": "index",
    "ref_index_scale": 10.0,
    "txt_ids_dims": [3],
}

SDXL = Whole(
    "SDXL",
    "SDXL",
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
    },
    text=(77, 2048),
    pooled=2816,
    channels=4,
)
FLUX = Whole(
    "Flux",
    "Flux",
    {
        **_FLUX1,
        "image_model": "flux",
        "in_channels": 16,
        "out_channels": 16,
        "vec_in_dim": 768,
        "guidance_embed": True,
    },
    _BOTH,
    few=(1, 2),
    pooled=768,
    guidance=True,
)
FLUX2 = Whole(
    "Flux2",
    "Flux2",
    {
        **_FLUX2,
        "context_in_dim": 15360,
        "hidden_size": 6144,
        "num_heads": 48,
        "depth_single_blocks": 48,
        "guidance_embed": True,
    },
    _BOTH,
    few=(1, 1),
    text=(512, 15360),
    channels=128,
    pixel=16,
    guidance=True,
)
KLEIN = Whole(
    "Flux2",
    "Flux2",
    {
        **_FLUX2,
        "context_in_dim": 12288,
        "hidden_size": 4096,
        "num_heads": 32,
        "depth_single_blocks": 24,
        "guidance_embed": False,
    },
    _BOTH,
    few=(1, 2),
    text=(512, 12288),
    channels=128,
    pixel=16,
)
CHROMA = Whole(
    "Chroma",
    "Chroma",
    {
        **_FLUX1,
        "image_model": "chroma",
        "in_channels": 64,
        "out_channels": 64,
        "vec_in_dim": None,
        "in_dim": 64,
        "out_dim": 3072,
        "hidden_dim": 5120,
        "n_layers": 5,
    },
    _BOTH,
    few=(1, 2),
    text=(128, 4096),
    guidance=True,
)
Z_IMAGE = Whole(
    "Lumina2",
    "ZImage",
    {
        "image_model": "lumina2",
        "patch_size": 2,
        "in_channels": 16,
        "dim": 3840,
        "cap_feat_dim": 2560,
        "n_layers": 30,
        "n_refiner_layers": 2,
        "n_heads": 30,
        "n_kv_heads": 30,
        "axes_dims": [32, 48, 48],
        "axes_lens": [1536, 512, 512],
        "rope_theta": 256.0,
        "ffn_dim_multiplier": 8.0 / 3.0,
        "qk_norm": True,
        "z_image_modulation": True,
        "time_scale": 1000.0,
        "pad_tokens_multiple": 32,
    },
    ("n_layers", "n_refiner_layers"),
    few=(3, 0),
    text=(96, 2560),
)
LUMINA2 = Whole(
    "Lumina2",
    "Lumina2",
    {
        "image_model": "lumina2",
        "patch_size": 2,
        "in_channels": 16,
        "dim": 2304,
        "cap_feat_dim": 2304,
        "n_layers": 26,
        "n_refiner_layers": 2,
        "n_heads": 24,
        "n_kv_heads": 8,
        "axes_dims": [32, 32, 32],
        "axes_lens": [300, 512, 512],
        "rope_theta": 10000.0,
        "ffn_dim_multiplier": 4.0,
        "qk_norm": True,
    },
    ("n_layers", "n_refiner_layers"),
    few=(3, 0),
    text=(128, 2304),
)
KREA2 = Whole(
    "Krea2",
    "Krea2",
    {
        "image_model": "krea2",
        "features": 6144,
        "channels": 16,
        "patch": 2,
        "layers": 28,
        "heads": 48,
        "kvheads": 12,
        "txtlayers": 12,
        "txtdim": 2560,
    },
    ("layers",),
    few=(2,),
    text=(128, 12 * 2560),
    video=True,
)
QWEN_IMAGE = Whole(
    "QwenImage",
    "QwenImage",
    {"image_model": "qwen_image", "in_channels": 64, "num_layers": 60},
    ("num_layers",),
    few=(3,),
    text=(100, 3584),
    video=True,
)
SD3 = Whole(
    "SD3",
    "SD3",
    {
        "in_channels": 16,
        "patch_size": 2,
        "out_channels": 16,
        "depth": 38,
        "num_blocks": 38,
        "input_size": None,
        "adm_in_channels": 2048,
        "num_patches": 192 * 192,
        "pos_embed_max_size": 192,
        "pos_embed_scaling_factor": None,
        "qk_norm": "rms",
        "context_embedder_config": {
            "target": "torch.nn.Linear",
            "params": {"in_features": 4096, "out_features": 2432},
        },
    },
    ("num_blocks",),
    few=(3,),
    # 77 of two encoders, then T5's.
    text=(77 + 128, 4096),
    pooled=2048,
)

# The 14B of Wan 2.1, and each of the two of Wan 2.2.
WAN = Whole(
    "WAN21",
    "WAN21_T2V",
    {
        "image_model": "wan2.1",
        "model_type": "t2v",
        "dim": 5120,
        "ffn_dim": 13824,
        "num_heads": 40,
        "num_layers": 40,
    },
    ("num_layers",),
    few=(3,),
    video=True,
)
# LTX-2.3, of 22 billion weights with its connectors; text comes from these, for video and audio.
LTX_AV = Whole(
    "LTXAV",
    "LTXAV",
    {
        "image_model": "ltxav",
        "num_layers": 48,
        "apply_gated_attention": True,
        "cross_attention_adaln": True,
        "caption_proj_before_connector": True,
        "caption_projection_first_linear": False,
        "connector_num_attention_heads": 32,
        "audio_connector_attention_head_dim": 64,
        "audio_connector_num_attention_heads": 32,
        "connector_num_layers": 8,
        "connector_apply_gated_attention": True,
        "rope_type": "split",
        "frequencies_precision": "float64",
        "use_middle_indices_grid": True,
        "causal_temporal_positioning": True,
    },
    ("num_layers",),
    few=(1,),
    text=(1024, 4096 + 2048),
    channels=128,
    pixel=32,
    video=True,
    audio=lambda frames: (8, 8 * frames - 7, 16),  # 25 a second, as there are frames
)
# MiniMax H3 as its pruned checkpoint in int8 is.
H3 = Whole(
    "MiniMaxH3",
    "MiniMaxH3",
    {"image_model": "minimax_h3", "adaln_curve_grid": 1001, "time_embed_dim": 32},
    ("num_layers",),
    few=(2,),
    text=(300, 5376),
    channels=24,
    pixel=16,
    video=True,
    audio=lambda frames: (32, 2, round((max(frames - 2, 0) // 5 * 17 + 5) / 24 * 40)),
)

# By the name of their layout in `models.TRANSFORMERS`; Klein has Flux.2's.
WHOLE: dict[str, Whole] = {
    "sdxl": SDXL,
    "flux": FLUX,
    "flux2": FLUX2,
    "klein": KLEIN,
    "chroma": CHROMA,
    "z_image": Z_IMAGE,
    "lumina2": LUMINA2,
    "krea2": KREA2,
    "qwen_image": QWEN_IMAGE,
    "sd3": SD3,
    "wan": WAN,
    "ltx_av": LTX_AV,
    "h3": H3,
}
# Those that take reference images behind the image; the others have none, or put them elsewhere.
EDITORS = ("flux", "flux2", "klein", "krea2", "qwen_image")
TITLES = {
    "sdxl": "SDXL",
    "flux": "Flux.1",
    "flux2": "Flux.2 dev",
    "klein": "Klein 9B",
    "chroma": "Chroma",
    "z_image": "Z-Image",
    "lumina2": "Lumina 2",
    "krea2": "Krea 2",
    "qwen_image": "Qwen-Image",
    "sd3": "SD3.5 large",
    "wan": "Wan 14B",
    "ltx_av": "LTX-2.3",
    "h3": "MiniMax H3",
}
