"""Check what is connected to a node: a prompt sent over the API may hold anything, and ComfyUI passes it on."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..toma_core.reasons import Message, MessageId
from ..toma_core.settings import ConfigError, shown
from .adapters.streams import first_of_nested


class Input(MessageId):
    """What an input takes, and where it comes from."""

    WRONG = "wrong_input"  # setting, value, kind, source
    MODEL = "a_model"
    LOADER = "loader_output"
    LATENT = "a_latent"
    EMPTY_LATENT = "empty_latent"
    CONDITIONING = "a_conditioning"
    TEXT_ENCODER = "text_encoder_output"
    IMAGE = "an_image"
    VAE_DECODE = "vae_decode_output"


def model(value: Any) -> Any:
    """Return a MODEL. Raises `ConfigError` for anything else, as do the others."""
    return _need("model", value, hasattr(value, "get_model_object"), Input.MODEL(), Input.LOADER())


def latent(value: Any) -> Any:
    """Return a LATENT with one picture or more."""
    samples = first_of_nested(value.get("samples")) if isinstance(value, dict) else None
    return _need(
        "latent", value, isinstance(samples, Tensor) and samples.numel() > 0, Input.LATENT(), Input.EMPTY_LATENT()
    )


def conditioning(name: str, value: Any) -> Any:
    """Return a CONDITIONING: pairs of text tokens and options."""
    known = isinstance(value, list) and value and all(isinstance(c, (list, tuple)) and len(c) == 2 for c in value)
    return _need(name, value, bool(known), Input.CONDITIONING(), Input.TEXT_ENCODER())


def image(value: Any) -> Any:
    """Return an IMAGE: (B, H, W, C), C of 3 or 4."""
    known = isinstance(value, Tensor) and value.ndim == 4 and value.shape[-1] in (3, 4)
    return _need("image", value, known, Input.IMAGE(), Input.VAE_DECODE())


def _need(name: str, value: Any, known: bool, kind: Message, source: Message) -> Any:
    if known:
        return value
    raise ConfigError(Input.WRONG(setting=name, value=shown(value), kind=kind, source=source))
