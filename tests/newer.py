"""Provide what the tested ComfyUI lacks for templates: nodes of a newer ComfyUI, as a pack, and empty model files."""

import json

from PIL import Image

from scripts.comfy_server import ComfyServer
from scripts.comfyui import ROOT

PACK, NODES = ROOT / "tests" / "newer_nodes", ("QwenImage21Cache", "TextEncodeQwenImage21")


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
