"""Test that every node has a help page in every language, and that the page describes the node's settings."""

import json

from scripts.comfy_pack import pack_module
from scripts.comfyui import ROOT

PAGES = ROOT / "web" / "docs"
LOCALES = sorted((ROOT / "locales").glob("*/nodeDefs.json"))
NODES = {path.parent.name: json.loads(path.read_text(encoding="utf-8")) for path in LOCALES}


def test_no_page_is_missing_or_left_over() -> None:
    assert {path.stem for path in PAGES.glob("*.md")} == set(NODES["en"])
    wanted = {PAGES / node_id / f"{language}.md" for language in NODES for node_id in NODES["en"]}
    assert {path for path in PAGES.rglob("*.md") if path.parent != PAGES} == wanted
    for node_id in NODES["en"]:  # ComfyUI shows the English page in languages without a page
        assert (PAGES / f"{node_id}.md").read_bytes() == (PAGES / node_id / "en.md").read_bytes()


def test_pages_speak_of_every_input_and_output() -> None:
    """Advanced inputs are described by tooltips, not by help pages."""
    front = ("preset", "ratio", *pack_module("nodes.widgets")._FRONT)
    for language, nodes in NODES.items():
        for node_id, node in nodes.items():
            text = (PAGES / node_id / f"{language}.md").read_text(encoding="utf-8")
            inputs = [slot for name, slot in node["inputs"].items() if node_id != "ToMAAdvanced" or name in front]
            names = {slot["name"] for slot in [*inputs, *node["outputs"].values()] if "name" in slot}
            passed = {node["inputs"][name]["name"] for name in ("model", "latent") if name in node["inputs"]}
            missing = {name for name in names - passed if f"**{name}**" not in text}
            assert (node_id, language, missing) == (node_id, language, set())
            assert text.startswith("# ")
            assert "ToMA" in text.splitlines()[0]
