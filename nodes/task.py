"""Run the sampling tasks of Benchmark and Calibrate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import comfy.sample
import comfy.utils
import torch
from comfy.model_patcher import ModelPatcher
from torch import Tensor

from . import validate_inputs
from .adapters.streams import first_of_nested

OnRun = Callable[[int, int], None]  # called when a run begins, with its number, from 1, and the count of runs


@dataclass(frozen=True)
class Task:
    """The inputs of one sampling run."""

    positive: Any  # conditioning
    negative: Any  # None to sample without guidance
    latent: Any  # zeros, (B, C, H, W) or (B, C, T, H, W), or ComfyUI's `NestedTensor` of several streams
    steps: int
    cfg: float = 4.0  # used only with a negative conditioning
    sampler_name: str = "euler"
    scheduler: str = "simple"
    noise: Tensor | None = None  # if None, noise is drawn from seed 0, as ComfyUI's samplers do

    @classmethod
    def of_inputs(cls, model: Any, positive: Any, latent: Any, negative: Any = None, **sampler: Any) -> Task:
        """Return the task of a node's inputs. sampler: the other fields. Raises `ConfigError` for a wrong input."""
        validate_inputs.model(model)
        validate_inputs.conditioning("positive", positive)
        if negative is not None:
            validate_inputs.conditioning("negative", negative)
        samples = validate_inputs.latent(latent)["samples"]
        if samples.is_nested:
            zeros = type(samples)([torch.zeros_like(stream) for stream in samples.unbind()])
        else:
            downscale = latent.get("downscale_ratio_spacial")
            zeros = comfy.sample.fix_empty_latent_channels(model, torch.zeros_like(samples), downscale)
        return cls(positive, negative, zeros, **sampler)

    @property
    def conditions(self) -> int:
        """Number of conditions for which the model is evaluated in every step."""
        return 1 if self.negative is None or self.cfg == 1.0 else 2

    def sample(self, model: ModelPatcher, stepped: Callable[..., None]) -> Tensor:
        """Sample; return the final latent (or its first stream), fp32 on the CPU. stepped: called after each step."""
        with torch.random.fork_rng(devices=()):  # restores the global generator, which ComfyUI seeds here
            noise = comfy.sample.prepare_noise(self.latent, 0) if self.noise is None else self.noise
        cfg, negative = (1.0, self.positive) if self.negative is None else (self.cfg, self.negative)
        how = self.steps, cfg, self.sampler_name, self.scheduler
        inputs = self.positive, negative, self.latent
        latent = comfy.sample.sample(model, noise, *how, *inputs, callback=stepped, disable_pbar=True, seed=0)
        return first_of_nested(latent).float().cpu()


def progress(steps: int) -> Callable[..., None]:
    """Return a callback that advances ComfyUI's progress bar, which has `steps` steps, by one step."""
    bar = comfy.utils.ProgressBar(steps)
    return lambda *_: bar.update(1)


def error(latent: Tensor, unmerged: Tensor) -> float:
    """Return the relative L2 error of a final latent against the final latent of an unmerged run."""
    return float((latent - unmerged).norm() / unmerged.norm().clamp_min(1e-12))
