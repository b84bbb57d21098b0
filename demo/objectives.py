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
SPREAD = 1.4


@dataclass(frozen=True)
class View:
    """What a batch shows of its scenes.

    offset: corner of a crop in tokens of the whole 32 x 32 grid, (y, x).
    scale: 2 for whole scenes at half the size, each token covering two by two of the whole grid; else 1.
    centre: noise levels of the flow are sigmoid(normal(centre, SPREAD)). Pixels repeat each other, so a scene shows
        through until nearly all is noise, and only there the prompt has to be learnt: hence centres far above 0.
    """

    offset: tuple[int, int] = (0, 0)
    scale: int = 1
    centre: float = 2.0

    def rope_options(self, device: torch.device) -> dict[str, torch.Tensor]:
        """The positions of the tokens as ComfyUI's Flux class takes them.

        As tensors, since torch.compile would make a new program for every Python number. Half-size scenes sit at the
        centres of the tokens they stand for, one step along the time axis.
        """
        values = {
            "shift_y": self.offset[0] + (self.scale - 1) / 2,
            "shift_x": self.offset[1] + (self.scale - 1) / 2,
            "shift_t": self.scale - 1,
            "scale_y": self.scale,
            "scale_x": self.scale,
        }
        return {name: torch.tensor(float(value), device=device) for name, value in values.items()}


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
        view: View,
        generator: torch.Generator,
    ) -> torch.Tensor:
        """Mean squared error over a batch: clean (B, 16, h, w), tokens (B, T, TEXT_DIM)."""
        batch = clean.shape[0]
        quantile = stratified(batch, generator)
        sigma = torch.sigmoid(view.centre + SPREAD * torch.special.ndtri(quantile)).to(clean.device)
        noise = torch.randn(clean.shape, generator=generator).to(clean.device)
        level = sigma[:, None, None, None]
        prediction = network(
            level * noise + (1 - level) * clean,
            sigma,
            context=tokens,
            y=pooled_tokens(tokens),
            guidance=torch.full_like(sigma, 3.5),
            transformer_options={"rope_options": view.rope_options(clean.device)},
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
        view: View,
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
            y=adm(pooled_tokens(tokens), view, (clean.shape[2] * 8, clean.shape[3] * 8)),
        )
        return _error(prediction, noise)


def adm(pooled: torch.Tensor, view: View, target: tuple[int, int]) -> torch.Tensor:
    """SDXL's `y`, as comfy.model_base.SDXL.encode_adm builds it: (B, TEXT_DIM) -> (B, TEXT_DIM + 6 * 256).

    The numbers are SDXL's: size of the whole picture, corner of the crop, size of the crop, each (height, width).
    """
    whole = NOMINAL_SIZE // view.scale
    crop = [value * 16 for value in view.offset]
    numbers = torch.tensor([whole, whole, *crop, *target], dtype=torch.float32, device=pooled.device)
    flat = timestep_embedding(numbers, 256).flatten()
    return torch.cat((pooled, flat.expand(pooled.shape[0], -1)), dim=1)
