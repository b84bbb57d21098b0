"""Training objectives of the tiny models, in the conventions of ComfyUI's samplers (comfy/model_sampling.py)."""

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
from .positions import AddPositions, cell_centres
from .scenes import CANVAS, in_phrases, pooled_tokens, scene_tokens

# Side of the picture that ComfyUI passes to SDXL: 8 times the latents' side, which is 64 in training.
NOMINAL_SIZE = 512
# Value of Flux's guidance input for models that do not read the number of steps from it, see `FewStepsObjective`.
UNGUIDED = 3.5
# Standard deviation of the flow's sigmas on the logit scale. `View.centre` is their centre.
SPREAD = 1.4
# Added to `View.centre` for the UNet. The UNet learns the prompt more slowly than the DiT, so it needs larger sigmas.
UNET_CENTRE = 0.9


def _error(prediction: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
    # Padding channels get a tenth of the weight. They are easy to predict, because their clean value is always 0.
    squared = (prediction.float() - target).pow(2)
    squared = (squared if weight is None else squared * weight).movedim(1, 0).flatten(1).mean(1)
    return squared[:PICTURE_CHANNELS].mean() + 0.1 * squared[PICTURE_CHANNELS:].mean()


@dataclass(frozen=True)
class NetworkInput:
    """The input of a network for one batch, in model space."""

    x: torch.Tensor  # (B, 16, ..., h, w)
    sigma: torch.Tensor  # (B,)
    tokens: torch.Tensor  # (B, T, TEXT_DIM)
    steps: torch.Tensor | None  # (B,): number of sampling steps; None for models without this input
    view: View


class FluxCall:
    """Call a Flux network with the arguments that ComfyUI passes."""

    # The noise schedule of the model in ComfyUI.
    model_sampling: Callable[[], Any] = ModelSamplingFlux

    def __call__(self, network: Callable[..., torch.Tensor], given: NetworkInput) -> torch.Tensor:
        """Return the network's prediction, of the shape of `given.x`."""
        return network(
            given.x,
            given.sigma,
            context=given.tokens,
            y=pooled_tokens(given.tokens),
            guidance=torch.full_like(given.sigma, UNGUIDED) if given.steps is None else given.steps,
            transformer_options={"rope_options": given.view.rope_options(given.x.device)},
        )


class WanCall(FluxCall):
    """Call a Wan network. Wan has no input for the number of steps, so an additional token of the prompt encodes it."""

    @staticmethod
    def model_sampling() -> Any:
        sampling = ModelSamplingDiscreteFlow()
        sampling.set_parameters(shift=CLIP_SHIFT)
        return sampling

    def __call__(self, network: Callable[..., torch.Tensor], given: NetworkInput) -> torch.Tensor:
        tokens = given.tokens
        if given.steps is not None:
            tokens = torch.cat([tokens, torch.stack([step_token(int(n)) for n in given.steps]).to(tokens)], 1)
        return network(given.x, 1000 * given.sigma, context=phrased(tokens), transformer_options={})


class FlowObjective:
    """Rectified flow, ComfyUI's CONST: x = sigma * noise + (1 - sigma) * clean, and the model predicts noise -
    clean."""

    def __init__(self, call: FluxCall | None = None) -> None:
        """call: calls the network, by default with the arguments of a Flux."""
        self.call = call or FluxCall()

    def loss(self, network: Callable[..., torch.Tensor], batch: Batch) -> torch.Tensor:
        """Return the mean squared error over a batch."""
        sigma = torch.sigmoid(batch.view.centre + SPREAD * torch.special.ndtri(batch.quantile))
        noise_share = _expanded(sigma, batch.clean)
        x = noise_share * batch.noise + (1 - noise_share) * batch.clean
        prediction = self.call(network, NetworkInput(x, sigma, batch.tokens, None, batch.view))
        return _error(prediction, batch.noise - batch.clean)


def _expanded(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Append dimensions to `values`, which has a number for each batch entry, so that it broadcasts over `x`."""
    return values.reshape(-1, *[1] * (x.ndim - 1))


class FewStepsObjective:
    """Distil a flow model to 4 or 8 Euler steps without guidance, as in progressive distillation (Salimans and Ho 2022)
    and shortcut models (Frans et al. 2024).

    In runs of 8 steps, a step learns the result of two of the teacher's 16 guided steps. In runs of 4 steps, a step
    learns the result of two steps of the model's own run of 8. Flux gets the number of steps as its guidance, in the
    same way as from a FluxGuidance node.
    """

    STEPS = (4, 8)

    def __init__(self, teacher: Callable[..., torch.Tensor], cfg: float, call: FluxCall | None = None) -> None:
        """teacher, cfg: a network that `FlowObjective` trained, and the guidance scale with which it is sampled."""
        self.teacher, self.cfg, self.call = teacher, cfg, call or FluxCall()
        sampling = self.call.model_sampling()
        self.sigmas = {n: calculate_sigmas(sampling, "simple", n) for n in (*self.STEPS, 2 * self.STEPS[-1])}

    def loss(self, network: Callable[..., torch.Tensor], batch: Batch) -> torch.Tensor:
        """Return the mean squared error over a batch. The first half of the batch learns 4 steps, the second half 8."""
        few, many = self.STEPS
        half = len(batch.quantile) // 2
        if 2 * half != len(batch.quantile):
            raise ValueError(f"half of a batch learns {few} steps and half {many}: its size must be even")
        counts = torch.full_like(batch.quantile, float(many))
        counts[:half] = float(few)
        first = self._step_sigmas(batch.quantile[:half], few)
        second = self._step_sigmas(batch.quantile[half:], many)
        start, middle, end = (_expanded(torch.cat(pair), batch.clean) for pair in zip(first, second, strict=True))
        x = start * batch.noise + (1 - start) * batch.clean

        def student(x: torch.Tensor, sigma: torch.Tensor, part: slice, steps: torch.Tensor) -> torch.Tensor:
            return self.call(network, NetworkInput(x, sigma, batch.tokens[part], steps, batch.view))

        def teacher(x: torch.Tensor, sigma: torch.Tensor, part: slice) -> torch.Tensor:
            tokens = batch.tokens[part]
            tokens = torch.cat([tokens, scene_tokens(None)[:1].to(tokens).expand_as(tokens)])
            both = self.call(self.teacher, NetworkInput(torch.cat([x, x]), sigma.repeat(2), tokens, None, batch.view))
            cond, uncond = both.float().chunk(2)
            return uncond + self.cfg * (cond - uncond)

        own, theirs = slice(0, half), slice(half, None)
        with torch.no_grad():

            def velocity(x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
                sigma = sigma.flatten()
                mine = student(x[own], sigma[own], own, torch.full_like(counts[own], float(many)))
                return torch.cat([mine.float(), teacher(x[theirs], sigma[theirs], theirs)])

            first_half = velocity(x, start)
            reached = x + (middle - start) * first_half
            reached = reached + (end - middle) * velocity(reached, middle)
            target = (reached - x) / (end - start)
        return _error(student(x, start.flatten(), slice(None), counts), target)

    def _step_sigmas(self, quantile: torch.Tensor, steps: int) -> tuple[torch.Tensor, ...]:
        """Map each quantile to a step, and return the sigmas of the step's start, middle and end."""
        sigmas, finer = self.sigmas[steps].to(quantile.device), self.sigmas[2 * steps].to(quantile.device)
        index = (quantile * steps).long()
        return sigmas[index], finer[2 * index + 1], sigmas[index + 1]


class VelocityObjective:
    """V-prediction (Salimans and Ho 2022) on SDXL's schedule with zero terminal SNR: ComfyUI's V_PREDICTION and zsnr.

    The model sees (clean + sigma * noise) / sqrt(sigma^2 + 1) and predicts (noise - sigma * clean) / sqrt(sigma^2 + 1).
    SDXL's own schedule ends at sigma 15, where the layout of a scene is still visible through the noise. A model that
    is trained on SDXL's own schedule reads the layout from there and not from the prompt, and cannot start from pure
    noise (Lin et al. 2023, "Common Diffusion Noise Schedules and Sample Steps are Flawed"). With epsilon prediction at
    sigma 15, an error of a hundredth of the noise would be an error of a sixth of the picture.
    """

    def __init__(self, teacher: Callable[..., torch.Tensor] | None = None) -> None:
        """teacher: a network whose predictions are the target, in place of the true velocity."""
        self.sigmas = ModelSamplingDiscrete(zsnr=True).sigmas
        self.positions = AddPositions()
        self.teacher = teacher

    def steps(self, batch: Batch) -> torch.Tensor:
        """Map the quantiles to steps of the schedule, int64 (B,).

        Half-size scenes teach the layout. Their sigmas are distributed as in `FlowObjective`: its sigma s has the same
        signal-to-noise ratio as sigma s / (1 - s) here. Crops teach fine structure, which is drawn at low noise. Their
        steps are uniform, as in SDXL's training. Half of the full pictures have the first distribution, because
        otherwise the model forgets the layout. The other half have the second.
        """
        quantile, as_flow = batch.quantile, torch.tensor(batch.sort == "half")
        if batch.sort == "full":
            as_flow = quantile < 0.5
            quantile = (2 * quantile).remainder(1).clamp(1e-4, 1 - 1e-4)
        log_sigmas, centre = self.sigmas.log(), batch.view.centre + UNET_CENTRE
        low, high = torch.special.ndtr((log_sigmas[[0, -1]] - centre) / SPREAD)
        wanted = centre + SPREAD * torch.special.ndtri(low + (high - low) * quantile)
        flow = torch.searchsorted(log_sigmas, wanted).clamp(max=len(log_sigmas) - 1)
        return torch.where(as_flow.to(flow.device), flow, (quantile * len(log_sigmas)).long())

    def loss(self, network: Callable[..., torch.Tensor], batch: Batch) -> torch.Tensor:
        """See `FlowObjective.loss`. A UNet gets the offset of a crop in two ways: by `AddPositions`, and in `y`, as
        SDXL does."""
        self.sigmas = self.sigmas.to(batch.clean.device)
        step = self.steps(batch)
        sigma = self.sigmas[step][:, None, None, None]
        scale = (sigma**2 + 1).rsqrt()
        height, width = batch.clean.shape[2:]
        # A token of the full grid covers 2 x 2 cells of the latent.
        top, left = (2.0 * value for value in batch.view.offset)
        side = 2 * CANVAS // PIXELS_PER_TOKEN // batch.view.scale
        self.positions.rows = cell_centres(height, top, side, sigma.device)
        self.positions.columns = cell_centres(width, left, side, sigma.device)
        x, target = (batch.clean + sigma * batch.noise) * scale, (batch.noise - sigma * batch.clean) * scale
        y = adm(pooled_tokens(batch.tokens), batch.view, (height * 8, width * 8))
        context = in_phrases(batch.tokens)

        def predict(network: Callable[..., torch.Tensor]) -> torch.Tensor:
            options = {"patches": {"input_block_patch": [self.positions]}}
            return network(x, step.float(), context=context, y=y, transformer_options=options)

        if self.teacher is not None:
            with torch.no_grad():
                target = predict(self.teacher).float()
        return _error(predict(network), target, batch.weight)


def adm(pooled: torch.Tensor, view: View, target: tuple[int, int]) -> torch.Tensor:
    """Build SDXL's `y` as comfy.model_base.SDXL.encode_adm does: (B, TEXT_DIM) -> (B, TEXT_DIM + 6 * 256).

    The numbers are SDXL's: size of the full picture, corner of the crop, size of the crop, each (height, width).
    """
    size = NOMINAL_SIZE // view.scale
    crop = [value * 16 for value in view.offset]
    numbers = torch.tensor([size, size, *crop, *target], dtype=torch.float32, device=pooled.device)
    flat = timestep_embedding(numbers, 256).flatten()
    return torch.cat((pooled, flat.expand(pooled.shape[0], -1)), dim=1)
