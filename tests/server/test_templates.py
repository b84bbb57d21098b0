"""Test the templates of videos with sound on a real server, from the picture to the saved video."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from scripts.comfy_server import ComfyServer
from scripts.comfyui import ROOT
from testbed import models
from tests.test_workflows import load, to_prompt

PACK = Path(__file__).with_name("tiny_video.py")
# By class of loader: index of the tiny loader's output that replaces the loader's first output. The tiny loader's next
# outputs replace the second and third output of a checkpoint loader.
LOADERS = {
    "UNETLoader": 0,
    "CheckpointLoaderSimple": 0,
    "CLIPLoader": 1,
    "LTXAVTextEncoderLoader": 1,
    "VAELoader": 2,
    "LTXVAudioVAELoader": 3,
    "LatentUpscaleModelLoader": 4,
}
# By node class: inputs for videos that are just large enough to be merged.
SIZES = {
    "ImageScale": {"width": 512, "height": 384},
    "EmptyLTXVLatentVideo": {"width": 256, "height": 192, "length": 41},
    "LTXVEmptyLatentAudio": {"frames_number": 41},
    "MiniMaxH3ImageToVideo": {"width": 256, "height": 192, "length": 56},
}


@pytest.fixture(scope="module")
def video_server(pack: Any) -> Iterator[ComfyServer]:
    """Run a server with a loader of tiny video models and with an input picture."""
    from PIL import Image

    with ComfyServer(packs=[PACK]) as running:
        Image.new("RGB", (64, 48), (90, 120, 150)).save(running.base / "input" / "example.png")
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
    made: dict[str, Any] = {"tiny": {"class_type": "TinyVideo", "inputs": {"kind": kind}}}
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
    [("11 LTX-2.3 image to video", "ltx_av", ["5 of 8", "1 of 3"]), ("12 MiniMax H3 image to video", "h3", ["5 of 8"])],
)
def test_template_runs_to_its_video(name: str, kind: str, merged: list[str], video_server: ComfyServer) -> None:
    """merged: the number of merged steps of each sampler, as the template's note says."""
    prompt = to_prompt(load(ROOT / "workflows" / f"{name}.json"), video_server)
    (lora,) = [node["inputs"]["lora_name"] for node in prompt.values() if node["class_type"].startswith("Lora")]
    lora_file(video_server, kind, lora)
    before = len(video_server.log())
    run = video_server.run(tiny(prompt, kind), timeout=240)
    assert run.status == "success", run.error
    log = video_server.log()[before:]
    assert re.findall(r"ToMA: On: 50 % of the tokens merged, 4 of 4 blocks, (\d of \d) steps", log) == merged
    assert "lora key not loaded" not in log
    (saved,) = [outputs for outputs in run.outputs.values() if "images" in outputs or "videos" in outputs]
    (file,) = saved.get("videos") or saved["images"]
    assert len(video_server.view(file)) > 1000
