"""A small model of every transformer, picture models first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from testbed.models.build import built

# The models by name. A new model is one call of `small`.
TRANSFORMERS: dict[str, Small] = {}
# Keyword of `Small.__call__` for a number of blocks -> possible names of the config's entry for this number.
_COUNTS = {
    "layers": ("num_layers", "n_layers", "num_blocks", "layers", "depth"),
    "double": ("depth",),
    "single": ("depth_single_blocks",),
}


@dataclass(frozen=True)
class Small:
    """A small model: calling it returns a ModelPatcher with random weights."""

    base: str  # name in `comfy.model_base`
    kind: str  # name in `comfy.supported_models`
    config: Mapping[str, Any]  # as ComfyUI finds it in a checkpoint
    finish: Callable[[Any, int], None] | None = None  # sets values that are not parameters, given the seed

    def __call__(self, seed: int = 0, *, base: str = "", kind: str = "", **given: Any) -> Any:
        """Return the model. given: entries of the config, or counts of blocks. base, kind: other classes to use."""
        config = {"dtype": torch.float32, **self.config}
        for name, value in given.items():
            config[next((each for each in _COUNTS.get(name, ()) if each in config), name)] = value
        model = built(base or self.base, kind or self.kind, config, seed)
        if self.finish is not None:
            self.finish(model, seed)
        return model


def small(
    name: str, base: str, kind: str = "", finish: Callable[[Any, int], None] | None = None, **config: Any
) -> Small:
    """Add a model to `TRANSFORMERS` and return it. kind: `base` if not given."""
    model = TRANSFORMERS[name] = Small(base, kind or base, config, finish)
    return model


def _norms(model: Any, seed: int) -> None:
    """Store norms as their difference from 1, as Krea 2 does. Otherwise keys and queries would be so large that each
    token attends to a single token."""
    for name, parameter in model.model.diffusion_model.named_parameters():
        if name.endswith("norm.scale"):
            parameter.data -= 1.0


def _without_cache(model: Any, seed: int) -> None:
    """Switch off ComfyUI's cache of the keys of text and references."""
    model.model_options["transformer_options"]["qwen_image21_cache"] = {"device": "off"}


def _positions(model: Any, seed: int) -> None:
    buffer = model.model.diffusion_model.pos_embed
    buffer.copy_(torch.randn(buffer.shape, generator=torch.Generator().manual_seed(seed)))


def _frequencies(model: Any, seed: int) -> None:
    model.model.diffusion_model.rope.inv_freq.copy_(10000.0 ** -(torch.arange(4) / 4))


# Sizes of models like Flux, and of models whose config has the names that diffusers uses.
_FLUX: dict[str, Any] = {
    **{"context_in_dim": 48, "hidden_size": 48, "mlp_ratio": 4.0, "num_heads": 2, "qkv_bias": True},
    **{"depth": 3, "depth_single_blocks": 3, "axes_dim": [8, 8, 8]},
}
_HEADS: dict[str, Any] = {"num_layers": 4, "num_attention_heads": 2, "attention_head_dim": 24}

# Flux.1.
small(
    "flux",
    "Flux",
    image_model="flux",
    in_channels=16,
    out_channels=16,
    patch_size=2,
    vec_in_dim=24,
    theta=10000,
    guidance_embed=True,
    txt_ids_dims=[],
    **_FLUX,
)

# Flux.2's layout: one modulation for all blocks, a token for each pixel of the latent, four axes of positions.
small(
    "flux2",
    "Flux2",
    image_model="flux2",
    in_channels=128,
    out_channels=128,
    patch_size=1,
    vec_in_dim=None,
    context_in_dim=48,
    hidden_size=64,
    mlp_ratio=3.0,
    num_heads=2,
    depth=2,
    depth_single_blocks=3,
    axes_dim=[8, 8, 8, 8],
    theta=2000,
    qkv_bias=False,
    ops_bias=False,
    guidance_embed=False,
    global_modulation=True,
    mlp_silu_act=True,
    default_ref_method="index",
    ref_index_scale=10.0,
    txt_ids_dims=[3],
)

# Chroma: Flux's blocks, modulated by a separate network.
small(
    "chroma",
    "Chroma",
    image_model="chroma",
    in_channels=64,
    out_channels=64,
    patch_size=2,
    theta=10000,
    in_dim=64,
    out_dim=48,
    hidden_dim=64,
    n_layers=2,
    txt_ids_dims=[],
    vec_in_dim=None,
    **{**_FLUX, "depth": 2},
)

# Z-Image's layout of `NextDiT`: text and image padded to multiples of 32.
small(
    "z_image",
    "Lumina2",
    "ZImage",
    image_model="lumina2",
    patch_size=2,
    in_channels=16,
    dim=256,
    cap_feat_dim=48,
    n_layers=4,
    n_refiner_layers=1,
    n_heads=4,
    n_kv_heads=4,
    axes_dims=[16, 24, 24],
    axes_lens=[64, 64, 64],
    rope_theta=256.0,
    ffn_dim_multiplier=2.0,
    qk_norm=True,
    z_image_modulation=True,
    time_scale=1000.0,
    pad_tokens_multiple=32,
)

# Lumina 2's layout of `NextDiT`: no padding, fewer heads of keys and values than of queries.
small(
    "lumina2",
    "Lumina2",
    "ZImage",
    **{
        **TRANSFORMERS["z_image"].config,
        **{"z_image_modulation": False, "time_scale": 1.0, "pad_tokens_multiple": None},
        **{"dim": 96, "n_kv_heads": 2, "axes_dims": [8, 8, 8]},
    },
)

# OmniGen2: one stream, fewer heads of keys and values than of queries.
small(
    "omnigen2",
    "Omnigen2",
    image_model="omnigen2",
    hidden_size=96,
    num_layers=4,
    num_refiner_layers=1,
    num_attention_heads=4,
    num_kv_heads=2,
    axes_dim_rope=(8, 8, 8),
    text_feat_dim=48,
)

# Krea 2: one stream, fewer heads of keys and values than of queries, latents of five dimensions.
small(
    "krea2",
    "Krea2",
    finish=_norms,
    image_model="krea2",
    features=128,
    tdim=32,
    txtdim=24,
    heads=4,
    kvheads=2,
    multiplier=2,
    layers=4,
    patch=2,
    channels=16,
    txtlayers=2,
    txtheads=2,
    txtkvheads=2,
)

# Qwen-Image: double blocks only, latents of five dimensions.
small(
    "qwen_image",
    "QwenImage",
    image_model="qwen_image",
    in_channels=64,
    joint_attention_dim=48,
    axes_dims_rope=(8, 8, 8),
    **_HEADS,
)

# Qwen-Image 2.1: one stream, the image last; a token per latent pixel; one modulation for all blocks.
small(
    "qwen_image21",
    "QwenImage21",
    finish=_without_cache,
    image_model="qwen_image21",
    context_in_dim=48,
    axes_dims_rope=(8, 8, 8),
    **_HEADS,
)

# ERNIE-Image: one stream that begins with the image, a token for each pixel of the latent.
small(
    "ernie",
    "ErnieImage",
    image_model="ernie",
    hidden_size=64,
    num_attention_heads=2,
    num_layers=4,
    ffn_hidden_size=192,
    text_in_dim=48,
    rope_axes_dim=(8, 12, 12),
)

# Ideogram 4: one stream, a token for each pixel of the latent.
small(
    "ideogram",
    "Ideogram4",
    image_model="ideogram4",
    num_layers=4,
    num_attention_heads=3,
    attention_head_dim=16,
    intermediate_size=128,
    adaln_dim=32,
    llm_features_dim=48,
    mrope_section=(4, 2, 2),
)

# Lens: two streams, the image first, a token for each pixel of the latent.
small("lens", "Lens", image_model="lens", enc_hidden_dim=12, axes_dims_rope=(8, 8, 8), **_HEADS)

# Cosmos-Predict2: tokens in the shape of their grid, not in a row; latents of five dimensions. Only Anima's text
# differs.
small(
    "cosmos",
    "CosmosPredict2",
    "CosmosT2IPredict2",
    image_model="cosmos_predict2",
    max_img_h=240,
    max_img_w=240,
    max_frames=128,
    in_channels=16,
    out_channels=16,
    patch_spatial=2,
    patch_temporal=1,
    model_channels=48,
    num_blocks=4,
    num_heads=2,
    crossattn_emb_channels=48,
    pos_emb_cls="rope3d",
    use_adaln_lora=True,
    adaln_lora_dim=16,
    rope_enable_fps_modulation=False,
)

# SD3: positions are added before the first block.
small(
    "sd3",
    "SD3",
    finish=_positions,
    in_channels=16,
    input_size=None,
    num_patches=1024,
    pos_embed_max_size=32,
    pos_embed_scaling_factor=None,
    depth=2,
    adm_in_channels=24,
    qk_norm="rms",
    # The width of SD3's tokens is 64 times its number of blocks.
    context_embedder_config={"target": "torch.nn.Linear", "params": {"in_features": 48, "out_features": 128}},
)

# Wan 2.1: text to video.
small(
    "wan",
    "WAN21",
    "WAN21_T2V",
    image_model="wan2.1",
    model_type="t2v",
    dim=48,
    ffn_dim=128,
    num_heads=2,
    num_layers=4,
    text_dim=48,
    freq_dim=32,
)

# HunyuanVideo with a token for each pixel of the latent, as in version 1.5.
small(
    "hunyuan",
    "HunyuanVideo",
    image_model="hunyuan_video",
    in_channels=16,
    out_channels=16,
    patch_size=[1, 1, 1],
    vec_in_dim=24,
    theta=256,
    guidance_embed=True,
    byt5=False,
    meanflow=False,
    use_cond_type_embedding=False,
    vision_in_dim=None,
    meanflow_sum=False,
    **_FLUX,
)

# LTX-Video: a token for each pixel of the latent.
small(
    "ltx",
    "LTXV",
    image_model="ltxv",
    in_channels=128,
    cross_attention_dim=48,
    caption_channels=48,
    **_HEADS,
)

# LTX-2.3: video and audio, gated attention, and text that is also modulated.
small(
    "ltx_av",
    "LTXAV",
    audio_in_channels=128,
    audio_cross_attention_dim=32,
    audio_attention_head_dim=16,
    audio_num_attention_heads=2,
    connector_attention_head_dim=24,
    connector_num_attention_heads=2,
    audio_connector_attention_head_dim=16,
    audio_connector_num_attention_heads=2,
    connector_num_layers=1,
    rope_type="split",
    frequencies_precision="float64",
    caption_proj_before_connector=True,
    cross_attention_adaln=True,
    apply_gated_attention=True,
    use_middle_indices_grid=True,
    causal_temporal_positioning=True,
    **{**TRANSFORMERS["ltx"].config, "image_model": "ltxav"},
)

# MiniMax H3: one stream without a batch, and keys wider than tokens.
small(
    "h3",
    "MiniMaxH3",
    finish=_frequencies,
    image_model="minimax_h3",
    hidden_size=48,
    num_layers=4,
    token_refiner_num_layers=1,
    num_attention_heads=2,
    attention_head_dim=32,
    ffn_hidden_size=128,
    text_dim=48,
    timestep_input_dim=32,
    time_embed_hidden_size=48,
    time_embed_dim=24,
    rope_inv_freq_len=4,
)
