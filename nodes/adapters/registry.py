"""Which adapter fits a model. A new model family is one module with NAME, matches and Hooks, and one entry here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from ...toma_core import Evaluation, ToMAConfig
from .contract import UnknownError, asking, check, known, warn
from .hooks import HookPair

_FAMILIES = 2
_ADAPTERS: list[Any] = []
with known("the UNet's classes"):
    from . import unet

    _ADAPTERS.append(unet)
with known("the classes of Flux"):
    from . import flux

    _ADAPTERS.append(flux)


class ModelHooks(Protocol):
    """What an adapter keeps for one model."""

    def whole_every(self, config: ToMAConfig) -> int:
        """Of how many steps one runs whole on this kind of model; 0 if none does."""
        ...

    def select(
        self, x: Tensor, evaluation: Evaluation, transformer_options: dict[str, Any], control: Any = None
    ) -> Iterator[HookPair]:
        """The (module, hook) pairs to install while the model is evaluated on the latent x of (B, C, H, W). control:
        what ControlNets add, as ComfyUI hands it to the model."""
        ...

    def places(self) -> Iterator[HookPair]:
        """Every (module, hook) pair that `select` may ever give whose `forward` can be looked at."""
        ...


class _Plain:
    """For a model that is not as this pack knows it: nothing is merged, and the report says why."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def whole_every(self, config: ToMAConfig) -> int:
        return 0

    def select(self, x: Tensor, evaluation: Evaluation, *_: Any) -> Iterator[HookPair]:
        evaluation.run.stats.whole("model", f"unknown to this version: {self.reason}")
        yield from ()

    def places(self) -> Iterator[HookPair]:
        yield from ()


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
            # A family that could not be asked may be this model's: it runs as it did before.
            return None if len(_ADAPTERS) == _FAMILIES else _Plain(type(model).__name__)
        _hooks[model] = _made(adapter, model)
    return _hooks[model]


def _made(adapter: Any, model: nn.Module) -> ModelHooks:
    """The adapter's hooks for the model, if each can stand in for what is there."""
    try:
        with asking(type(model).__name__):
            hooks: ModelHooks = adapter.Hooks(model)
            for module, hook in hooks.places():
                check(module, hook)
            return hooks
    except UnknownError as error:
        warn(error)
        return _Plain(str(error))


def require(diffusion_model: nn.Module) -> None:
    """Raise `UnsupportedModelError` if no adapter knows the model."""
    if find(diffusion_model) is None:
        supported = ", ".join(a.NAME for a in _ADAPTERS)
        raise UnsupportedModelError(
            f"ToMA cannot speed up this model ({type(unwrapped(diffusion_model)).__name__}). Supported: {supported}. "
            "Connect one of these, or bypass the ToMA node."
        )
