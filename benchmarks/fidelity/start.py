"""What every command here begins with: its options, the threads that it may use, ComfyUI and the pack."""

from __future__ import annotations

import argparse

import torch

from scripts.comfy_pack import load_pack, use_comfyui

# The trained models that draw pictures, `demo.sampling.PICTURES`: known before ComfyUI is there.
PICTURES = ("dit", "few", "unet", "deep")
# First seeds of the scenes to choose settings on and to report on: neither training nor another table uses them.
SCENES = {"choose": 20_000, "report": 30_000}


def command(doc: str | None) -> argparse.ArgumentParser:
    """The parser of a command that is told by the module's docstring."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=0, help="CPU threads, 0 for torch's own choice")
    return parser


def start(args: argparse.Namespace) -> None:
    """Load ComfyUI and the pack, to compute with so many threads."""
    if args.threads:
        torch.set_num_threads(args.threads)
    use_comfyui()
    load_pack()
