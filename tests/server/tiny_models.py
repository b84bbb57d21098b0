"""Provide a node that loads a tiny model in place of the checkpoints of a template.

Diffusion models and the latent upsampler are ComfyUI's own classes with random weights. Text encoders and VAEs, which
do not affect merging, return random numbers of the right shape.
"""

import math
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

sys.path.append(str(Path(__file__).resolve().parents[2]))  # at the end, so that ComfyUI's own folders come first
from testbed import models


def random(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(4))


class Text:
    """A text encoder that returns random numbers."""

    def tokenize(self, text, **_):
        return text

    def encode(self, text):
        return random(1, 7 + len(text) % 5, 48)

    def encode_from_tokens_scheduled(self, tokens, **_):
        return [[self.encode(tokens), {}]]


class Pictures:
    """A stand-in for a VAE. pixel: side of a latent pixel, in pixels of the picture. frames: video frames per latent
    frame, 0 for pictures."""

    def __init__(self, channels, pixel, frames):
        from comfy.ldm.lightricks.vae.causal_video_autoencoder import processor

        self.channels, self.frames = channels, frames
        self.downscale_index_formula = (8, pixel, pixel)
        statistics = processor()
        for buffer in statistics.buffers():
            buffer.fill_(1.0)
        self.first_stage_model = SimpleNamespace(per_channel_statistics=statistics)

    def encode(self, pixels):
        side = self.downscale_index_formula[1]
        time = (1,) if self.frames else ()
        return random(1, self.channels, *time, pixels.shape[1] // side, pixels.shape[2] // side)

    def decode(self, latent):
        return torch.sigmoid(latent[:, :3].movedim(1, -1)).repeat_interleave(self.frames or 1, 1)

    def decode_tiled(self, latent, **_):
        return self.decode(latent)

    def temporal_compression_decode(self):
        return 8

    def spacial_compression_decode(self):
        return self.downscale_index_formula[1]


class Sound:
    """A stand-in for the VAE of a sound, with 25 latent frames per second."""

    latent_channels = 8
    audio_sample_rate = 8000
    first_stage_model = SimpleNamespace(
        latent_frequency_bins=16,
        output_sample_rate=8000,
        num_of_latents_from_frames=lambda frames, rate: math.ceil(frames / rate * 25),
    )

    def decode(self, latent):
        return torch.tanh(random(1, 320 * latent.shape[-1], 2))


# Model -> the arguments of its `Pictures`.
PICTURES = {"ltx_av": (128, 32, 4), "h3": (24, 16, 4), "qwen_image21": (64, 16, 0)}


class TinyTemplateModel:
    """Loads a tiny LTX-2, MiniMax H3 or Qwen-Image 2.1, with the VAEs, text encoder and upsampler that the model's
    graph needs."""

    RETURN_TYPES = ("MODEL", "CLIP", "VAE", "VAE", "LATENT_UPSCALE_MODEL")
    FUNCTION, CATEGORY = "load", "tests"
    INPUT_TYPES = classmethod(lambda cls: {"required": {"kind": (list(PICTURES),)}})

    def load(self, kind):
        import comfy.model_patcher
        import comfy.ops
        from comfy.ldm.lightricks.latent_upsampler import LatentUpsampler

        config = {"in_channels": 128, "mid_channels": 32, "num_blocks_per_stage": 1, "dims": 3}
        upsampler = LatentUpsampler.from_config(config, operations=comfy.ops.disable_weight_init)
        for parameter in upsampler.parameters():
            parameter.data = random(*parameter.shape) / max(1, parameter[0].numel()) ** 0.5
            parameter.requires_grad_(False)
        cpu = torch.device("cpu")
        upsampler = comfy.model_patcher.ModelPatcher(upsampler, load_device=cpu, offload_device=cpu)
        model = getattr(models, kind)()
        # Remove the tiny model's choice for this cache, because a node of the template makes the choice.
        model.model_options["transformer_options"].pop("qwen_image21_cache", None)
        return model, Text(), Pictures(*PICTURES[kind]), Sound(), upsampler


NODE_CLASS_MAPPINGS = {"TinyTemplateModel": TinyTemplateModel}
