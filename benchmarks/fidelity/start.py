"""Start a command of this folder: parse the common options, set the threads, and load ComfyUI and the pack."""

from __future__ import annotations

import argparse

import torch

from scripts.comfy_pack import load_pack, use_comfyui

# The trained models that draw pictures. `demo.sampling.PICTURES` lists the same models, but importing it needs ComfyUI.
PICTURES = ("dit", "few", "unet", "deep")
# First seeds of two sets of scenes: one to choose settings, one to report results. These scenes are not used for
# training or for other tables.
SCENES = {"choose": 20_000, "report": 30_000}


def command(doc: str | None) -> argparse.ArgumentParser:
    """Return the parser of a command. doc: the docstring of the command's module."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=0, help="CPU threads, 0 for torch's own choice")
    return parser


def start(args: argparse.Namespace) -> None:
    """Load ComfyUI and the pack, and set the number of threads."""
    if args.threads:
        torch.set_num_threads(args.threads)
    use_comfyui()
    load_pack()
