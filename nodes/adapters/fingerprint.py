"""Name the blocks of a model, and what distinguishes it from models that its profile is not for."""

from __future__ import annotations

from collections import Counter

import torch
from comfy.model_patcher import ModelPatcher
from torch import Tensor

from . import registry
from .blocks import BlockFacts


def blocks_of(model: ModelPatcher, latent: Tensor | None = None) -> list[BlockFacts]:
    """Return the blocks of a model that may be merged, in forward order. latent: (B, C, ..., H, W), for token counts.
    Raises `UnsupportedModelError`."""
    hooks = registry.require(model.get_model_object("diffusion_model"))
    return list(hooks.blocks(torch.empty(1, 1, 64, 64, device="meta") if latent is None else latent))


def fingerprint(model: ModelPatcher) -> str:
    """Return facts that distinguish a model from all others but finetunes of its base: its family, how many blocks of
    which kind, their channels, what it predicts and its highest noise level. Raises `UnsupportedModelError`."""
    facts, hooks = blocks_of(model), registry.require(model.get_model_object("diffusion_model"))
    family = type(hooks).__module__.rpartition(".")[2]
    blocks = ", ".join(f"{home} {count}" for home, count in Counter(fact.home for fact in facts).items())
    width = ", ".join(dict.fromkeys(str(fact.width) for fact in facts))
    sampling = model.get_model_object("model_sampling")
    predicts = next((c.__name__ for c in type(sampling).__mro__ if "calculate_denoised" in vars(c)), "unknown")
    noise = f"{predicts} up to {float(sampling.sigma_max):.2g}"
    return f"{family} with blocks {blocks} of width {width}, noise {noise}"
