"""What is plugged into a node. The page connects wires of one kind, but a prompt sent over the API may hold anything in
their place, and ComfyUI passes it on: here it is refused in words.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..toma_core.fields import ConfigError, shown


def model(value: Any) -> Any:
    """A MODEL. Raises `ConfigError` for anything else, as do the others."""
    return _need("model", value, hasattr(value, "get_model_object"), "a model", "a loader's model output")


def latent(value: Any) -> Any:
    """A LATENT with one picture or more."""
    samples = value.get("samples") if isinstance(value, dict) else None
    return _need("latent", value, isinstance(samples, Tensor) and samples.numel() > 0, "a latent", "an empty latent")


def conditioning(name: str, value: Any) -> Any:
    """A CONDITIONING: pairs of text tokens and options."""
    known = isinstance(value, list) and value and all(isinstance(c, (list, tuple)) and len(c) == 2 for c in value)
    return _need(name, value, bool(known), "a conditioning", "a text encoder's output")


def image(value: Any) -> Any:
    """An IMAGE: (B, H, W, C), C of 3 or 4."""
    known = isinstance(value, Tensor) and value.ndim == 4 and value.shape[-1] in (3, 4)
    return _need("image", value, known, "an image", "VAE Decode's output")


def _need(name: str, value: Any, known: bool, kind: str, source: str) -> Any:
    if known:
        return value
    raise ConfigError(f"ToMA: {name} is {shown(value)}. Allowed: {kind}. Connect {source}.")
