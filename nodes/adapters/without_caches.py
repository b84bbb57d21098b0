"""Take out of a model what would falsify or delay its measurement: step caches and torch.compile."""

from __future__ import annotations

from comfy.model_patcher import ModelPatcher

from .compat import optional_api
from .origin import unwrapped

# ComfyUI's step caches by the key of their wrappers: they return results of earlier steps.
_CACHES = {"easycache": "EasyCache", "lazycache": "LazyCache"}
# torch.compile would build a graph for every site and ratio.
_COMPILED = "torch.compile"


def without_caches(model: ModelPatcher) -> tuple[ModelPatcher, list[str]]:
    """Return a clone without ComfyUI's step caches and torch.compile, and the names of what was removed."""
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
    patched.model_options.pop("torch_compile_kwargs", None)
    return patched, list(dict.fromkeys(found))
