"""Every node has a help page in every language that describes its settings, and the help panel loads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from scripts.comfy_pack import pack_module
from scripts.comfy_server import PACK_FOLDER, ComfyServer
from scripts.comfyui import ROOT
from tests.loop import loop

PAGES = ROOT / "web" / "docs"
NODES = {
    path.parent.name: json.loads(path.read_text(encoding="utf-8"))
    for path in sorted((ROOT / "locales").glob("*/nodeDefs.json"))
}
every_page = loop(("node_id", "language"), [(node_id, language) for language in NODES for node_id in NODES[language]])


def page(node_id: str, language: str) -> Path:
    return PAGES / node_id / f"{language}.md"


def test_no_page_is_left_over() -> None:
    wanted = {page(node_id, language) for language in NODES for node_id in NODES["en"]}
    assert {path for path in PAGES.rglob("*.md") if path.parent != PAGES} == wanted
    assert {path.stem for path in PAGES.glob("*.md")} == set(NODES["en"])


@loop("node_id", NODES["en"])
def test_languages_without_a_page_get_the_english_one(node_id: str) -> None:
    assert (PAGES / f"{node_id}.md").read_text(encoding="utf-8") == page(node_id, "en").read_text(encoding="utf-8")


@every_page
def test_speaks_of_every_input_and_output(node_id: str, language: str) -> None:
    """Advanced inputs have tooltips instead."""
    text = page(node_id, language).read_text(encoding="utf-8")
    node: dict[str, Any] = NODES[language][node_id]
    front = ("preset", "ratio", *pack_module("nodes.widgets")._FRONT)
    inputs = [slot for name, slot in node["inputs"].items() if node_id != "ToMAAdvanced" or name in front]
    names = {slot["name"] for slot in [*inputs, *node["outputs"].values()] if "name" in slot}
    passed = {node["inputs"][name]["name"] for name in ("model", "latent") if name in node["inputs"]}
    assert {name for name in names - passed if f"**{name}**" not in text} == set()


@every_page
def test_help_panel_gets_it(node_id: str, language: str, server: ComfyServer) -> None:
    shown = server.fetch(f"/extensions/{PACK_FOLDER}/docs/{node_id}/{language}.md").decode()
    assert shown == page(node_id, language).read_text(encoding="utf-8")
    assert shown.startswith("# ")
    assert "ToMA" in shown.splitlines()[0]
