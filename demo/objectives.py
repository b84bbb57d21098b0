"""What each tiny model is trained to predict, in the conventions of ComfyUI's samplers (comfy/model_sampling.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from comfy.ldm.modules.diffusionmodules.util import timestep_embedding
from comfy.model_sampling import ModelSamplingDiscrete, ModelSamplingDiscreteFlow, ModelSamplingFlux
from comfy.samplers import calculate_sigmas

from .clips import phrased, step_token
from .data import PIXELS_PER_TOKEN, Batch, View
from .latents import PICTURE_CHANNELS
from .models import CLIP_SHIFT
from .positions import AddPositions, places
from .scenes import CANVAS, in_phrases, pooled_tokens, scene_tokens

# ComfyUI tells SDXL the picture's size as 8 x the latent's; a 64 x 64 latent is what the models are trained at.
NOMINAL_SIZE = 512
# In the place of Flux's guidance while that means nothing, see `FewStepsObjective`.
UNGUIDED = 3.5
# Of the noise levels of the flow, on the logit scale; `View.centre` says around which level.
SPREAD = 1.4
# The UNet learns the prompt more slowly, so it sees more of what is nearly noise.
UNET_CENTRE = 0.9


def _error(prediction: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
    # The padding channels are easy (their clean value is always 0) and only have to stay at rest.
    squared = (prediction.float() - target).pow(2)
    squared = (squared if weight is None else squared * weight).movedim(1, 0).flatten(1).mean(1)
    return squared[:PICTURE_CHANNELS].mean() + 0.1 * squared[PICTURE_CHANNELS:].mean()


@dataclass(frozen=True)
class Question:
    """What a network is asked for a batch, in model space.

    x: (B, 16, ..., h, w). sigma: (B,). tokens: (B, T, TEXT_DIM). told: (B,), how many steps there are, None where that
    means nothing. view: what is seen of the scenes.
    """

    x: torch.Tensor
    sigma: torch.Tensor
    tokens: torch.Tensor
    told: torch.Tensor | None
    view: View


class Asked:
    """How a network is asked, as ComfyUI asks it: Flux's kind, here."""

    # Where a step of a few lies, and what it is sampled with.
    levels: Callable[[], Any] = ModelSamplingFlux

    def __call__(self, network: Callable[..., torch.Tensor], given: Question) -> torch.Tensor:
        """The network's answer, as `given.x` is."""
        return network(
            given.x,
            given.sigma,
            context=given.tokens,
            y=pooled_tokens(given.tokens),
            guidance=torch.full_like(given.sigma, UNGUIDED) if given.told is None else given.told,
            transformer_options={"rope_options": given.view.rope_options(given.x.device)},
        )


class AskedWan(Asked):
    """Wan has no input for how many steps there are: it is one more token of the prompt."""

    @staticmethod
    def levels() -> Any:
        levels = ModelSamplingDiscreteFlow()
        levels.set_parameters(shift=CLIP_SHIFT)
        return levels

    def __call__(self, network: Callable[..., torch.Tensor], given: Question) -> torch.Tensor:
        """See `Asked`."""
        tokens = given.tokens
        if given.told is not None:
            tokens = torch.cat([tokens, torch.stack([step_token(int(each)) for each in given.told]).to(tokens)], 1)
        return network(given.x, 1000 * given.sigma, context=phrased(tokens), transformer_options={})


class FlowObjective:
    """Rectified flow as ComfyUI's CONST: x = sigma * noise + (1 - sigma) * clean, the model predicts noise - clean."""

    def __init__(self, asked: Asked | None = None) -> None:
        """asked: how the network is asked, by default as Flux."""
        self.asked = asked or Asked()

    def loss(self, network: Callable[..., torch.Tensor], batch: Batch) -> torch.Tensor:
        """Mean squared error over a batch."""
        sigma = torch.sigmoid(batch.view.centre + SPREAD * torch.special.ndtri(batch.quantile))
        level = _beside(sigma, batch.clean)
        x = level * batch.noise + (1 - level) * batch.clean
        prediction = self.asked(network, Question(x, sigma, batch.tokens, None, batch.view))
        return _error(prediction, batch.noise - batch.clean)


def _beside(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """One value for each of a batch, to be multiplied with it."""
    return values.reshape(-1, *[1] * (x.ndim - 1))


class FewStepsObjective:
    """A flow that gets there in 4 or 8 steps of Euler without guidance, taught by one that needs more of them and
    guidance: as progressive distillation (Salimans and Ho 2022) and shortcut models (Frans et al. 2024) do it.

    One step of 8 is taught to be two of the teacher's 16, guidance and all; one step of 4 to be two of the model's own
    8. How many steps there are a Flux is told in the place of its guidance, as a FluxGuidance node sets it.
    """

    STEPS = (4, 8)

    def __init__(self, teacher: Callable[..., torch.Tensor], cfg: float, asked: Asked | None = None) -> None:
        """teacher: a network that `FlowObjective` trained, and the guidance that it is sampled with."""
        self.teacher, self.cfg, self.asked = teacher, cfg, asked or Asked()
        levels = self.asked.levels()
        self.sigmas = {n: calculate_sigmas(levels, "simple", n) for n in (*self.STEPS, 2 * self.STEPS[-1])}

    def loss(self, network: Callable[..., torch.Tensor], batch: Batch) -> torch.Tensor:
        """Mean squared error over a batch, half of which is taught each number of steps."""
        few, many = self.STEPS
        half = len(batch.quantile) // 2
        if 2 * half != len(batch.quantile):
            raise ValueError(f"half of a batch is taught {few} steps and half {many}: its size must be even")
        told = torch.full_like(batch.quantile, float(many))
        told[:half] = float(few)
        first = self._places(batch.quantile[:half], few)
        second = self._places(batch.quantile[half:], many)
        start, middle, end = (_beside(torch.cat(pair), batch.clean) for pair in zip(first, second, strict=True))
        x = start * batch.noise + (1 - start) * batch.clean

        def student(x: torch.Tensor, sigma: torch.Tensor, part: slice, told: torch.Tensor) -> torch.Tensor:
            return self.asked(network, Question(x, sigma, batch.tokens[part], told, batch.view))

        def teacher(x: torch.Tensor, sigma: torch.Tensor, part: slice) -> torch.Tensor:
            tokens = batch.tokens[part]
            tokens = torch.cat([tokens, scene_tokens(None)[:1].to(tokens).expand_as(tokens)])
            both = self.asked(self.teacher, Question(torch.cat([x, x]), sigma.repeat(2), tokens, None, batch.view))
            asked, free = both.float().chunk(2)
            return free + self.cfg * (asked - free)

        own, theirs = slice(0, half), slice(half, None)
        with torch.no_grad():

            def velocity(x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
                sigma = sigma.flatten()
                mine = student(x[own], sigma[own], own, torch.full_like(told[own], float(many)))
                return torch.cat([mine.float(), teacher(x[theirs], sigma[theirs], theirs)])

            first_half = velocity(x, start)
            reached = x + (middle - start) * first_half
            reached = reached + (end - middle) * velocity(reached, middle)
            target = (reached - x) / (end - start)
        return _error(student(x, start.flatten(), slice(None), told), target)

    def _places(self, quantile: torch.Tensor, steps: int) -> tuple[torch.Tensor, ...]:
        """Where a step drawn by a quantile begins, has its middle, and ends."""
        sigmas, finer = self.sigmas[steps].to(quantile.device), self.sigmas[2 * steps].to(quantile.device)
        place = (quantile * steps).long()
        return sigmas[place], finer[2 * place + 1], sigmas[place + 1]


class VelocityObjective:
    """V-prediction (Salimans and Ho 2022) on SDXL's schedule down to zero signal, as ComfyUI's V_PREDICTION and zsnr.

    The model sees (clean + sigma * noise) / sqrt(sigma^2 + 1) and predicts (noise - sigma * clean) / sqrt(sigma^2 + 1).
    With epsilon, at sigma 15, an error of a hundredth of the noise is a sixth of the picture. And at sigma 15, where
    SDXL's own schedule ends, a scene's layout still shows through the noise: a model that learns there reads it off the
    noise and not off the prompt, and so cannot begin with noise alone (Lin et al. 2023, "Common Diffusion Noise
    Schedules and Sample Steps are Flawed").
    """

    def __init__(self, teacher: Callable[..., torch.Tensor] | None = None) -> None:
        """teacher: a network whose answers are learnt, in place of what lies in the noise."""
        self.sigmas = ModelSamplingDiscrete(zsnr=True).sigmas
        self.positions = AddPositions()
        self.teacher = teacher

    def steps(self, batch: Batch) -> torch.Tensor:
        """The quantiles as steps of the schedule, int64 (B,).

        Half-size scenes, which teach where things are, are seen at levels like those of `FlowObjective`: a flow's
        level s shows the picture as clearly as sigma = s / (1 - s) does here. Crops are
        seen at all steps alike, as SDXL was: fine structure is drawn at low noise. Whole pictures are half the one and
        half the other: without the first, the places that half-size scenes taught are lost again.
        """
        quantile, as_flow = batch.quantile, torch.tensor(batch.sort == "half")
        if batch.sort == "full":
            as_flow = quantile < 0.5
            quantile = (2 * quantile).remainder(1).clamp(1e-4, 1 - 1e-4)
        levels, centre = self.sigmas.log(), batch.view.centre + UNET_CENTRE
        low, high = torch.special.ndtr((levels[[0, -1]] - centre) / SPREAD)
        wanted = centre + SPREAD * torch.special.ndtri(low + (high - low) * quantile)
        flow = torch.searchsorted(levels, wanted).clamp(max=len(levels) - 1)
        return torch.where(as_flow.to(flow.device), flow, (quantile * len(levels)).long())

    def loss(self, network: Callable[..., torch.Tensor], batch: Batch) -> torch.Tensor:
        """As `FlowObjective.loss`; a UNet is told the place of a crop by its positions and, as SDXL is, through `y`."""
        self.sigmas = self.sigmas.to(batch.clean.device)
        step = self.steps(batch)
        sigma = self.sigmas[step][:, None, None, None]
        scale = (sigma**2 + 1).rsqrt()
        height, width = batch.clean.shape[2:]
        # A token of the whole grid is two by two in the latent.
        top, left = (2.0 * value for value in batch.view.offset)
        whole = 2 * CANVAS // PIXELS_PER_TOKEN // batch.view.scale
        self.positions.rows = places(height, top, whole, sigma.device)
        self.positions.columns = places(width, left, whole, sigma.device)
        x, target = (batch.clean + sigma * batch.noise) * scale, (batch.noise - sigma * batch.clean) * scale
        y = adm(pooled_tokens(batch.tokens), batch.view, (height * 8, width * 8))
        context = in_phrases(batch.tokens)

        def answer(network: Callable[..., torch.Tensor]) -> torch.Tensor:
            options = {"patches": {"input_block_patch": [self.positions]}}
            return network(x, step.float(), context=context, y=y, transformer_options=options)

        if self.teacher is not None:
            with torch.no_grad():
                target = answer(self.teacher).float()
        return _error(answer(network), target, batch.weight)


def adm(pooled: torch.Tensor, view: View, target: tuple[int, int]) -> torch.Tensor:
    """SDXL's `y`, as comfy.model_base.SDXL.encode_adm builds it: (B, TEXT_DIM) -> (B, TEXT_DIM + 6 * 256).

    The numbers are SDXL's: size of the whole picture, corner of the crop, size of the crop, each (height, width).
    """
    whole = NOMINAL_SIZE // view.scale
    crop = [value * 16 for value in view.offset]
    numbers = torch.tensor([whole, whole, *crop, *target], dtype=torch.float32, device=pooled.device)
    flat = timestep_embedding(numbers, 256).flatten()
    return torch.cat((pooled, flat.expand(pooled.shape[0], -1)), dim=1)
