"""Provide what the tested ComfyUI lacks for templates: nodes of a newer ComfyUI, as a pack, and empty model files."""

from __future__ import annotations

import json
from pathlib import Path

from PIL import Image

from scripts.comfy_server import ComfyServer
from scripts.comfyui import ROOT

NODES = ("QwenImage21Cache", "TextEncodeQwenImage21")
# The content of prestartup_script.py, which ComfyUI runs before it loads packs.
FIRST = """import sys
sys.path.append({root!r})
from testbed.stand_ins import use_newer_models
use_newer_models()
"""


def newer_pack(folder: Path) -> Path:
    """Write a pack with the nodes of newer_nodes.py into a folder, and return the path of the pack."""
    made = folder / "newer"
    made.mkdir(parents=True)
    (made / "prestartup_script.py").write_text(FIRST.format(root=str(ROOT)))
    (made / "__init__.py").write_text(Path(__file__).with_name("newer_nodes.py").read_text())
    return made


def place_templates(server: ComfyServer) -> None:
    """Make an empty file for every model that a template names, and a picture for every LoadImage node."""
    for path in (ROOT / "workflows").glob("*.json"):
        for node in json.loads(path.read_text(encoding="utf-8"))["nodes"]:
            for model in node.get("properties", {}).get("models", []):
                file = server.base / "models" / model["directory"] / model["name"]
                file.parent.mkdir(parents=True, exist_ok=True)
                file.touch()
            if node["type"] == "LoadImage":
                Image.new("RGB", (64, 64)).save(server.base / "input" / node["widgets_values"][0])
