"""Provide helpers that tests of several adapters share: presets, prompts, a ControlNet, and runs of a sampler."""

from collections.abc import Callable
from typing import Any

import comfy.sample
import pytest
import torch
from comfy.controlnet import ControlBase
from comfy.patcher_extension import WrappersMP
from torch import Tensor

from scripts.comfy_pack import pack_module
from testbed import models
from tests.loop import loop
from tests.nodes.adapters.kv_helpers import preset

# Runs a test once for each of these models. In the test, the fixture `model` gives the model.
every_kind = loop("kind", ["unet", "flux"])


def balanced(model: Any, name: str = "balanced", **settings: Any) -> Any:
    """Apply the preset `name`, but merge small grids too."""
    return pack_module("nodes.adapters.patch_model").apply_toma(model, preset(name, **settings))


def prompts_of(model: Any, tokens: int = 7, **options: Any) -> dict[str, Any]:
    """Return a positive and a negative prompt with the same options."""
    seeds = {"positive": 1, "negative": 2}
    return {name: models.conditioning(model, tokens, seed, **options) for name, seed in seeds.items()}


def split_calls(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    """Simulate a lack of memory, so that ComfyUI evaluates every condition in a separate call."""
    monkeypatch.setattr(model.model, "memory_required", lambda *_, **__: 1e30)


def split_calls_when(monkeypatch: pytest.MonkeyPatch, merged: Any, splits: Callable[[int], bool]) -> None:
    """In evaluations whose number (from 1) `splits` accepts, make ComfyUI evaluate each condition in a separate call.
    In all other evaluations conditions are joined in one call."""
    evaluations = list[int]()

    def counting(executor: Any, *args: Any, **kwargs: Any) -> Any:
        evaluations.append(1)
        return executor(*args, **kwargs)

    merged.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, "count", counting)
    needed = lambda *_, **__: 1e20 if splits(len(evaluations)) else 0  # noqa: E731
    monkeypatch.setattr(type(merged.model), "memory_required", needed)


class Control(ControlBase):  # type: ignore[misc]
    """A ControlNet without weights. residuals(x, timestep): return the residuals by kind of block, or None. begin:
    share of the noise schedule at which residuals begin."""

    def __init__(self, residuals: Callable[[Tensor, Tensor], dict[str, Any] | None], begin: float = 0.0) -> None:
        super().__init__()
        self.residuals, self.timestep_percent_range = residuals, (begin, 1.0)

    def get_control(self, x: Tensor, t: Tensor, *_: Any) -> Any:
        return self.residuals(x, t) if float(t[0]) <= self.timestep_range[0] else None

    def copy(self) -> Any:
        return self

    def get_models(self) -> list[Any]:
        return []


@torch.no_grad()
def custom_sampled(
    model: Any, sampler: Any, sigmas: Tensor, height: int = 16, width: int = 16, cfg: float = 3.0
) -> Tensor:
    """Sample a latent with a KSAMPLER object and sigmas."""
    latent = models.empty(model, height, width)
    noise, conds = comfy.sample.prepare_noise(latent, 5), prompts_of(model).values()
    out: Tensor = comfy.sample.sample_custom(
        model, noise, cfg, sampler, sigmas, *conds, latent, seed=5, disable_pbar=True
    )
    return out
