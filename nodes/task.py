"""What the nodes that measure sample, and how: one task, one sampling run, one error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import comfy.sample
import torch
from comfy.model_patcher import ModelPatcher
from torch import Tensor

from . import validate_inputs


@dataclass(frozen=True)
class Task:
    """What is sampled.

    positive: the conditioning.
    negative: None to sample without guidance.
    latent: (B, C, H, W), or (B, C, T, H, W); zeros.
    cfg: counts only with a negative.
    noise: None to draw it by the seed, as ComfyUI's samplers do.
    """

    positive: Any
    negative: Any
    latent: Tensor
    steps: int
    cfg: float = 4.0
    sampler: str = "euler"
    scheduler: str = "simple"
    seed: int = 0
    noise: Tensor | None = None

    @classmethod
    def of_inputs(cls, model: Any, positive: Any, negative: Any, latent: Any, *rest: Any) -> Task:
        """Make the task of a node's inputs. Raises `ConfigError` for inputs of another kind."""
        validate_inputs.model(model)
        validate_inputs.conditioning("positive", positive)
        if negative is not None:
            validate_inputs.conditioning("negative", negative)
        size = torch.zeros_like(validate_inputs.latent(latent)["samples"])
        size = comfy.sample.fix_empty_latent_channels(model, size, latent.get("downscale_ratio_spacial"))
        return cls(positive, negative, size, *rest)

    @property
    def conditions(self) -> int:
        """How many conditions the model is evaluated for in every step."""
        return 1 if self.negative is None or self.cfg == 1.0 else 2

    def sample(self, model: ModelPatcher, stepped: Callable[..., None]) -> Tensor:
        """Sample the task with a model. stepped: ComfyUI's callback. Returns the final latent, fp32 on the CPU."""
        noise = self.noise
        if noise is None:
            # Without a touch of the generator that others use.
            noise = torch.randn(
                self.latent.shape, generator=torch.Generator().manual_seed(self.seed), dtype=torch.float32
            )
        latent = comfy.sample.sample(
            model,
            noise.to(self.latent.dtype),
            self.steps,
            1.0 if self.negative is None else self.cfg,
            self.sampler,
            self.scheduler,
            self.positive,
            self.positive if self.negative is None else self.negative,
            torch.zeros_like(self.latent),
            callback=stepped,
            disable_pbar=True,
            seed=self.seed,
        )
        return latent.float().cpu()


def error(latent: Tensor, whole: Tensor) -> float:
    """|latent - whole| / |whole| of final latents."""
    return float((latent - whole).norm() / whole.norm().clamp_min(1e-12))
