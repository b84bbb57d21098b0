"""Fingerprint a model for its profile: its blocks, and its patches."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher
from torch import Tensor

from ...toma_core.profile import Fingerprint
from . import registry
from .blocks import BlockFacts


def blocks_of(model: ModelPatcher, latent: Tensor | None = None) -> list[BlockFacts]:
    """Return the blocks of a model that may be merged, in forward order. latent: (B, C, ..., H, W), for token counts.
    Raises `UnsupportedModelError`."""
    hooks = registry.require(model.get_model_object("diffusion_model"))
    return list(hooks.blocks(torch.empty(1, 1, 64, 64, device="meta") if latent is None else latent))


def fingerprint(model: ModelPatcher) -> Fingerprint:
    """Return facts that distinguish a model from all others but finetunes of its base. Raises
    `UnsupportedModelError`."""
    family = type(registry.require(model.get_model_object("diffusion_model"))).__module__.rpartition(".")[2]
    facts = blocks_of(model)
    blocks = ", ".join(f"{home} {count}" for home, count in Counter(fact.home for fact in facts).items())
    width = ", ".join(dict.fromkeys(str(fact.width) for fact in facts))
    return Fingerprint(family, blocks, width, _noise(model), _patches(model))


def _noise(model: ModelPatcher) -> str:
    """Return what the model predicts, by the name of ComfyUI's class for it, and its highest noise level."""
    sampling = model.get_model_object("model_sampling")
    kind = next((c.__name__ for c in type(sampling).__mro__ if "calculate_denoised" in vars(c)), "unknown")
    return f"{kind} up to {float(sampling.sigma_max):.2g}"


# Values read of each tensor of a LoRA: enough to distinguish two files.
_SAMPLED = 8


def _patches(model: Any) -> str:
    """Return a digest of the weights that LoRAs change and their strengths, in any order; "" without LoRAs."""
    digests = []
    for key, added in (getattr(model, "patches", None) or {}).items():
        for strength, change, of_model, offset, *_ in added:
            facts = f"{key} {strength} {of_model} {offset}".encode()
            digests.append(hashlib.sha256(b" ".join([facts, *_values(change)])).digest())
    return hashlib.sha256(b"".join(sorted(digests))).hexdigest()[:12] if digests else ""


def _values(change: Any) -> Iterator[bytes]:
    """Yield the parts of a patch: the shapes of its tensors and a few values of each, other parts as text."""
    change = getattr(change, "weights", change)
    if isinstance(change, Tensor):
        flat = change.detach().reshape(-1)
        few = flat[:: max(1, len(flat) // _SAMPLED)][:_SAMPLED].float().cpu()
        yield f"{tuple(change.shape)} {few.tolist()}".encode()
    elif isinstance(change, (tuple, list)):
        for part in change:
            yield from _values(part)
    elif isinstance(change, (str, int, float)) or change is None:
        yield repr(change).encode()
    else:
        yield type(change).__qualname__.encode()
