"""Import ComfyUI and this pack into the current process, as ComfyUI itself imports them.

ComfyUI comes first on `sys.path`, so that `import nodes` means ComfyUI's `nodes.py` and not this checkout's folder
`nodes/`. The pack is loaded by spec, under the name that ComfyUI would give it. The pack's `toma_core` then differs
from the module that a plain `import toma_core` gives. Import the pack's modules by `pack_module("toma_core.config")`.
Never mix objects of the two modules, because enums, classes and registries do not match.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

from scripts.comfyui import ROOT, is_comfyui

PACK_NAME = str(ROOT).replace(".", "_x_")


def use_comfyui(path: Path | str | None = None, *, cpu: bool | None = None, own_attention: bool = False) -> Path:
    """Make ComfyUI importable and return its folder. Call this function before the first import of ComfyUI's modules.

    Args:
        path: folder of ComfyUI, `COMFYUI_PATH` if None.
        cpu: run its models on the CPU. None: only if torch finds no CUDA device.
        own_attention: let ComfyUI choose its attention. If False, PyTorch's attention is used. ComfyUI's default on the
        CPU (sub-quadratic) breaks graphs in torch.compile.

    Raises RuntimeError if there is no ComfyUI, or if it was already set up on another device.
    """
    folder = Path(path or os.environ.get("COMFYUI_PATH") or ".").absolute()
    if not is_comfyui(folder):
        raise RuntimeError(f"{folder} holds no ComfyUI: run this through make (`make test`), or set COMFYUI_PATH")
    if str(folder) in sys.path:
        sys.path.remove(str(folder))
    sys.path.insert(0, str(folder))
    import torch
    from comfy.cli_args import args

    cpu = not torch.cuda.is_available() if cpu is None else cpu
    if "comfy.model_management" in sys.modules and args.cpu != cpu:
        raise RuntimeError("ComfyUI was imported before use_comfyui() and has chosen its device already")
    args.cpu = cpu
    args.use_pytorch_cross_attention = not own_attention
    return folder


def load_pack() -> ModuleType:
    """Load the root `__init__.py` of this checkout once, as ComfyUI's `load_custom_node` does."""
    if PACK_NAME not in sys.modules:
        spec = importlib.util.spec_from_file_location(PACK_NAME, ROOT / "__init__.py")
        if spec is None or spec.loader is None:
            raise ImportError(f"{ROOT} holds no pack")
        module = importlib.util.module_from_spec(spec)
        sys.modules[PACK_NAME] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[PACK_NAME]
            raise
    return sys.modules[PACK_NAME]


def pack_module(name: str) -> ModuleType:
    """Import a module of the loaded pack by its dotted path from the root, e.g.
    `pack_module("nodes.adapters.patch_model")`. From then on, the pack raises errors in its own code and does not only
    log them."""
    module = importlib.import_module(f"{load_pack().__name__}.{name}")
    if compat := sys.modules.get(f"{PACK_NAME}.nodes.adapters.compat"):
        compat.RAISES_OWN_ERRORS = True  # type: ignore[attr-defined]
    return module
