"""A pack with the nodes of templates that need a newer ComfyUI, for a server of the tested one."""

from __future__ import annotations

from pathlib import Path

from scripts.comfyui import ROOT

NODES = ("QwenImage21Cache", "TextEncodeQwenImage21")
# ComfyUI runs it before it loads any pack.
FIRST = """import sys
sys.path.append({root!r})
from testbed.stand_ins import use_newer_models
use_newer_models()
"""


def newer_pack(folder: Path) -> Path:
    """Make the pack in a folder and return its path."""
    made = folder / "newer"
    made.mkdir(parents=True)
    (made / "prestartup_script.py").write_text(FIRST.format(root=str(ROOT)))
    (made / "__init__.py").write_text(Path(__file__).with_name("newer_nodes.py").read_text())
    return made
