"""Small models of videos, some with sound."""

from __future__ import annotations

from typing import Any

import torch

from testbed.models.build import built


def wan(seed: int = 0, *, layers: int = 4, base: str = "WAN21", kind: str = "WAN21_T2V", **extra: Any) -> Any:
    """Wan 2.1: text to video. base, kind: other models of the family, see `built`."""
    config = {
        "image_model": "wan2.1",
        "model_type": "t2v",
        "dim": 48,
        "ffn_dim": 128,
        "num_heads": 2,
        "num_layers": layers,
        "text_dim": 48,
        "freq_dim": 32,
        "dtype": torch.float32,
        **extra,
    }
    return built(base, kind, config, seed)


def hunyuan(
    seed: int = 0,
    *,
    double: int = 3,
    single: int = 3,
    base: str = "HunyuanVideo",
    kind: str = "HunyuanVideo",
    **extra: Any,
) -> Any:
    """HunyuanVideo with a token for each pixel of the latent, as in version 1.5. base, kind: see `built`."""
    config = {
        "image_model": "hunyuan_video",
        "in_channels": 16,
        "out_channels": 16,
        "patch_size": [1, 1, 1],
        "vec_in_dim": 24,
        "context_in_dim": 48,
        "hidden_size": 48,
        "mlp_ratio": 4.0,
        "num_heads": 2,
        "depth": double,
        "depth_single_blocks": single,
        "axes_dim": [8, 8, 8],
        "theta": 256,
        "qkv_bias": True,
        "guidance_embed": True,
        "byt5": False,
        "meanflow": False,
        "use_cond_type_embedding": False,
        "vision_in_dim": None,
        "meanflow_sum": False,
        "dtype": torch.float32,
        **extra,
    }
    return built(base, kind, config, seed)


def ltx(seed: int = 0, *, layers: int = 4, **extra: Any) -> Any:
    """LTX-Video: a token for each pixel of the latent."""
    config = {
        "image_model": "ltxv",
        "in_channels": 128,
        "cross_attention_dim": 48,
        "attention_head_dim": 24,
        "num_attention_heads": 2,
        "caption_channels": 48,
        "num_layers": layers,
        "dtype": torch.float32,
        **extra,
    }
    return built("LTXV", "LTXV", config, seed)


def ltx_av(seed: int = 0, *, layers: int = 4, **extra: Any) -> Any:
    """LTX-2.3: video and audio, gated attention, and text that is also modulated."""
    config = {
        "image_model": "ltxav",
        "in_channels": 128,
        "audio_in_channels": 128,
        "cross_attention_dim": 48,
        "audio_cross_attention_dim": 32,
        "attention_head_dim": 24,
        "num_attention_heads": 2,
        "audio_attention_head_dim": 16,
        "audio_num_attention_heads": 2,
        "caption_channels": 48,
        "num_layers": layers,
        "connector_attention_head_dim": 24,
        "connector_num_attention_heads": 2,
        "audio_connector_attention_head_dim": 16,
        "audio_connector_num_attention_heads": 2,
        "connector_num_layers": 1,
        "rope_type": "split",
        "frequencies_precision": "float64",
        "caption_proj_before_connector": True,
        "cross_attention_adaln": True,
        "apply_gated_attention": True,
        "use_middle_indices_grid": True,
        "causal_temporal_positioning": True,
        "dtype": torch.float32,
        **extra,
    }
    return built("LTXAV", "LTXAV", config, seed)


def h3(seed: int = 0, *, layers: int = 4, **extra: Any) -> Any:
    """MiniMax H3: one stream without a batch; its keys are wider than its tokens."""
    config = {
        "image_model": "minimax_h3",
        "hidden_size": 48,
        "num_layers": layers,
        "token_refiner_num_layers": 1,
        "num_attention_heads": 2,
        "attention_head_dim": 32,
        "ffn_hidden_size": 128,
        "text_dim": 48,
        "timestep_input_dim": 32,
        "time_embed_hidden_size": 48,
        "time_embed_dim": 24,
        "rope_inv_freq_len": 4,
        "dtype": torch.float32,
        **extra,
    }
    model = built("MiniMaxH3", "MiniMaxH3", config, seed)
    network = model.model.diffusion_model
    network.rope.inv_freq.copy_(10000.0 ** -(torch.arange(4) / 4))
    return model
