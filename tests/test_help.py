"""Every node has a help page that speaks of every input and output, and the page's help panel gets it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from scripts.comfy_server import PACK_FOLDER, ComfyServer
from scripts.comfyui import ROOT

PAGES = ROOT / "web" / "docs"
NODES: dict[str, Any] = json.loads((ROOT / "locales" / "en" / "nodeDefs.json").read_text(encoding="utf-8"))
every_node = pytest.mark.parametrize("node_id", NODES)


def test_no_page_is_left_over() -> None:
    assert {path.stem for path in PAGES.glob("*.md")} == set(NODES)


@every_node
def test_speaks_of_every_input_and_output(node_id: str) -> None:
    text = (PAGES / f"{node_id}.md").read_text(encoding="utf-8")
    slots = [*NODES[node_id]["inputs"].values(), *NODES[node_id]["outputs"].values()]
    names = {slot["name"] for slot in slots if "name" in slot} - {"model", "latent"}
    assert {name for name in names if f"**{name}**" not in text} == set()


@every_node
@pytest.mark.server
def test_help_panel_gets_it(node_id: str, server: ComfyServer) -> None:
    page = server.fetch(f"/extensions/{PACK_FOLDER}/docs/{node_id}.md").decode()
    assert page == (PAGES / f"{node_id}.md").read_text(encoding="utf-8")
    assert page.startswith("# ToMA")
