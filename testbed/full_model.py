"""Full-size models: widths, depths and inputs of the checkpoints. The sizes come from comfy/model_detection.py. If that
file reads a size from the weights, the published size is used."""

from __future__ import annotations

from testbed.full_video import ANIMA, H3, LTX, LTX_AV, WAN
from testbed.model_spec import ModelSpec

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

SDXL = ModelSpec(
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
FLUX = ModelSpec(
    "Flux",
    "Flux",
    {**_FLUX1, "image_model": "flux", "in_channels": 16, "out_channels": 16, "vec_in_dim": 768, "guidance_embed": True},
    _BOTH,
    few=(1, 2),
    text=(256, 4096),
    pooled=768,
    guidance=True,
)
FLUX2 = ModelSpec(
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
KLEIN = ModelSpec(
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
CHROMA = ModelSpec(
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
Z_IMAGE = ModelSpec(
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
LUMINA2 = ModelSpec(
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
KREA2 = ModelSpec(
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
QWEN_IMAGE = ModelSpec(
    "QwenImage",
    "QwenImage",
    {"image_model": "qwen_image", "in_channels": 64, "num_layers": 60},
    ("num_layers",),
    few=(3,),
    text=(100, 3584),
    video=True,
)
QWEN_IMAGE21 = ModelSpec(
    "QwenImage21",
    "QwenImage21",
    {"image_model": "qwen_image21", "num_layers": 32},
    ("num_layers",),
    few=(3,),
    text=(128, 4096),
    channels=64,
    pixel=16,
)
SD3 = ModelSpec(
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
        "context_embedder_config": {"target": "torch.nn.Linear", "params": {"in_features": 4096, "out_features": 2432}},
    },
    ("num_blocks",),
    few=(3,),
    # 77 tokens of two CLIP encoders, then 128 tokens of T5.
    text=(77 + 128, 4096),
    pooled=2048,
)
OMNIGEN2 = ModelSpec(
    "Omnigen2",
    "Omnigen2",
    {
        "image_model": "omnigen2",
        "hidden_size": 2520,
        "num_layers": 32,
        "num_refiner_layers": 2,
        "num_attention_heads": 21,
        "num_kv_heads": 7,
        "axes_dim_rope": [40, 40, 40],
        "axes_lens": [1024, 1664, 1664],
        "text_feat_dim": 2048,
        "timestep_scale": 1000.0,
    },
    ("num_layers", "num_refiner_layers"),
    few=(3, 0),
    text=(128, 2048),
)
# ERNIE-Image, Ideogram 4 and Lens: the defaults of ComfyUI's classes are the sizes of the checkpoints.
ERNIE = ModelSpec(
    "ErnieImage",
    "ErnieImage",
    {"image_model": "ernie"},
    ("num_layers",),
    few=(2,),
    text=(128, 3072),
    channels=128,
    pixel=16,
)
IDEOGRAM = ModelSpec(
    "Ideogram4",
    "Ideogram4",
    {"image_model": "ideogram4"},
    ("num_layers",),
    few=(2,),
    text=(128, 53248),
    channels=128,
    pixel=16,
)
LENS = ModelSpec(
    "Lens", "Lens", {"image_model": "lens"}, ("num_layers",), few=(3,), text=(128, 4 * 2880), channels=128, pixel=16
)

# The keys are names in `models.TRANSFORMERS`, except sdxl and klein. Klein has the layout of Flux.2.
SPECS: dict[str, ModelSpec] = {
    "sdxl": SDXL,
    "flux": FLUX,
    "flux2": FLUX2,
    "klein": KLEIN,
    "chroma": CHROMA,
    "z_image": Z_IMAGE,
    "lumina2": LUMINA2,
    "krea2": KREA2,
    "qwen_image": QWEN_IMAGE,
    "qwen_image21": QWEN_IMAGE21,
    "sd3": SD3,
    "omnigen2": OMNIGEN2,
    "ernie": ERNIE,
    "ideogram": IDEOGRAM,
    "lens": LENS,
    "cosmos": ANIMA,
    "wan": WAN,
    "ltx": LTX,
    "ltx_av": LTX_AV,
    "h3": H3,
}
# Models that append the tokens of reference images to the tokens of the image.
EDITORS = ("flux", "flux2", "klein", "krea2", "qwen_image")
# Models in the tables of benchmarks/results/counts.md, with their titles.
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
    "qwen_image21": "Qwen-Image 2.1",
    "sd3": "SD3.5 large",
    "wan": "Wan 14B",
    "ltx_av": "LTX-2.3",
    "h3": "MiniMax H3",
}
