"""Makes ComfyUI importable for the command-line tools in this folder (inside a ComfyUI server nothing is needed)."""

from __future__ import annotations

import importlib.util
import os
import sys


def prepare() -> None:
    """Puts ComfyUI first on sys.path and picks CPU or GPU; call it before anything imports `comfy`.

    ComfyUI is taken from the environment variable COMFYUI_PATH, or from where Python already finds it.
    Raises SystemExit with a hint if there is none.
    """
    path = os.environ.get("COMFYUI_PATH")
    if path:
        sys.path.insert(0, path)
    if importlib.util.find_spec("comfy") is None:
        raise SystemExit("ComfyUI was not found: set COMFYUI_PATH to the folder that holds its main.py")
    import torch
    from comfy.cli_args import args

    args.cpu = not torch.cuda.is_available()
    # The default CPU attention of ComfyUI works in slices, which is slow to train through.
    args.use_pytorch_cross_attention = True
