"""Which adapter fits a model. A new model family is one module with NAME, matches and Hooks, and one entry here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from ...toma_core import Evaluation
from . import flux, unet
from .hooks import HookPair

_ADAPTERS = (unet, flux)


class ModelHooks(Protocol):
    """What an adapter keeps for one model."""

    def select(
        self, x: Tensor, evaluation: Evaluation, transformer_options: dict[str, Any], control: Any = None
    ) -> Iterator[HookPair]:
        """The (module, hook) pairs to install while the model is evaluated on the latent x of (B, C, H, W). control:
        what ControlNets add, as ComfyUI hands it to the model."""
        ...


class UnsupportedModelError(ValueError):
    """The model is of no known class. The message lists what is supported."""


# Keyed weakly by the model itself: hooks live as long as it does, and no clone can carry another model's modules.
_hooks: WeakKeyDictionary[nn.Module, ModelHooks] = WeakKeyDictionary()


def unwrapped(diffusion_model: nn.Module) -> nn.Module:
    """The model itself where torch.compile has wrapped it."""
    return getattr(diffusion_model, "_orig_mod", diffusion_model)


def find(diffusion_model: nn.Module) -> ModelHooks | None:
    """The hooks for a model, or None if no adapter knows it."""
    model = unwrapped(diffusion_model)
    if model not in _hooks:
        adapter = next((a for a in _ADAPTERS if a.matches(model)), None)
        if adapter is None:
            return None
        _hooks[model] = adapter.Hooks(model)
    return _hooks[model]


def require(diffusion_model: nn.Module) -> None:
    """Raise `UnsupportedModelError` if no adapter knows the model."""
    if find(diffusion_model) is None:
        supported = ", ".join(a.NAME for a in _ADAPTERS)
        raise UnsupportedModelError(
            f"ToMA cannot speed up this model ({type(unwrapped(diffusion_model)).__name__}). Supported: {supported}. "
            "Connect one of these, or bypass the ToMA node."
        )
