"""Distinguish ComfyUI's own code from code of other custom nodes, which may read tokens that merging removes."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from .model_hooks import Hook

# Prefixes of the names of modules that compute positions in ComfyUI's models.
_POSITIONS = ("pe_", "pos_", "rope", "rotary")


def unwrapped(module: nn.Module) -> nn.Module:
    """Return a module without torch.compile's wrapper, if it has one."""
    return getattr(module, "_orig_mod", module)


def kinds_of(model: nn.Module) -> list[str]:
    """Return the names of those classes of a model that ComfyUI defines, most derived first. Leave out classes derived
    by other packs, or by PyTorch when it spreads weights over cards."""
    return [kind.__name__ for kind in type(model).__mro__ if _by_comfyui(kind)]


def is_original(block: nn.Module) -> bool:
    """Whether a block's `forward` is ComfyUI's or a hook of this pack, not one of another pack."""
    module = unwrapped(block)
    own = vars(module).get("forward")
    # Judge by the class that defines `forward`: PyTorch derives a class without it to spread weights over cards.
    home = next(kind for kind in type(module).__mro__ if "forward" in vars(kind))
    return _by_comfyui(home) and (own is None or isinstance(own, Hook) or _by_comfyui(own))


def foreign_positions(model: nn.Module | None) -> str | None:
    """If another pack's module computes the model's positions, return the name of the module's class, otherwise None.
    Another pack's positions may differ at each step, as those for pictures larger than in training do."""
    for name, child in () if model is None else unwrapped(model).named_children():
        if name.startswith(_POSITIONS) and not type(child).__module__.startswith("torch.") and not is_original(child):
            return type(child).__name__
    return None


def runs_own_loop(model: nn.Module, methods: Iterable[str]) -> bool:
    """Whether the model runs its blocks in ComfyUI's own code. methods: names of methods that may run the blocks."""
    loops = [getattr(type(model), name) for name in methods if hasattr(type(model), name)]
    return vars(model).keys().isdisjoint(methods) and all(map(in_its_own_file, loops))


def has_forward_hooks(before: nn.Module, after: nn.Module) -> bool:
    """Whether forward hooks may read tokens between two blocks; PyTorch's own hooks only spread weights (FSDP)."""
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


def in_its_own_file(method: Any) -> bool:
    """Whether a method is still ComfyUI's: another pack may have replaced it in the class, for all models."""
    home = sys.modules.get(getattr(method, "__module__", ""))
    code = getattr(method, "__code__", None)
    return code is not None and _by_comfyui(method) and code.co_filename == getattr(home, "__file__", None)
