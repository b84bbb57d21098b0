"""The shipped workflows have the format of ComfyUI's page, a real server accepts them, and each has a thumbnail."""

from __future__ import annotations

import io
import json
import re
import urllib.error
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from PIL import Image, ImageChops, ImageStat

from demo.thumbnails import FULL_STEP_INTERVAL, MOST_BYTES, THUMBNAILS, chain, drawn, merged_steps
from scripts.comfy_pack import pack_module
from scripts.comfy_server import PACK_FOLDER, ComfyServer
from scripts.comfyui import ROOT
from tests import newer
from tests.loop import loop

EXAMPLES = sorted((ROOT / "workflows").glob("*.json"))
DEMOS = sorted((ROOT / "demo" / "workflows").glob("*.json"))
NOTES = {"Note", "MarkdownNote"}  # known to the page only
TITLE_HEIGHT = 30
# Room for what a node shows after a run, or, of nodes that grow around a picture, before it.
MOST_HEIGHT = {"ToMA": 250, "ToMAAdvanced": 350, "ToMAReport": 290, "ToMABenchmark": 370, "ToMACalibrate": 370}
# A list whose choices add widgets; "auto" adds none.
CHOICE_WITH_MORE = "COMFY_DYNAMICCOMBO_V3"
# ComfyUI's page adds a widget after a seed and does not send it.
SEEDS = ("seed", "noise_seed")
AFTER_SEED = ("fixed", "increment", "decrement", "randomize")

every_example = loop("path", EXAMPLES, ids=lambda path: path.stem)
every_workflow = loop("path", EXAMPLES + DEMOS, ids=lambda path: path.stem)


def load(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def node_inputs(definition: dict[str, Any]) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Return (name, type or list of choices, options) of a node's inputs in the order of its widgets."""
    for part in ("required", "optional"):
        for name, spec in definition["input"].get(part, {}).items():
            yield name, spec[0], spec[1] if len(spec) > 1 else {}


def is_widget(kind: Any) -> bool:
    """Return whether an input is shown as a widget; of several types the first counts."""
    simple = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO", CHOICE_WITH_MORE)
    return isinstance(kind, list) or kind.partition(",")[0] in simple


def to_prompt(workflow: dict[str, Any], server: ComfyServer) -> dict[str, Any]:
    """Convert a workflow to the API format by the saved widget positions and the real server's definitions."""
    origins = {link[0]: [str(link[1]), link[2]] for link in workflow["links"]}
    prompt = {}
    for node in workflow["nodes"]:
        if node["type"] in NOTES:
            continue
        values = list(node["widgets_values"])
        linked = {slot["name"]: slot["link"] for slot in node["inputs"] if slot.get("link") is not None}
        inputs = {name: origins[link] for name, link in linked.items()}
        for name, kind, options in node_inputs(server.object_info(node["type"])):
            if kind == "IMAGECOMPARE":  # the page sends the text that it shows there, empty before the first run
                inputs[name] = {"__value__": ["", ""]}
            if not is_widget(kind) or options.get("forceInput"):
                continue
            value = values.pop(0)
            inputs.setdefault(name, value)
            if options.get("control_after_generate", name in SEEDS):
                assert values.pop(0) in AFTER_SEED
        # These nodes have widgets of the page, which are not sent.
        assert not values or node["type"] in ("PreviewAny", "LoadImage"), (
            f"{node['type']} has more widget values than inputs: {values}"
        )
        prompt[str(node["id"])] = {"class_type": node["type"], "inputs": inputs}
    return prompt


@pytest.fixture(scope="module")
def demo_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyServer]:
    """Run a server with the demo nodes, those of a newer ComfyUI, and an empty file for every model that a workflow
    names."""
    server = ComfyServer(packs=[ROOT / "demo", newer.newer_pack(tmp_path_factory.mktemp("packs"))])
    try:
        for path in EXAMPLES:
            for node in load(path)["nodes"]:
                for model in node["properties"].get("models", []):
                    file = server.base / "models" / model["directory"] / model["name"]
                    file.parent.mkdir(exist_ok=True)
                    file.touch()
        Image.new("RGB", (8, 8)).save(server.base / "input" / "example.png")  # ComfyUI comes with one of this name
        (server.base / "models" / "diffusion_models").mkdir(exist_ok=True)
        (server.base / "models" / "diffusion_models" / "toma_demo_dit.safetensors").touch()
        yield server.start()
    finally:
        server.stop()


def refused(server: ComfyServer, prompt: dict[str, Any]) -> set[str]:
    """Return the nodes that the server rejects, without running the prompt: an additional output is invalid, so that
    the response always lists errors, and the queued prompt is removed."""
    prompt = {**prompt, "wrong": {"class_type": "EmptyLatentImage", "inputs": {"width": -1}}}
    prompt["wrong out"] = {"class_type": "SaveLatent", "inputs": {"samples": ["wrong", 0], "filename_prefix": "x"}}
    try:
        answer = server.post("/prompt", {"prompt": prompt})
    except urllib.error.HTTPError as error:  # none of its outputs could be run
        answer = json.loads(error.read())
    server.post("/queue", {"clear": True})
    server.interrupt()
    return set(answer["node_errors"]) - {"wrong"} if "wrong" in answer["node_errors"] else {"nothing was checked"}


@every_workflow
def test_links_and_ids_fit(path: Path) -> None:
    workflow = load(path)
    assert workflow["version"] == 0.4
    nodes = {node["id"]: node for node in workflow["nodes"]}
    assert len(nodes) == len(workflow["nodes"])
    assert workflow["last_node_id"] >= max(nodes)
    for link_id, source, out, target, into, kind in workflow["links"]:
        output, slot = nodes[source]["outputs"][out], nodes[target]["inputs"][into]
        assert link_id in output["links"]
        assert slot["link"] == link_id
        assert output["type"] == kind
        assert slot["type"] in (kind, "*")
    links = {link[0] for link in workflow["links"]}
    assert {slot["link"] for node in nodes.values() for slot in node["inputs"]} - {None} == links


@every_workflow
def test_nodes_do_not_overlap(path: Path) -> None:
    def box(node: dict[str, Any]) -> tuple[float, float, float, float]:
        (x, y), (width, height) = node["pos"], node["size"]
        return x, y - TITLE_HEIGHT, x + width, y + (0 if node["flags"].get("collapsed") else height)

    workflow = load(path)
    for one, other in combinations(workflow["nodes"], 2):
        a, b = box(one), box(other)
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1], (one["type"], other["type"])
    for node in workflow["nodes"]:
        left, top, right, bottom = box(node)
        inside = [
            group
            for group in workflow["groups"]
            if group["bounding"][0] <= left
            and group["bounding"][1] <= top
            and right <= group["bounding"][0] + group["bounding"][2]
            and bottom <= group["bounding"][1] + group["bounding"][3]
        ]
        assert len(inside) == 1, f"{node['type']} is in {len(inside)} groups"


@every_workflow
def test_opens_at_a_scale_at_which_text_shows(path: Path) -> None:
    """Below 0.5 the page draws nodes as grey boxes; without a scale it cannot draw at all."""
    view = load(path)["extra"]["ds"]
    assert 0.5 <= view["scale"] <= 1.0
    assert len(view["offset"]) == 2


@every_example
def test_says_where_its_models_come_from(path: Path) -> None:
    nodes = load(path)["nodes"]
    note = next(node for node in nodes if node["type"] in NOTES)["widgets_values"][0]
    asked = {
        value
        for node in nodes
        for value in node.get("widgets_values", [])
        if isinstance(value, str) and value.endswith(".safetensors")
    }
    models = {model["name"]: model for node in nodes for model in node["properties"].get("models", [])}
    assert asked == set(models)
    for name, model in models.items():
        assert model["url"].endswith(f"/{name}")
        assert model["url"] in note
        assert f"models/{model['directory']}" in note
    assert "`" not in note  # on a coloured note the page renders code in blue on brown


@every_workflow
def test_widgets_are_in_place_and_in_range(path: Path, demo_server: ComfyServer) -> None:
    for node in to_prompt(load(path), demo_server).values():
        for name, kind, options in node_inputs(demo_server.object_info(node["class_type"])):
            value = node["inputs"].get(name)
            if not is_widget(kind) or value is None or isinstance(value, list):
                continue
            where = f"{node['class_type']}.{name} = {value!r}"
            choices = kind if isinstance(kind, list) else options.get("options")
            if kind == CHOICE_WITH_MORE:
                assert value in [choice["key"] for choice in choices], where
            elif choices is not None:
                assert value in choices, where
            else:
                types = {"INT": int, "FLOAT": (int, float), "STRING": str, "BOOLEAN": bool}[kind.partition(",")[0]]
                assert isinstance(value, types), where
                assert isinstance(value, bool) == (kind == "BOOLEAN"), where
                assert options.get("min", value) <= value <= options.get("max", value), where


@every_workflow
def test_server_accepts_it(path: Path, demo_server: ComfyServer) -> None:
    assert refused(demo_server, to_prompt(load(path), demo_server)) == set()


def test_server_would_notice_a_wrong_value(demo_server: ComfyServer) -> None:
    prompt = to_prompt(load(EXAMPLES[0]), demo_server)
    sampler = next(name for name, node in prompt.items() if "steps" in node["inputs"])
    prompt[sampler]["inputs"]["steps"] = -3
    assert refused(demo_server, prompt) == {sampler}


@every_example
def test_is_listed_and_served_with_its_thumbnail(path: Path, server: ComfyServer) -> None:
    assert path.stem in server.get("/api/workflow_templates")[PACK_FOLDER]
    folder = f"/api/workflow_templates/{PACK_FOLDER}"
    assert json.loads(server.fetch(f"{folder}/{quote(path.name)}")) == load(path)
    thumbnail = server.fetch(f"{folder}/{quote(path.stem)}.jpg")
    assert len(thumbnail) < 100_000
    assert Image.open(io.BytesIO(thumbnail)).size == (512, 512)


def test_every_workflow_has_a_thumbnail_that_can_be_made_again() -> None:
    names = {path.stem for path in EXAMPLES}
    assert [int(name[:2]) for name in sorted(names)] == list(range(1, len(names) + 1)), "in the order of need"
    assert 10 < len(names) < 20
    assert sorted(names)[0] == "01 SDXL"
    assert {path.stem for path in (ROOT / "workflows").iterdir() if path.suffix == ".jpg"} == names
    assert list(THUMBNAILS) == sorted(names)


@every_workflow
def test_nodes_of_ours_are_folded_and_have_no_colour(path: Path) -> None:
    """Labels are unreadable on a coloured node."""
    for node in load(path)["nodes"]:
        if node["type"] in MOST_HEIGHT:
            assert not {"color", "bgcolor"} & set(node), node["type"]
            assert not node.get("showAdvanced")
            assert node["size"][1] <= MOST_HEIGHT[node["type"]]


@every_example
def test_thumbnail_has_the_steps_and_says_more_than_the_name(path: Path) -> None:
    thumbnail = THUMBNAILS[path.stem]
    assert not {*thumbnail.purpose.lower().split()} & {*path.stem.lower().split()} - {"to"}
    steps = [merged for run in merged_steps(path.stem) for merged in run]
    note = next(node for node in load(path)["nodes"] if node["type"] in NOTES)["widgets_values"][0]
    said = re.search(r"Of (?:the )?(\d+) steps (?:\*\*balanced\*\* merges )?(\w+)", note)
    if said and len(thumbnail.runs) == 1:
        assert len(steps) == int(said[1])
        assert sum(steps) == int({"two": "2", "five": "5"}.get(said[2], said[2]))
    counts = [node["widgets_values"][2] for node in load(path)["nodes"] if node["type"] == "KSampler"]
    assert not thumbnail.runs or not counts or list(thumbnail.runs) == counts


def test_thumbnails_know_the_preset(pack: Any) -> None:
    core = pack_module("toma_core")
    assert core.UserSettings("balanced").resolved(core.ModelKind.TRANSFORMER).full_step_interval == FULL_STEP_INTERVAL


@every_example
def test_translated_notes_name_the_same_files(path: Path) -> None:
    """The page opens a template with the note of its language (web/notes.js)."""
    (note,) = [node for node in load(path)["nodes"] if node["type"] in NOTES]
    english, theirs = note["widgets_values"][0], note["properties"]["toma_note"]
    assert sorted(theirs) == ["zh", "zh-TW"]
    for text in theirs.values():
        assert re.findall(r"\(https:[^)]*\)|\*\*models/[^*]*", text) == re.findall(
            r"\(https:[^)]*\)|\*\*models/[^*]*", english
        )
        assert text.count("\n") == english.count("\n")
        assert len(re.findall("[\u4e00-\u9fff]", text)) > 60


@every_example
def test_thumbnail_is_of_this_workflow(path: Path) -> None:
    """A new drawing equals the thumbnail up to JPEG compression and the version of the font."""
    saved, made = Image.open(path.with_suffix(".jpg")).convert("RGB"), drawn(path.stem)
    assert ImageStat.Stat(ImageChops.difference(saved, made)).mean < [4.0] * 3, "python -m demo.thumbnails"
    assert path.with_suffix(".jpg").stat().st_size < MOST_BYTES
    boxes = chain(load(path))
    assert boxes[0].endswith("model")
    assert [box for box in boxes if "ToMA" in box]
    assert ("report" in boxes) == ("report" in path.stem)
    assert any(box.endswith("LoRA") for box in boxes) == any("Lora" in node["type"] for node in load(path)["nodes"])


@every_example
def test_nodes_are_the_packs_or_comfyuis_own(path: Path, demo_server: ComfyServer) -> None:
    """The workflow opens without missing nodes on ComfyUI with only this pack, and names the packs of its nodes."""
    for node in load(path)["nodes"]:
        ours = node["type"].startswith("ToMA")
        assert node["properties"]["cnr_id"] == ("toma-token-merge" if ours else "comfy-core")
        if node["type"] not in NOTES:
            module = demo_server.object_info(node["type"])["python_module"]
            newest = "custom_nodes.newer" if node["type"] in newer.NODES else "comfy_extras."
            assert module.startswith(
                (f"custom_nodes.{PACK_FOLDER}",) if ours else ("nodes", "comfy_extras.", newest)
            ), module
