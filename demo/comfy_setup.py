"""Make ComfyUI importable for the command-line tools in this folder (a ComfyUI server does not need it)."""

from __future__ import annotations

import importlib.util
import os
import sys


def prepare() -> None:
    """Put ComfyUI first on sys.path and choose CPU or GPU. Call this function before the first import of `comfy`.

    ComfyUI is found by the environment variable COMFYUI_PATH, or on Python's own path.
    Raises SystemExit with a hint if ComfyUI is not found.
    """
    path = os.environ.get("COMFYUI_PATH")
    if path:
        sys.path.insert(0, path)
    if importlib.util.find_spec("comfy") is None:
        raise SystemExit("ComfyUI was not found: set COMFYUI_PATH to the folder that holds its main.py")
    import torch
    from comfy.cli_args import args

    args.cpu = not torch.cuda.is_available()
    # Use PyTorch's attention, because ComfyUI's default on a CPU works in slices, whose backward pass is slow.
    args.use_pytorch_cross_attention = True
