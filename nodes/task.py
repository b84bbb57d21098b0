"""Sample for the nodes that measure: one task, one sampling run, one error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import comfy.model_management
import comfy.sample
import comfy.utils
import torch
from comfy.model_patcher import ModelPatcher
from torch import Tensor

from ..toma_core.stats import RunStats
from . import validate_inputs
from .adapters import last_runs
from .adapters.patch_model import attachment_of
from .adapters.streams import first_of_nested


@dataclass(frozen=True)
class Task:
    """What is sampled.

    Attributes:
        positive: Conditioning.
        negative: None to sample without guidance.
        latent: (B, C, H, W) or (B, C, T, H, W) of zeros; of several streams the first.
        cfg: Counts only with a negative.
        noise: None to draw it by the seed, as ComfyUI's samplers do.
        others: Further streams, as the sound of a video, of zeros.
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
    others: tuple[Tensor, ...] = ()

    @classmethod
    def of_inputs(cls, model: Any, positive: Any, negative: Any, latent: Any, *rest: Any) -> Task:
        """Return the task of a node's inputs. Raises `ConfigError` for inputs of another kind."""
        validate_inputs.model(model)
        validate_inputs.conditioning("positive", positive)
        if negative is not None:
            validate_inputs.conditioning("negative", negative)
        samples = validate_inputs.latent(latent)["samples"]
        if getattr(samples, "is_nested", False):
            size, *others = (torch.zeros_like(each) for each in samples.unbind())
            return replace(cls(positive, negative, size, *rest), others=tuple(others))
        size = comfy.sample.fix_empty_latent_channels(
            model, torch.zeros_like(samples), latent.get("downscale_ratio_spacial")
        )
        return cls(positive, negative, size, *rest)

    @property
    def conditions(self) -> int:
        """Number of conditions that the model is evaluated for in every step."""
        return 1 if self.negative is None or self.cfg == 1.0 else 2

    def sample(self, model: ModelPatcher, stepped: Callable[..., None]) -> Tensor:
        """Sample the task with a model. stepped: ComfyUI's callback. Returns the final latent, fp32 on the CPU; of
        several streams the first."""
        # The global generator is left alone.
        generator = torch.Generator().manual_seed(self.seed)
        latents = (self.latent, *self.others)
        noises = [torch.randn(each.shape, generator=generator, dtype=torch.float32) for each in latents]
        if self.noise is not None:
            noises[0] = self.noise
        latent = comfy.sample.sample(
            model,
            _nested([noise.to(self.latent.dtype) for noise in noises]),
            self.steps,
            1.0 if self.negative is None else self.cfg,
            self.sampler,
            self.scheduler,
            self.positive,
            self.positive if self.negative is None else self.negative,
            _nested([torch.zeros_like(each) for each in latents]),
            callback=stepped,
            disable_pbar=True,
            seed=self.seed,
        )
        return first_of_nested(latent).float().cpu()


def last_stats(model: ModelPatcher) -> RunStats | None:
    """Return what the last run of a model merged, None without ToMA."""
    attachment = attachment_of(model)
    return None if attachment is None else last_runs.last(attachment.report_id)


def progress(steps: int) -> Callable[..., None]:
    """Return a callback that advances ComfyUI's progress bar by one of `steps`. It raises ComfyUI's own exception when
    the user cancels."""
    bar = comfy.utils.ProgressBar(steps)

    def advance(*_: Any) -> None:
        comfy.model_management.throw_exception_if_processing_interrupted()
        bar.update(1)

    return advance


def _nested(streams: list[Tensor]) -> Any:
    """Return ComfyUI's latent of several streams, or the only stream."""
    if len(streams) == 1:
        return streams[0]
    from comfy.nested_tensor import NestedTensor  # not in ComfyUI 0.16

    return NestedTensor(streams)


def error(latent: Tensor, unmerged: Tensor) -> float:
    """Return the relative L2 error of a final latent."""
    return float((latent - unmerged).norm() / unmerged.norm().clamp_min(1e-12))
