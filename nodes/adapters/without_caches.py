"""A model to measure: without what would answer in its place, or cost more than it tells."""

from __future__ import annotations

from comfy.model_patcher import ModelPatcher

from .compat import optional_api
from .family import unwrapped

# ComfyUI's own step caches, by the key of their wrappers: they give an old answer where a new one is asked for.
_CACHES = {"easycache": "EasyCache", "lazycache": "LazyCache"}
# torch.compile would make a graph for every site and ratio that is tried.
_COMPILED, _TOLD = "torch.compile", "torch_compile_kwargs"


def without_caches(model: ModelPatcher) -> tuple[ModelPatcher, list[str]]:
    """A clone without ComfyUI's step caches and torch.compile, and the names of what was left out."""
    patched, found = model.clone(), []
    with optional_api("ModelPatcher.wrappers"):
        for wrappers in patched.wrappers.values():
            found += [name for key, name in {**_CACHES, _COMPILED: _COMPILED}.items() if wrappers.pop(key, None)]
    with optional_api("ModelPatcher.object_patches"):
        # Some packs compile block by block.
        compiled = [key for key, module in patched.object_patches.items() if unwrapped(module) is not module]
        for key in compiled:
            patched.object_patches.pop(key)
        found += [_COMPILED] * bool(compiled)
    patched.model_options.pop(_TOLD, None)
    return patched, list(dict.fromkeys(found))
