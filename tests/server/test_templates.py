"""Test templates on a real server, from the input picture to the saved picture or video. A pack of stand-ins provides
nodes that the tested ComfyUI lacks."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from PIL import Image

from scripts.comfy_server import ComfyServer
from scripts.comfyui import ROOT
from testbed import models
from tests import newer
from tests.test_workflows import load, to_prompt

# Class of a loader -> index of the tiny loader's output that replaces the loader's first output. The next outputs of
# the tiny loader replace the second and third output of a checkpoint loader.
LOADERS = {
    "UNETLoader": 0,
    "CheckpointLoaderSimple": 0,
    "CLIPLoader": 1,
    "LTXAVTextEncoderLoader": 1,
    "VAELoader": 2,
    "LTXVAudioVAELoader": 3,
    "LatentUpscaleModelLoader": 4,
}
# Node class -> inputs that make pictures and videos just large enough to be merged.
SIZES = {
    "TextEncodeQwenImage21": {"resolution": 320},
    "EmptyLatentImage": {"width": 160, "height": 160},
    "ImageScale": {"width": 512, "height": 384},
    "EmptyLTXVLatentVideo": {"width": 256, "height": 192, "length": 41},
    "LTXVEmptyLatentAudio": {"frames_number": 41},
    "MiniMaxH3ImageToVideo": {"width": 256, "height": 192, "length": 56},
}


@pytest.fixture(scope="module")
def template_server(pack: Any) -> Iterator[ComfyServer]:
    with ComfyServer(packs=[Path(__file__).with_name("tiny_models.py"), newer.PACK]) as running:
        Image.new("RGB", (256, 320), (90, 120, 150)).save(running.base / "input" / "example.png")
        yield running


def lora_file(server: ComfyServer, kind: str, name: str) -> None:
    """Write a LoRA for a tiny model into the server's folder."""
    weights = {}
    for key, weight in getattr(models, kind)().model.diffusion_model.named_parameters():
        if "blocks.1" in key and key.endswith(".weight") and weight.ndim == 2:
            out, into = weight.shape
            stem = f"diffusion_model.{key.removesuffix('.weight')}"
            weights[f"{stem}.lora_up.weight"] = 0.1 * torch.ones(out, 2)
            weights[f"{stem}.lora_down.weight"] = torch.ones(2, into) / into
    folder = server.base / "models" / "loras"
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.torch.save_file(weights, folder / name)


def tiny(prompt: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return the prompt with one tiny loader in place of all loaders, and with small sizes."""
    outputs: dict[tuple[str, int], list[Any]] = {}
    made: dict[str, Any] = {"tiny": {"class_type": "TinyTemplateModel", "inputs": {"kind": kind}}}
    for number, node in prompt.items():
        if (first := LOADERS.get(node["class_type"])) is None:
            made[number] = {**node, "inputs": {**node["inputs"], **SIZES.get(node["class_type"], {})}}
            continue
        sound = "audio" in str(node["inputs"]) and node["class_type"] == "VAELoader"
        outputs |= {(number, out): ["tiny", 3 if sound else first + out] for out in range(3)}
    for node in made.values():
        for name, value in node["inputs"].items():
            if isinstance(value, list) and tuple(value) in outputs:
                node["inputs"][name] = outputs[tuple(value)]
    return made


@pytest.mark.parametrize(
    ("name", "kind", "merged"),
    [
        ("08 Qwen-Image 2.1 turbo", "qwen_image21", ["5 of 8"]),
        ("09 Qwen-Image 2.1 edit", "qwen_image21", ["17 of 25"]),
        ("11 LTX-2.3 image to video", "ltx_av", ["5 of 8", "1 of 3"]),
        ("12 MiniMax H3 image to video", "h3", ["5 of 8"]),
    ],
)
def test_template_runs_to_its_end(name: str, kind: str, merged: list[str], template_server: ComfyServer) -> None:
    """merged: the number of merged steps of each sampler, as the template's note says."""
    prompt = to_prompt(load(ROOT / "workflows" / f"{name}.json"), template_server)
    for node in prompt.values():
        if node["class_type"].startswith("Lora"):
            lora_file(template_server, kind, node["inputs"]["lora_name"])
    before = len(template_server.log())
    run = template_server.run(tiny(prompt, kind), timeout=900)
    assert run.status == "success", run.error
    log = template_server.log()[before:]
    assert re.findall(r"ToMA: On: 50 % of the tokens merged, 4 of 4 blocks, (\d+ of \d+) steps", log) == merged
    assert "lora key not loaded" not in log
    (saved,) = [outputs for outputs in run.outputs.values() if "images" in outputs or "videos" in outputs]
    file, *_ = saved.get("videos") or saved["images"]
    assert len(template_server.view(file)) > 100
