"""Distinguish ComfyUI's own code from code of other custom nodes, which may read tokens that merging removes."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from .model_hooks import Hook

# Prefixes by which ComfyUI's models name the modules that compute positions.
_POSITIONS = ("pe_", "pos_", "rope", "rotary")


def unwrapped(module: nn.Module) -> nn.Module:
    """Return a module without torch.compile's wrapper, if it has one."""
    return getattr(module, "_orig_mod", module)


def kinds_of(model: nn.Module) -> list[str]:
    """Return the names of those classes of a model that ComfyUI defines, most derived first. Classes that other packs,
    or PyTorch on several cards, derive from them are left out."""
    return [kind.__name__ for kind in type(model).__mro__ if _by_comfyui(kind)]


def is_original(block: nn.Module) -> bool:
    """Whether a block is of one of ComfyUI's classes, and not of a class that another pack has put in its place."""
    module = unwrapped(block)
    own = vars(module).get("forward")
    # Judge by the class that defines `forward`: PyTorch derives a class that has none if weights are spread over cards.
    home = next(kind for kind in type(module).__mro__ if "forward" in vars(kind))
    return _by_comfyui(home) and (own is None or isinstance(own, Hook) or _by_comfyui(own))


def foreign_positions(model: nn.Module | None) -> str | None:
    """Return the class of the module that computes the model's positions if the module is another pack's, otherwise
    None. Such positions may differ at each step, as with packs for pictures larger than in training."""
    for name, child in () if model is None else unwrapped(model).named_children():
        if name.startswith(_POSITIONS) and not type(child).__module__.startswith("torch.") and not is_original(child):
            return type(child).__name__
    return None


def runs_own_loop(model: nn.Module, methods: Iterable[str]) -> bool:
    """Whether the model runs its blocks in ComfyUI's own code. methods: names of methods that may run the blocks."""
    loops = [getattr(type(model), name) for name in methods if hasattr(type(model), name)]
    return vars(model).keys().isdisjoint(methods) and all(map(_in_its_own_file, loops))


def has_forward_hooks(before: nn.Module, after: nn.Module) -> bool:
    """Whether PyTorch hooks read the tokens between two blocks; hooks that spread weights over cards (FSDP) do not."""
    hooks = [hook for module in (before, unwrapped(before)) for hook in module._forward_hooks.values()]
    hooks += [hook for module in (after, unwrapped(after)) for hook in module._forward_pre_hooks.values()]
    return not all(str(getattr(hook, "__module__", "")).startswith("torch.") for hook in hooks)


def wrapped_by_others(wrappers: Mapping[str, Any], kinds: Iterable[str]) -> bool:
    """Whether another pack has a wrapper of one of these kinds (ComfyUI's `WrappersMP`)."""
    pack = __name__.rpartition(".")[0]
    found = [each for kind in kinds for named in wrappers.get(kind, {}).values() for each in named]
    return not all(
        _by_comfyui(each)
        or str(getattr(each, "__module__", "")).startswith(pack)
        or "comfy_extras" in getattr(getattr(each, "__code__", None), "co_filename", "")
        for each in found
    )


def _by_comfyui(written: Any) -> bool:
    return str(getattr(written, "__module__", "")).startswith("comfy.")


def _in_its_own_file(method: Any) -> bool:
    """Whether a method is still the one in ComfyUI's file, and was not replaced for all models."""
    home = sys.modules.get(getattr(method, "__module__", ""))
    code = getattr(method, "__code__", None)
    return code is not None and _by_comfyui(method) and code.co_filename == getattr(home, "__file__", None)
