"""Find the family of a model, and describe models by properties in which they differ.

To add a family, add its file in `families` and its import in this module. The file defines:

NAME     name of the family, as users read it
MODEL    ComfyUI's class
fits     whether a model of the class belongs to the family; without this function all models do
DERIVED  names of supported classes that ComfyUI derives from MODEL, and of MODEL if it is derived itself
Hooks    see `family`
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from comfy.model_patcher import ModelPatcher
from torch import Tensor, nn

from ...toma_core import Evaluation
from ...toma_core.presets import ModelKind
from ...toma_core.reasons import MessageError, MessageId, Reason
from .compat import UnsupportedApiError, check, require_api, warn
from .family import BlockFacts, ModelHooks
from .model_hooks import HookPair
from .origin import kinds_of, unwrapped

# Families that could not be imported, because this ComfyUI's classes differ from those that this pack knows.
_unavailable: list[str] = []


@contextmanager
def _of(family: str) -> Iterator[None]:
    """Log a warning if the import of a family fails, except in a ComfyUI that is older than the family's models."""
    try:
        with require_api(f"the classes of {family}"):
            yield
    except UnsupportedApiError as error:
        if not isinstance(error.__cause__, ModuleNotFoundError):
            _unavailable.append(family)
            warn(error)


# The imports are written out, so that they can be read and searched.
with _of("UNets"):
    from .families import unet
with _of("Flux"):
    from .families import flux
with _of("Chroma"):
    from .families import chroma
with _of("Z-Image"):
    from .families import lumina
with _of("OmniGen2"):
    from .families import omnigen
with _of("Krea 2"):
    from .families import krea
with _of("Qwen-Image"):
    from .families import qwen
with _of("Qwen-Image 2.1"):
    from .families import qwen21
with _of("ERNIE-Image"):
    from .families import ernie
with _of("Ideogram 4"):
    from .families import ideogram
with _of("Lens"):
    from .families import lens
with _of("SD3"):
    from .families import sd3
with _of("Cosmos-Predict2"):
    from .families import cosmos
with _of("Wan"):
    from .families import wan
with _of("HunyuanVideo"):
    from .families import hunyuan
with _of("LTX"):
    from .families import ltx
with _of("MiniMax H3"):
    from .families import h3

# In the order of the imports, which is also the order of the names that users read.
_FAMILIES: list[Any] = [each for each in list(globals().values()) if hasattr(each, "Hooks")]


class _Unmerged(ModelHooks):
    """Hooks of a model in which nothing is merged, because its class differs from the class that this pack knows."""

    takes_frames = True
    kind = ModelKind.UNET

    def __init__(self, model: nn.Module, difference: str) -> None:
        super().__init__(model)
        self.difference = difference  # for the report

    def select(self, x: Tensor, evaluation: Evaluation, *_: Any, **__: Any) -> Iterator[HookPair]:
        evaluation.run.stats.call_not_merged(Reason.UNKNOWN_API(name=self.difference))
        return iter(())


class Unsupported(MessageId):
    """Why a model is refused, and what the user can do."""

    MODEL = "unsupported_model"  # model
    SUPPORTED = "supported_models"  # supported: names
    WRAPPED = "wrapped_model"  # model, pack


class UnsupportedModelError(MessageError):
    """The model is of no known class. The prefix is empty, because the message's text already names ToMA."""

    prefix = ""


# The hooks of each model. References to the models are weak, so that hooks live only as long as their model.
_hooks: WeakKeyDictionary[nn.Module, ModelHooks] = WeakKeyDictionary()


def find(diffusion_model: nn.Module) -> ModelHooks | None:
    """Return the hooks of a model, None if no family matches; `_Unmerged` if a hook cannot stand in for its module."""
    model = unwrapped(diffusion_model)
    if model not in _hooks:
        family = next((f for f in _FAMILIES if is_of(f, model)), None)
        if family is None:
            # If a family could not be imported, the model may belong to it: let the model run unmerged.
            return _Unmerged(model, type(model).__name__) if _unavailable else None
        try:
            with require_api(type(model).__name__):
                hooks: ModelHooks = family.Hooks(model)
                for module, hook in hooks.hook_pairs():
                    check(module, hook)
        except UnsupportedApiError as error:
            warn(error)
            hooks = _Unmerged(model, str(error))
        _hooks[model] = hooks
    return _hooks[model]


def is_of(family: Any, model: nn.Module) -> bool:
    """Whether a model is of a family. Unknown classes that a later ComfyUI derives from `MODEL` do not count, because
    they may read tokens that merging removes."""
    if not isinstance(model, family.MODEL):
        return False
    kinds = kinds_of(model)
    known = len(kinds) == 1 or kinds[0] in getattr(family, "DERIVED", ())
    return known and (not hasattr(family, "fits") or family.fits(model))


def require(diffusion_model: nn.Module) -> ModelHooks:
    """Return the hooks of a model. Raises `UnsupportedModelError` if no family matches."""
    hooks = find(diffusion_model)
    if hooks is None:
        kind = type(unwrapped(diffusion_model))
        if not kind.__module__.startswith("comfy."):
            # Take the pack's name from the module's name, which ComfyUI makes from the pack's path.
            pack = kind.__module__.replace("\\", ".").replace("/", ".").rpartition("custom_nodes.")[2]
            raise UnsupportedModelError(Unsupported.WRAPPED(model=kind.__name__, pack=pack))
        supported = tuple(family.NAME for family in _FAMILIES)
        raise UnsupportedModelError(Unsupported.MODEL(model=kind.__name__), Unsupported.SUPPORTED(supported=supported))
    return hooks


def blocks_of(model: ModelPatcher, latent: Tensor | None = None) -> list[BlockFacts]:
    """Return the blocks that may be merged, in forward order. latent: to count tokens. Raises as `require` does."""
    hooks = require(model.get_model_object("diffusion_model"))
    return list(hooks.blocks(torch.empty(1, 1, 64, 64, device="meta") if latent is None else latent))


def fingerprint(model: ModelPatcher) -> str:
    """Return the properties that all finetunes of a base model share, and that distinguish it from other models:
    family, count of blocks by kind, their channels, kind of prediction and highest noise level. Raises
    `UnsupportedModelError`."""
    facts = blocks_of(model)
    hooks = require(model.get_model_object("diffusion_model"))
    family = type(hooks).__module__.rpartition(".")[2]
    blocks = ", ".join(f"{home} {count}" for home, count in Counter(fact.home for fact in facts).items())
    width = ", ".join(dict.fromkeys(str(fact.width) for fact in facts))
    sampling = model.get_model_object("model_sampling")
    predicts = next((c.__name__ for c in type(sampling).__mro__ if "calculate_denoised" in vars(c)), "unknown")
    return f"{family} with blocks {blocks} of width {width}, noise {predicts} up to {float(sampling.sigma_max):.2g}"
