"""Test the templates of Qwen-Image 2.1 on a real server, from the graph to the picture. A pack of stand-ins provides
nodes that the tested ComfyUI lacks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from PIL import Image

from scripts.comfy_server import ComfyServer
from scripts.comfyui import ROOT
from tests.newer import newer_pack
from tests.test_workflows import load, to_prompt

LOADERS = {"UNETLoader": 0, "CLIPLoader": 1, "VAELoader": 2}
# By node class: inputs for pictures that are just large enough to be merged.
SIZES = {"TextEncodeQwenImage21": {"resolution": 320}, "EmptyLatentImage": {"width": 160, "height": 160}}


@pytest.fixture(scope="module")
def image_server(tmp_path_factory: pytest.TempPathFactory, pack: Any) -> Iterator[ComfyServer]:
    with ComfyServer(packs=[newer_pack(tmp_path_factory.mktemp("packs"))]) as running:
        Image.new("RGB", (256, 320), (90, 120, 150)).save(running.base / "input" / "example.png")
        yield running


@pytest.mark.parametrize(
    ("name", "merged"), [("09 Qwen-Image 2.1 edit", "18 of 25"), ("08 Qwen-Image 2.1 turbo", "5 of 8")]
)
def test_template_runs_to_its_picture(name: str, merged: str, image_server: ComfyServer) -> None:
    """merged: the number of merged steps, as the template's note says."""
    prompt = to_prompt(load(ROOT / "workflows" / f"{name}.json"), image_server)
    loaded = {number: LOADERS.get(node["class_type"]) for number, node in prompt.items()}
    made: dict[str, Any] = {"tiny": {"class_type": "TinyQwenImage21", "inputs": {}}}
    for number, node in prompt.items():
        if loaded[number] is None:
            inputs = {**node["inputs"], **SIZES.get(node["class_type"], {})}
            for key, value in inputs.items():
                if isinstance(value, list) and loaded.get(value[0]) is not None:
                    inputs[key] = ["tiny", loaded[value[0]]]
            made[number] = {**node, "inputs": inputs}
    before = len(image_server.log())
    run = image_server.run(made, timeout=240)
    assert run.status == "success", run.error
    log = image_server.log()[before:]
    assert re.findall(r"ToMA: On: 50 % of the tokens merged, 4 of 4 blocks, (\d+ of \d+) steps", log) == [merged]
    (saved,) = [outputs["images"] for outputs in run.outputs.values() if "images" in outputs]
    assert len(image_server.view(saved[0])) > 100
