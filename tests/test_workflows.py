"""Test the format of the shipped workflows and blueprints, their thumbnails, and that a real server accepts them."""

import json
import re
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageChops, ImageStat

from demo.thumbnails import FULL_STEP_INTERVAL, MOST_BYTES, THUMBNAILS, drawn, merged_steps
from scripts.comfy_pack import pack_module
from scripts.comfy_server import PACK_FOLDER, ComfyServer
from scripts.comfyui import ROOT
from tests import newer

EXAMPLES = sorted((ROOT / "workflows").glob("*.json"))
DEMOS = sorted((ROOT / "demo" / "workflows").glob("*.json"))
BLUEPRINTS = sorted((ROOT / "subgraphs").glob("*.json"))
INPUT, OUTPUT = -10, -20  # ids of the subgraph's input and output nodes
NOTES = {"Note", "MarkdownNote"}  # the page has these nodes, the server does not
# Largest heights in saved workflows. A node must have room for its text after a run. If it shows a picture, it grows by
# itself.
MOST_HEIGHT = {"ToMA": 250, "ToMAAdvanced": 350, "ToMAReport": 290, "ToMABenchmark": 370, "ToMACalibrate": 370}
# The choices of the last type add widgets to the node. The choice "auto" adds none.
WIDGETS = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO", "COMFY_DYNAMICCOMBO_V3")
# After the widget of a seed, ComfyUI's page adds a widget for changes of the seed. The page does not send the value of
# this widget.
SEEDS = ("seed", "noise_seed")
AFTER_SEED = ("fixed", "increment", "decrement", "randomize")

every_example = pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
every_workflow = pytest.mark.parametrize("path", EXAMPLES + DEMOS, ids=lambda path: path.stem)


def load(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def node_inputs(definition: dict[str, Any]) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yield (name, type or list of choices, options) of a node's inputs in the order of its widgets."""
    for part in ("required", "optional"):
        for name, spec in definition["input"].get(part, {}).items():
            yield name, spec[0], spec[1] if len(spec) > 1 else {}


def is_widget(kind: Any) -> bool:
    """Return whether an input of this type is shown as a widget. If the input takes several types, the first one
    counts."""
    return isinstance(kind, list) or kind.partition(",")[0] in WIDGETS


def to_prompt(workflow: dict[str, Any], server: ComfyServer) -> dict[str, Any]:
    """Convert a workflow to the API format. Values are in the order in which the server defines the inputs."""
    origins = {link[0]: [str(link[1]), link[2]] for link in workflow["links"]}
    prompt = {}
    for node in workflow["nodes"]:
        if node["type"] in NOTES:
            continue
        values = list(node["widgets_values"])
        linked = {slot["name"]: slot["link"] for slot in node["inputs"] if slot.get("link") is not None}
        inputs = {name: origins[link] for name, link in linked.items()}
        for name, kind, options in node_inputs(server.object_info(node["type"])):
            if kind == "IMAGECOMPARE":  # the page sends the state of this input, empty before the first run
                inputs[name] = {"__value__": ["", ""]}
            if not is_widget(kind) or options.get("forceInput"):
                continue
            value = values.pop(0)
            inputs.setdefault(name, value)
            if options.get("control_after_generate", name in SEEDS):
                assert values.pop(0) in AFTER_SEED
        # These nodes have widgets whose values the page does not send.
        assert not values or node["type"] in ("PreviewAny", "LoadImage"), f"{node['type']}: unused {values}"
        prompt[str(node["id"])] = {"class_type": node["type"], "inputs": inputs}
    return prompt


@pytest.fixture(scope="module")
def demo_server() -> Iterator[ComfyServer]:
    """Run a server with the demo nodes, nodes of a newer ComfyUI, and an empty file for every named model."""
    server = ComfyServer(packs=[ROOT / "demo", newer.PACK])
    newer.place_templates(server)
    (server.base / "models" / "diffusion_models").mkdir(exist_ok=True)
    (server.base / "models" / "diffusion_models" / "toma_demo_dit.safetensors").touch()
    with server:
        yield server


def refused(server: ComfyServer, prompt: dict[str, Any]) -> set[str]:
    """Return the nodes that the server rejects, without running the prompt. An invalid output is added, so that the
    response always lists errors."""
    prompt = {**prompt, "wrong": {"class_type": "EmptyLatentImage", "inputs": {"width": -1}}}
    prompt["wrong out"] = {"class_type": "SaveLatent", "inputs": {"samples": ["wrong", 0], "filename_prefix": "x"}}
    try:
        answer = server.post("/prompt", {"prompt": prompt})
    except urllib.error.HTTPError as error:  # the server answers with an error if no output is valid
        answer = json.loads(error.read())
    server.post("/queue", {"clear": True})
    server.interrupt()
    return set(answer["node_errors"]) - {"wrong"} if "wrong" in answer["node_errors"] else {"nothing was checked"}


def check_links(links: list[Any], nodes: dict[int, Any], within: dict[str, Any] | None = None) -> None:
    """Check that links and the slots that they connect name each other. within: the subgraph that the nodes are in."""
    for link_id, source, out, target, into, kind in links:
        if source == INPUT and within:
            assert within["inputs"][out]["linkIds"] == [link_id]
        else:
            output = nodes[source]["outputs"][out]
            assert (output["type"], link_id in output["links"]) == (kind, True)
        if target == OUTPUT and within:
            assert within["outputs"][into]["linkIds"] == [link_id]
        else:
            slot = nodes[target]["inputs"][into]
            assert slot["link"] == link_id
            assert slot["type"] in (kind, "*")


@every_workflow
def test_links_fit_and_it_opens_readable(path: Path) -> None:
    """The page draws nodes as grey boxes below a scale of 0.5. If the pack's nodes were coloured, their labels would be
    unreadable."""
    workflow = load(path)
    assert workflow["version"] == 0.4
    nodes = {node["id"]: node for node in workflow["nodes"]}
    assert len(nodes) == len(workflow["nodes"])
    assert workflow["last_node_id"] >= max(nodes)
    check_links(workflow["links"], nodes)
    links = {link[0] for link in workflow["links"]}
    assert {slot["link"] for node in nodes.values() for slot in node["inputs"]} - {None} == links
    assert 0.5 <= workflow["extra"]["ds"]["scale"] <= 1.0
    assert len(workflow["extra"]["ds"]["offset"]) == 2
    for node in (node for node in workflow["nodes"] if node["type"] in MOST_HEIGHT):
        assert not {"color", "bgcolor"} & set(node), node["type"]
        assert not node.get("showAdvanced")
        assert node["size"][1] <= MOST_HEIGHT[node["type"]]


LINKS = re.compile(r"\(https:[^)]*\)|\*\*models/[^*]*")


@every_example
def test_note_says_where_its_models_come_from(path: Path) -> None:
    """The notes of all languages (web/notes.js) name the same files."""
    nodes = load(path)["nodes"]
    (of_note,) = [node for node in nodes if node["type"] in NOTES]
    note, theirs = of_note["widgets_values"][0], of_note["properties"]["toma_note"]
    values = {value for node in nodes for value in node.get("widgets_values", []) if isinstance(value, str)}
    models = {model["name"]: model for node in nodes for model in node["properties"].get("models", [])}
    assert {value for value in values if value.endswith(".safetensors")} == set(models)
    for name, model in models.items():
        assert model["url"].endswith(f"/{name}")
        assert model["url"] in note
        assert f"models/{model['directory']}" in note
    assert "`" not in note  # on a coloured note the page renders code in blue on brown
    assert sorted(theirs) == ["zh", "zh-TW"]
    for text in theirs.values():
        assert LINKS.findall(text) == LINKS.findall(note)
        assert text.count("\n") == note.count("\n")
        assert len(re.findall("[\u4e00-\u9fff]", text)) > 60


@every_workflow
def test_server_accepts_it(path: Path, demo_server: ComfyServer) -> None:
    """The server checks types, ranges and choices. Templates use only nodes of ComfyUI and of this pack."""
    assert refused(demo_server, to_prompt(load(path), demo_server)) == set()
    for node in load(path)["nodes"] if path in EXAMPLES else ():
        ours = node["type"].startswith("ToMA")
        assert node["properties"]["cnr_id"] == ("toma-token-merge" if ours else "comfy-core")
        if node["type"] not in NOTES:
            module = demo_server.object_info(node["type"])["python_module"]
            newest = "custom_nodes.newer_nodes" if node["type"] in newer.NODES else "comfy_extras."
            known = (f"custom_nodes.{PACK_FOLDER}",) if ours else ("nodes", "comfy_extras.", newest)
            assert module.startswith(known), module


def test_every_workflow_has_a_thumbnail_that_can_be_made_again(pack: Any) -> None:
    names = sorted(path.stem for path in EXAMPLES)
    assert [int(name[:2]) for name in names] == list(range(1, len(names) + 1)), "in the order of need"
    assert sorted(path.stem for path in (ROOT / "workflows").glob("*.jpg")) == list(THUMBNAILS) == names
    core = pack_module("toma_core")
    assert core.UserSettings("balanced").resolved(core.ModelKind.TRANSFORMER).full_step_interval == FULL_STEP_INTERVAL


@every_example
def test_thumbnail_is_of_this_workflow(path: Path) -> None:
    """The saved thumbnail equals a new drawing, and shows as many steps as the workflow's note says."""
    thumbnail, saved = THUMBNAILS[path.stem], Image.open(path.with_suffix(".jpg")).convert("RGB")
    assert ImageStat.Stat(ImageChops.difference(saved, drawn(path.stem))).mean < [4.0] * 3, "python -m demo.thumbnails"
    assert saved.size == (512, 512)
    assert path.with_suffix(".jpg").stat().st_size < MOST_BYTES
    nodes = load(path)["nodes"]
    steps = [merged for run in merged_steps(path.stem) for merged in run]
    note = next(node for node in nodes if node["type"] in NOTES)["widgets_values"][0]
    said = re.search(r"Of (?:the )?(\d+) steps (?:\*\*balanced\*\* merges )?(\w+)", note)
    if said and len(thumbnail.runs) == 1:
        assert len(steps) == int(said[1])
        assert sum(steps) == int({"two": "2", "five": "5"}.get(said[2], said[2]))
    counts = [node["widgets_values"][2] for node in nodes if node["type"] == "KSampler"]
    assert not thumbnail.runs or not counts or list(thumbnail.runs) == counts


def test_blueprint_is_consistent_and_exposes_what_people_change() -> None:
    (path,) = BLUEPRINTS
    (outside, *_), (inside,) = load(path)["nodes"], load(path)["definitions"]["subgraphs"]
    assert outside["type"] == inside["id"]
    assert outside["title"] == inside["name"] == path.stem == "Text to Image (SDXL with ToMA)"
    names = [slot["name"] for slot in outside["inputs"]]
    assert names == [slot["name"] for slot in inside["inputs"]]
    assert {"prompt", "negative_prompt", "ratio", "preset", "width", "height", "seed", "steps"} <= {*names}
    nodes = {node["id"]: node for node in inside["nodes"]}
    assert inside["description"]
    order = ("id", "origin_id", "origin_slot", "target_id", "target_slot", "type")
    check_links([[link[key] for key in order] for link in inside["links"]], nodes, inside)
    for node_id, widget in outside["properties"]["proxyWidgets"]:
        assert widget in {slot["name"] for slot in nodes[int(node_id)]["inputs"]} | {"control_after_generate"}


def test_server_accepts_the_blueprint(demo_server: ComfyServer) -> None:
    """Send the nodes inside the blueprint, with their saved values, as a graph that saves the picture."""
    (path,) = BLUEPRINTS
    ((key, entry),) = [(k, e) for k, e in demo_server.get("/global_subgraphs").items() if e["name"] == path.stem]
    assert entry["info"]["node_pack"] == f"custom_nodes.{PACK_FOLDER}"
    assert json.loads(demo_server.get(f"/global_subgraphs/{key}")["data"]) == load(path)
    (inside,) = load(path)["definitions"]["subgraphs"]
    links = {link["id"]: [link["id"], link["origin_id"], link["origin_slot"]] for link in inside["links"]}
    flat = [link for link in links.values() if link[1] != INPUT]
    for node in inside["nodes"]:
        for slot in node["inputs"]:
            slot["link"] = None if "widget" in slot else slot["link"]
        later = [""] * (node["type"] == "ToMA")  # the value of `profile`, which the page fills in
        node["widgets_values"] = [*node.get("widgets_values", []), *later]
    prompt = to_prompt({"links": flat, "nodes": inside["nodes"]}, demo_server)
    assert [node["inputs"]["ratio"] for node in prompt.values() if node["class_type"] == "ToMA"] == [0.5]
    (picture,) = [links[link["id"]] for link in inside["links"] if link["target_id"] == OUTPUT]
    inputs = {"images": [str(picture[1]), picture[2]], "filename_prefix": "x"}
    prompt["save"] = {"class_type": "SaveImage", "inputs": inputs}
    assert refused(demo_server, prompt) == set()
