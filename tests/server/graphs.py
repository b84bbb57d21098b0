from __future__ import annotations

from typing import Any

import safetensors.torch

from scripts.comfy_client import Run
from scripts.comfy_server import ComfyServer

STEPS = 4


def node(class_type: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": class_type, "inputs": inputs}


def graph(
    toma: dict[str, Any] | None, kind: str = "unet", *, seed: int = 5, size: int = 192, steps: int = STEPS
) -> dict[str, Any]:
    """Return the graph loader -> ToMA -> KSampler -> report and saved latent. toma: class and inputs of the ToMA node,
    or None to omit this node and the report."""
    empty = "EmptyLatentImage" if kind == "unet" else "EmptySD3LatentImage"
    inputs = {"positive": ["1", 1], "negative": ["1", 2], "latent_image": ["3", 0], "seed": seed, "steps": steps}
    how = {"cfg": 3.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0}
    nodes = {
        "1": node("TinyModel", kind=kind),
        "3": node(empty, width=size, height=size, batch_size=1),
        "5": node("KSampler", model=["4" if toma else "1", 0], **inputs, **how),
        "7": node("SaveLatent", samples=["5", 0], filename_prefix="test"),
    }
    if toma:
        nodes["4"] = node(model=["1", 0], **toma)
        nodes["8"] = node("ToMAReport", model=["4", 0], latent=["5", 0])
        nodes["9"] = node("PreviewAny", source=["8", 0])
    return nodes


def simple(ratio: float = 0.5) -> dict[str, Any]:
    return {"class_type": "ToMA", "ratio": ratio, "preset": "balanced"}


def advanced(server: ComfyServer, **settings: Any) -> dict[str, Any]:
    """Return a ToMAAdvanced node with the server's defaults, except for `settings`."""
    required = server.object_info("ToMAAdvanced")["input"]["required"]
    defaults = {name: spec[1]["default"] for name, spec in required.items() if name != "model"}
    return {"class_type": "ToMAAdvanced", **defaults, "min_tokens": 16, **settings}


def latent(server: ComfyServer, run: Run, node_id: str = "7") -> bytes:
    assert run.status == "success", run.error
    file = safetensors.torch.load(server.view(run.outputs[node_id]["latents"][0]))
    assert file["latent_tensor"].isfinite().all()
    return file["latent_tensor"].numpy().tobytes()
