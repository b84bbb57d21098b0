"""Full-size video models, and picture models with the layout of a video model, see `full_model`."""

from __future__ import annotations

from testbed.model_spec import ModelSpec

# Wan 2.1 14B, and each of the two models of Wan 2.2.
WAN = ModelSpec(
    "WAN21",
    "WAN21_T2V",
    {"image_model": "wan2.1", "model_type": "t2v", "dim": 5120, "ffn_dim": 13824, "num_heads": 40, "num_layers": 40},
    ("num_layers",),
    few=(3,),
    video=True,
)
# LTX-Video 2B.
LTX = ModelSpec(
    "LTXV",
    "LTXV",
    {"image_model": "ltxv", "num_layers": 28},
    ("num_layers",),
    few=(3,),
    text=(128, 4096),
    channels=128,
    pixel=32,
    video=True,
)
# LTX-2.3, with 22 billion weights including its connectors, which provide the text for video and audio.
LTX_AV = ModelSpec(
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
    audio=lambda frames: (8, 8 * frames - 7, 16),  # the sound has one position for each frame of the decoded video
)
# MiniMax H3 in its pruned int8 checkpoint.
H3 = ModelSpec(
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
# Anima, and the 2B model of Cosmos-Predict2, which has less text.
ANIMA = ModelSpec(
    "Anima",
    "Anima",
    {
        "image_model": "anima",
        "max_img_h": 240,
        "max_img_w": 240,
        "max_frames": 128,
        "in_channels": 16,
        "out_channels": 16,
        "patch_spatial": 2,
        "patch_temporal": 1,
        "model_channels": 2048,
        "num_blocks": 28,
        "num_heads": 16,
        "pos_emb_cls": "rope3d",
        "use_adaln_lora": True,
        "rope_h_extrapolation_ratio": 4.0,
        "rope_w_extrapolation_ratio": 4.0,
        "rope_enable_fps_modulation": False,
    },
    ("num_blocks",),
    few=(3,),
    text=(512, 1024),
    video=True,
)
