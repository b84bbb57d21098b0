"""Provide helpers for tests of the KV cache: settings, runs, and the inputs of attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from scripts.comfy_pack import pack_module
from testbed import models
from tests.nodes.adapters.families.layouts import HEIGHT, WIDTH

KEYS: dict[str, Any] = {
    "kv_cache": True, "similarity_from": "prediction",
    "selection_interval": 1, "weight_interval": 1, "full_step_interval": 10,
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


# A function that changes the latent before an evaluation: (latent, index of the evaluation) -> latent.
Moves = Callable[[Tensor, int], Tensor]


@torch.no_grad()
def evaluated(
    model: Any, moves: Moves = lambda x, _: x, steps: int = 4, batch: int = 1, text: int = 7, frames: int = 0
) -> list[Tensor]:
    """Return a model's predictions in `steps` evaluations at one sigma. moves: changes the latent before each
    evaluation. Predictions of several streams are packed into one tensor."""
    import comfy.sample
    from comfy.samplers import KSAMPLER

    given: list[Tensor] = []

    def sampler(denoise: Any, x: Tensor, sigmas: Tensor, extra_args: dict[str, Any], **_: Any) -> Tensor:
        for n in range(steps):
            given.append(denoise(moves(x, n), sigmas[n] * x.new_ones(len(x)), **extra_args))
        return x

    latent = models.empty(model, HEIGHT, WIDTH, batch, frames or 1)
    noise, sigmas = comfy.sample.prepare_noise(latent, 5), torch.full((steps + 1,), 0.6)
    conds = [models.conditioning(model, text, seed=seed) for seed in (1, 2)]
    comfy.sample.sample_custom(model, noise, 3.0, KSAMPLER(sampler), sigmas, *conds, latent, seed=5, disable_pbar=True)
    return given


def drifting(x: Tensor, step: int) -> Tensor:
    return x + 0.1 * step * x.flip(-1)


def overridden(model: Any, override: Any) -> Any:
    """Return a clone of a model with another node's attention override."""
    model = model.clone()
    model.model_options["transformer_options"]["optimized_attention_override"] = override
    return model


class Watch:
    """Another node's attention override, which records queries, keys and values, (B, T, C), of each call."""

    def __init__(self, calls: int) -> None:
        self.calls, self.seen = calls, list[tuple[Tensor, Tensor, Tensor]]()

    def on(self, model: Any) -> Any:
        return overridden(model, self)

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
    """Apply ComfyUI's skip layer guidance. It adds a call to every evaluation, after the call of the conditions."""
    from comfy_extras.nodes_slg import SkipLayerGuidanceDiT

    return SkipLayerGuidanceDiT.execute(model, 3.0, 0.0, 1.0, double_layers="2").args[0]
