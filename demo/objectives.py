"""What each tiny model is trained to predict, in the conventions of ComfyUI's samplers (comfy/model_sampling.py)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from comfy.ldm.modules.diffusionmodules.util import timestep_embedding
from comfy.model_sampling import ModelSamplingDiscrete

from .data import Batch, View
from .latents import PICTURE_CHANNELS
from .scenes import pooled_tokens

# ComfyUI tells SDXL the picture's size as 8 x the latent's; a 64 x 64 latent is what the models are trained at.
NOMINAL_SIZE = 512
# Of the noise levels of the flow, on the logit scale; `View.centre` says around which level.
SPREAD = 1.4


def _error(prediction: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | float = 1.0) -> torch.Tensor:
    # The padding channels are easy (their clean value is always 0) and only have to stay at rest.
    squared = (weight * (prediction.float() - target).pow(2)).mean(dim=(0, 2, 3))
    return squared[:PICTURE_CHANNELS].mean() + 0.1 * squared[PICTURE_CHANNELS:].mean()


class FlowObjective:
    """Rectified flow as ComfyUI's CONST: x = sigma * noise + (1 - sigma) * clean, the model predicts noise - clean."""

    def loss(self, network: Callable[..., torch.Tensor], batch: Batch) -> torch.Tensor:
        """Mean squared error over a batch."""
        sigma = torch.sigmoid(batch.view.centre + SPREAD * torch.special.ndtri(batch.quantile))
        level = sigma[:, None, None, None]
        prediction = network(
            level * batch.noise + (1 - level) * batch.clean,
            sigma,
            context=batch.tokens,
            y=pooled_tokens(batch.tokens),
            guidance=torch.full_like(sigma, 3.5),
            transformer_options={"rope_options": batch.view.rope_options(sigma.device)},
        )
        return _error(prediction, batch.noise - batch.clean)


class EpsilonObjective:
    """Epsilon on SDXL's schedule: the model sees (clean + sigma * noise) / sqrt(sigma^2 + 1) and predicts noise."""

    def __init__(self) -> None:
        self.sigmas = ModelSamplingDiscrete().sigmas

    def loss(self, network: Callable[..., torch.Tensor], batch: Batch) -> torch.Tensor:
        """As `FlowObjective.loss`; a UNet finds the place of a crop through `y`, where SDXL carries crop offsets."""
        self.sigmas = self.sigmas.to(batch.clean.device)
        step = (batch.quantile * len(self.sigmas)).long()
        sigma = self.sigmas[step][:, None, None, None]
        height, width = batch.clean.shape[2:]
        prediction = network(
            (batch.clean + sigma * batch.noise) / (sigma**2 + 1).sqrt(),
            step.float(),
            context=batch.tokens,
            y=adm(pooled_tokens(batch.tokens), batch.view, (height * 8, width * 8)),
        )
        # An error in the noise counts sigma-fold in the picture. Without the weight the first steps of sampling, at
        # sigma 15, were lost: a hundredth of the noise left out is a fifth of the picture's range.
        return _error(prediction, batch.noise, 1 + sigma**2)


def adm(pooled: torch.Tensor, view: View, target: tuple[int, int]) -> torch.Tensor:
    """SDXL's `y`, as comfy.model_base.SDXL.encode_adm builds it: (B, TEXT_DIM) -> (B, TEXT_DIM + 6 * 256).

    The numbers are SDXL's: size of the whole picture, corner of the crop, size of the crop, each (height, width).
    """
    whole = NOMINAL_SIZE // view.scale
    crop = [value * 16 for value in view.offset]
    numbers = torch.tensor([whole, whole, *crop, *target], dtype=torch.float32, device=pooled.device)
    flat = timestep_embedding(numbers, 256).flatten()
    return torch.cat((pooled, flat.expand(pooled.shape[0], -1)), dim=1)
