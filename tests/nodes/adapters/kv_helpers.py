"""Provide helpers for tests of the KV cache: settings, runs, and the inputs of attention."""

from typing import Any

import comfy.sample
import pytest
import torch
from comfy.samplers import KSAMPLER
from torch import Tensor

from scripts.comfy_pack import pack_module
from testbed import models
from tests.nodes.adapters.families.layouts import HEIGHT, WIDTH

KEYS: dict[str, Any] = {
    "kv_cache": True, "selection_interval": 1, "weight_interval": 1, "full_step_interval": 10,
}  # fmt: skip


def failing(monkeypatch: pytest.MonkeyPatch, block: Any, at: int, error: BaseException, times: int = 1) -> None:
    """Make a block raise an error in its call number `at` and in the following calls, `times` calls in all."""
    calls, forward = list[int](), type(block).forward

    def failed(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = forward(self, *args, **kwargs)
        if self is block:
            calls.append(1)
            if at <= len(calls) < at + times:
                raise error
        return out

    monkeypatch.setattr(type(block), "forward", failed)


@torch.no_grad()
def evaluated(model: Any, moves: float = 0.0, batch: int = 1, text: int = 7, frames: int = 0) -> list[Tensor]:
    """Return a model's predictions in four evaluations at one sigma. moves: how much the latent changes from evaluation
    to evaluation. Predictions of several streams are packed into one tensor."""
    given: list[Tensor] = []

    def sampler(denoise: Any, x: Tensor, sigmas: Tensor, extra_args: dict[str, Any], **_: Any) -> Tensor:
        for n in range(4):
            given.append(denoise(x + n * moves * x.flip(-1), sigmas[n] * x.new_ones(len(x)), **extra_args))
        return x

    latent = models.empty(model, HEIGHT, WIDTH, batch, frames or 1)
    noise, sigmas = comfy.sample.prepare_noise(latent, 5), torch.full((5,), 0.6)
    conds = [models.conditioning(model, text, seed=seed) for seed in (1, 2)]
    comfy.sample.sample_custom(model, noise, 3.0, KSAMPLER(sampler), sigmas, *conds, latent, seed=5, disable_pbar=True)
    return given


def overridden(model: Any, override: Any) -> Any:
    """Return a clone of a model with another node's attention override."""
    model = model.clone()
    model.model_options["transformer_options"]["optimized_attention_override"] = override
    return model


class Watch:
    """An attention override of another node. Records the queries, keys and values of each call, each (B, T, C)."""

    def __init__(self, calls: int) -> None:
        self.calls, self.seen = calls, list[tuple[Tensor, Tensor, Tensor]]()

    def __call__(self, function: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        axis = 2 if kwargs.get("skip_reshape") else 1
        self.seen.append(tuple((t.transpose(1, 2) if axis == 2 else t).flatten(2).clone() for t in (q, k, v)))
        return function(q, k, v, *args, **kwargs)

    def evaluations(self) -> list[list[tuple[Tensor, Tensor, Tensor]]]:
        size = len(self.seen) // self.calls
        return [self.seen[n * size : (n + 1) * size] for n in range(self.calls)]


def preset(name: str, **settings: Any) -> Any:
    """Return the settings of a preset, with grids of every size merged."""
    return pack_module("toma_core").UserSettings(name, {"min_tokens": 4, **settings})


def several_calls(model: Any) -> Any:
    """Apply ComfyUI's skip layer guidance. It adds a call of the model to every evaluation, after the usual call."""
    from comfy_extras.nodes_slg import SkipLayerGuidanceDiT

    return SkipLayerGuidanceDiT.execute(model, 3.0, 0.0, 1.0, double_layers="2").args[0]
