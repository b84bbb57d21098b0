"""Check the inputs of a node, because ComfyUI passes on any value from a prompt that was sent over the API."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..toma_core.config import ConfigError, shown
from ..toma_core.reasons import MessageId
from .adapters.streams import first_of_nested


class WrongInput(MessageId):
    """The messages for wrong inputs. A message names the type that the input takes, and what to connect."""

    MODEL = "wrong_model"  # parameters of all four: setting, value
    LATENT = "wrong_latent"
    CONDITIONING = "wrong_conditioning"
    IMAGE = "wrong_image"


def model(value: Any) -> Any:
    """Return the value if it is a MODEL; raise `ConfigError` if not, as every function of this module does."""
    return _need("model", value, hasattr(value, "get_model_object"), WrongInput.MODEL)


def latent(value: Any) -> Any:
    """Return the value if it is a LATENT with at least one picture."""
    samples = first_of_nested(value.get("samples")) if isinstance(value, dict) else None
    known = isinstance(samples, Tensor) and samples.numel() > 0
    return _need("latent", value, known, WrongInput.LATENT)


def conditioning(name: str, value: Any) -> Any:
    """Return the value if it is a CONDITIONING: pairs of text tokens and options."""
    known = isinstance(value, list) and value and all(isinstance(c, (list, tuple)) and len(c) == 2 for c in value)
    return _need(name, value, bool(known), WrongInput.CONDITIONING)


def image(value: Any) -> Any:
    """Return the value if it is an IMAGE: (B, H, W, C) with C = 3 or 4."""
    known = isinstance(value, Tensor) and value.ndim == 4 and value.shape[-1] in (3, 4)
    return _need("image", value, known, WrongInput.IMAGE)


def _need(name: str, value: Any, known: bool, wrong: WrongInput) -> Any:
    if known:
        return value
    raise ConfigError(wrong(setting=name, value=shown(value)))
