"""What each tiny model is trained to predict, in the conventions of ComfyUI's samplers (comfy/model_sampling.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from comfy.ldm.modules.diffusionmodules.util import timestep_embedding
from comfy.model_sampling import ModelSamplingDiscrete

from .latents import PICTURE_CHANNELS
from .scenes import pooled_tokens

# ComfyUI tells SDXL the picture's size as 8 x the latent's; a 64 x 64 latent is what the models are trained at.
NOMINAL_SIZE = 512


@dataclass(frozen=True)
class Noising:
    """How noise levels are drawn: sigmoid(normal(centre, spread)) for the flow, uniform timesteps for epsilon."""

    centre: float = 0.4
    spread: float = 1.2


def stratified(count: int, generator: torch.Generator) -> torch.Tensor:
    """One uniform number in each of `count` equal slices of 0..1, float32 of shape (count,), in random order."""
    u = (torch.arange(count) + torch.rand(count, generator=generator)) / count
    return u[torch.randperm(count, generator=generator)].clamp(1e-4, 1 - 1e-4)


def _error(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    # The padding channels are easy (their clean value is always 0) and only have to stay at rest.
    squared = (prediction.float() - target).pow(2).mean(dim=(0, 2, 3))
    return squared[:PICTURE_CHANNELS].mean() + 0.1 * squared[PICTURE_CHANNELS:].mean()


class FlowObjective:
    """Rectified flow as ComfyUI's CONST: x = sigma * noise + (1 - sigma) * clean, the model predicts noise - clean."""

    def loss(
        self,
        network: Callable[..., torch.Tensor],
        clean: torch.Tensor,
        tokens: torch.Tensor,
        offset: tuple[int, int],
        noising: Noising,
        generator: torch.Generator,
    ) -> torch.Tensor:
        """Mean squared error over a batch: clean (B, 16, h, w), tokens (B, T, TEXT_DIM), offset in tokens (y, x)."""
        batch = clean.shape[0]
        quantile = stratified(batch, generator)
        sigma = torch.sigmoid(noising.centre + noising.spread * torch.special.ndtri(quantile)).to(clean.device)
        noise = torch.randn(clean.shape, generator=generator).to(clean.device)
        level = sigma[:, None, None, None]
        # A crop keeps its place in the picture: its positions start at the offset. As tensors, since torch.compile
        # would make a new program for every Python number.
        shift_y, shift_x = (torch.tensor(float(value), device=clean.device) for value in offset)
        options = {"rope_options": {"shift_y": shift_y, "shift_x": shift_x}}
        prediction = network(
            level * noise + (1 - level) * clean,
            sigma,
            context=tokens,
            y=pooled_tokens(tokens),
            guidance=torch.full_like(sigma, 3.5),
            transformer_options=options,
        )
        return _error(prediction, noise - clean)


class EpsilonObjective:
    """Epsilon on SDXL's schedule: the model sees (clean + sigma * noise) / sqrt(sigma^2 + 1) and predicts noise."""

    def __init__(self) -> None:
        self.sigmas = ModelSamplingDiscrete().sigmas

    def loss(
        self,
        network: Callable[..., torch.Tensor],
        clean: torch.Tensor,
        tokens: torch.Tensor,
        offset: tuple[int, int],
        noising: Noising,
        generator: torch.Generator,
    ) -> torch.Tensor:
        """As `FlowObjective.loss`; a UNet finds the place of a crop through `y`, where SDXL carries crop offsets."""
        batch = clean.shape[0]
        step = (stratified(batch, generator) * len(self.sigmas)).long()
        sigma = self.sigmas[step].to(clean.device)[:, None, None, None]
        noise = torch.randn(clean.shape, generator=generator).to(clean.device)
        prediction = network(
            (clean + sigma * noise) / (sigma**2 + 1).sqrt(),
            step.float().to(clean.device),
            context=tokens,
            y=adm(pooled_tokens(tokens), (offset[0] * 16, offset[1] * 16), (clean.shape[2] * 8, clean.shape[3] * 8)),
        )
        return _error(prediction, noise)


def adm(pooled: torch.Tensor, crop: tuple[int, int], target: tuple[int, int]) -> torch.Tensor:
    """SDXL's `y`, as comfy.model_base.SDXL.encode_adm builds it: (B, TEXT_DIM) -> (B, TEXT_DIM + 6 * 256).

    The numbers are SDXL's: size of the whole picture, crop corner, size of the crop, each (height, width).
    """
    numbers = torch.tensor([NOMINAL_SIZE, NOMINAL_SIZE, *crop, *target], dtype=torch.float32, device=pooled.device)
    flat = timestep_embedding(numbers, 256).flatten()
    return torch.cat((pooled, flat.expand(pooled.shape[0], -1)), dim=1)
