"""The fixed, invertible transform between pictures and latents: no VAE, nothing to train.

A picture is pixel-unshuffled by 2 into 12 channels, and padded to the 16 channels of ComfyUI's Flux latent format. So a
128 x 128 picture becomes a 64 x 64 latent. For this latent the Flux DiT (patch 2) has 32 x 32 tokens. The UNet has as
many at its first resolution with attention.

"Model space" is the input of the networks: the pixels themselves, in -1..1, with padding 0. "Latents" are the values of
ComfyUI's LATENT type. ComfyUI converts latents to model space by `latent_format.process_in`, so this module makes
latents by the inverse.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

UNSHUFFLE = 2
LATENT_CHANNELS = 16
PICTURE_CHANNELS = 3 * UNSHUFFLE**2
# Constants of comfy.latent_formats.Flux. A test compares them.
SCALE_FACTOR = 0.3611
SHIFT_FACTOR = 0.1159


def image_to_model(image: torch.Tensor) -> torch.Tensor:
    """Map pictures (B, 3, H, W) in -1..1 to model space (B, 16, H/2, W/2), exactly. H and W must be even."""
    if image.ndim != 4 or image.shape[1] != 3 or image.shape[2] % UNSHUFFLE or image.shape[3] % UNSHUFFLE:
        raise ValueError(f"expected pictures of shape (B, 3, even, even), not {tuple(image.shape)}")
    return F.pad(F.pixel_unshuffle(image, UNSHUFFLE), (0, 0, 0, 0, 0, LATENT_CHANNELS - PICTURE_CHANNELS))


def model_to_image(latent: torch.Tensor) -> torch.Tensor:
    """Map model space (B, 16, h, w) to pictures (B, 3, 2h, 2w). The four padding channels are dropped."""
    if latent.ndim != 4 or latent.shape[1] != LATENT_CHANNELS:
        raise ValueError(f"expected a latent of shape (B, {LATENT_CHANNELS}, h, w), not {tuple(latent.shape)}")
    return F.pixel_shuffle(latent[:, :PICTURE_CHANNELS], UNSHUFFLE)


def clips_to_model(clips: torch.Tensor) -> torch.Tensor:
    """Map clips (B, 3, T, H, W) in -1..1 to model space (B, 16, T, H/2, W/2), frame by frame."""
    frames = image_to_model(clips.movedim(2, 1).flatten(0, 1))
    return frames.unflatten(0, (len(clips), -1)).movedim(1, 2)


def model_to_clips(latent: torch.Tensor) -> torch.Tensor:
    """Map model space (B, 16, T, h, w) to clips (B, 3, T, 2h, 2w), frame by frame."""
    frames = model_to_image(latent.movedim(2, 1).flatten(0, 1))
    return frames.unflatten(0, (len(latent), -1)).movedim(1, 2)


def encode(image: torch.Tensor) -> torch.Tensor:
    """Map pictures (B, 3, H, W) in -1..1 to ComfyUI latents (B, 16, H/2, W/2)."""
    return image_to_model(image) / SCALE_FACTOR + SHIFT_FACTOR


def decode(latent: torch.Tensor) -> torch.Tensor:
    """Map ComfyUI latents (B, 16, h, w) to pictures (B, 3, 2h, 2w), about -1..1, not clamped."""
    return model_to_image((latent - SHIFT_FACTOR) * SCALE_FACTOR)
