"""The blueprints: their links are consistent, a real server lists them and accepts their graphs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from scripts.comfy_server import PACK_FOLDER, ComfyServer
from scripts.comfyui import ROOT
from tests.loop import loop

BLUEPRINTS = sorted((ROOT / "subgraphs").glob("*.json"))
INPUT, OUTPUT = -10, -20  # ids of the subgraph's input and output nodes

every_blueprint = loop("path", BLUEPRINTS, ids=lambda path: path.stem)


def load(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the outer node and the definition of the subgraph."""
    content = json.loads(path.read_text(encoding="utf-8"))
    (outside,), (inside,) = content["nodes"], content["definitions"]["subgraphs"]
    return outside, inside


def to_prompt(inside: dict[str, Any], server: ComfyServer) -> dict[str, Any]:
    """Return the subgraph in the API format, every exposed widget at its value, with the picture saved."""
    links = {link["id"]: link for link in inside["links"]}
    prompt: dict[str, Any] = {}
    for node in inside["nodes"]:
        values, inputs = list(node.get("widgets_values", [])), {}
        for slot in node["inputs"]:
            link = links.get(slot["link"])
            if "widget" in slot:
                inputs[slot["name"]] = values.pop(0)
                if slot["name"] == "seed":
                    assert values.pop(0) == "fixed"
            elif link is not None:
                inputs[slot["name"]] = [str(link["origin_id"]), link["origin_slot"]]
        assert not values, f"{node['type']} has more widget values than inputs"
        assert set(server.object_info(node["type"])["input"]["required"]) == set(inputs)
        prompt[str(node["id"])] = {"class_type": node["type"], "inputs": inputs}
    (result,) = (link for link in inside["links"] if link["target_id"] == OUTPUT)
    picture = [str(result["origin_id"]), result["origin_slot"]]
    prompt["save"] = {"class_type": "SaveImage", "inputs": {"images": picture, "filename_prefix": "x"}}
    return prompt


def test_one_ships() -> None:
    assert [path.stem for path in BLUEPRINTS] == ["Text to Image (SDXL with ToMA)"]


@every_blueprint
def test_links_fit(path: Path) -> None:
    outside, inside = load(path)
    assert outside["type"] == inside["id"]
    assert outside["title"] == inside["name"] == path.stem
    assert [slot["name"] for slot in outside["inputs"]] == [slot["name"] for slot in inside["inputs"]]
    nodes = {node["id"]: node for node in inside["nodes"]}
    for link in inside["links"]:
        if link["origin_id"] == INPUT:
            assert inside["inputs"][link["origin_slot"]]["linkIds"] == [link["id"]]
        else:
            output = nodes[link["origin_id"]]["outputs"][link["origin_slot"]]
            assert (output["type"], link["id"] in output["links"]) == (link["type"], True)
        if link["target_id"] == OUTPUT:
            assert inside["outputs"][link["target_slot"]]["linkIds"] == [link["id"]]
        else:
            slot = nodes[link["target_id"]]["inputs"][link["target_slot"]]
            assert (slot["type"], slot["link"]) == (link["type"], link["id"])
    for node_id, widget in outside["properties"]["proxyWidgets"]:
        names = {slot["name"] for slot in nodes[int(node_id)]["inputs"]} | {"control_after_generate"}
        assert widget in names


@every_blueprint
def test_exposes_what_people_change(path: Path) -> None:
    outside, inside = load(path)
    names = {slot["name"] for slot in outside["inputs"]}
    assert {"prompt", "negative_prompt", "ratio", "preset", "width", "height", "seed", "steps", "ckpt_name"} <= names
    assert "ToMA" in {node["type"] for node in inside["nodes"]}
    assert inside["description"]
    assert [model["name"] for node in inside["nodes"] for model in node["properties"].get("models", [])]


@every_blueprint
def test_server_lists_it_and_knows_its_nodes(path: Path, server: ComfyServer) -> None:
    entries = {key: entry for key, entry in server.get("/global_subgraphs").items() if entry["name"] == path.stem}
    ((key, entry),) = entries.items()
    assert entry["info"]["node_pack"] == f"custom_nodes.{PACK_FOLDER}"
    assert json.loads(server.get(f"/global_subgraphs/{key}")["data"]) == json.loads(path.read_text(encoding="utf-8"))
    prompt = to_prompt(load(path)[1], server)
    ratio = next(node["inputs"]["ratio"] for node in prompt.values() if node["class_type"] == "ToMA")
    assert ratio == 0.5
    for node in prompt.values():
        for slot in node["inputs"].values():
            assert not isinstance(slot, list) or slot[0] in prompt
