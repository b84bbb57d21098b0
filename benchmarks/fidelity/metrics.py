"""Metrics of a set of pictures against their unmerged counterparts and against real scenes."""

from __future__ import annotations

from typing import Any

import torch
from skimage.metrics import structural_similarity
from torch import Tensor

# Side of a token in pixels, in UNets at the finest resolution with attention. In `few` and `wan` it is smaller.
PIXELS_PER_TOKEN = 4


def relative_error(latent: Tensor, reference: Tensor) -> Tensor:
    """Compute |latent - reference| / |reference| of each latent: (n, ...) -> (n,)."""
    difference = (latent - reference).flatten(1).norm(dim=1)
    return difference / reference.flatten(1).norm(dim=1)


def ssim(image: Tensor, reference: Tensor) -> Tensor:
    """Compute the structural similarity (scikit-image, Gaussian weights as in the original paper). (n, 3, H, W) ->
    (n,)."""
    window: dict[str, Any] = {"gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False}
    pairs = zip(image.clamp(-1, 1).numpy(), reference.clamp(-1, 1).numpy(), strict=True)
    found = (structural_similarity(a, b, channel_axis=0, data_range=2.0, **window) for a, b in pairs)
    return torch.tensor([float(each) for each in found])


def high_frequency_energy(image: Tensor) -> Tensor:
    """Compute the mean squared difference between a picture and its 3 x 3 mean. Blur lowers this energy, residual noise
    raises it. (n, 3, H, W) -> (n,)."""
    smooth = torch.nn.functional.avg_pool2d(image, 3, stride=1)
    return (image[..., 1:-1, 1:-1] - smooth).square().flatten(1).mean(1)


def seam_energy(image: Tensor, window: int, token: int = PIXELS_PER_TOKEN) -> Tensor:
    """Compute the mean squared difference of neighbouring pixels across window borders, and divide it by that across
    token borders inside windows: (n, 3, H, W) -> (n,).

    A value of 1 means that window borders are as smooth as token borders. window: side of a window in tokens. token:
    side of a token in pixels.
    """
    ratios = []
    for steps in (image.diff(dim=-1), image.diff(dim=-2).transpose(-1, -2)):
        energy = steps.square().mean((1, 2))
        edges = torch.arange(1, energy.shape[-1] + 1)
        between = edges % token == 0
        border = edges % (token * window) == 0
        ratios.append(energy[:, border].mean(1) / energy[:, between & ~border].mean(1).clamp_min(1e-12))
    return torch.stack(ratios).mean(0)


def measure(
    image: Tensor, latent: Tensor, twin_image: Tensor, twin_latent: Tensor, window: int, token: int = PIXELS_PER_TOKEN
) -> dict[str, Tensor]:
    """Compute every metric of each picture, as tensors (n,). Energies are divided by the energies of the unmerged
    picture. window: side of a window in tokens. token: side of a token in pixels."""
    return {
        "error": relative_error(latent, twin_latent),
        "ssim": ssim(image, twin_image),
        "detail": high_frequency_energy(image) / high_frequency_energy(twin_image),
        "seams": seam_energy(image, window, token) / seam_energy(twin_image, window, token),
    }
