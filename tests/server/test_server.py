"""Test a real server with the pack and small models: graphs over HTTP, and their results."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

from scripts.comfy_client import Run
from scripts.comfy_server import ComfyServer

STEPS = 4


@pytest.fixture(scope="module")
def tiny_server(pack: Any) -> Iterator[ComfyServer]:
    with ComfyServer(packs=[Path(__file__).with_name("tiny_models.py")]) as running:
        yield running


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


def advanced(server: ComfyServer, **settings: Any) -> dict[str, Any]:
    """Return a ToMAAdvanced node with the server's defaults, except for `settings`."""
    required = server.object_info("ToMAAdvanced")["input"]["required"]
    defaults = {name: spec[1]["default"] for name, spec in required.items() if name != "model"}
    return {"class_type": "ToMAAdvanced", **defaults, "min_tokens": 16, **settings}


def latent(server: ComfyServer, run: Run) -> bytes:
    assert run.status == "success", run.error
    file = safetensors.torch.load(server.view(run.outputs["7"]["latents"][0]))
    assert file["latent_tensor"].isfinite().all()
    return file["latent_tensor"].numpy().tobytes()


def forget(server: ComfyServer) -> None:
    """Unload all models and drop all cached results."""
    server.post("/free", {"unload_models": True, "free_memory": True})


@pytest.mark.compat
@pytest.mark.parametrize("kind", ["unet", "flux"])
def test_graph_samples_and_reports(tiny_server: ComfyServer, kind: str) -> None:
    settings = advanced(tiny_server, skip_first_blocks=1)
    run = tiny_server.run(graph(settings, kind))
    assert run.status == "success", run.error
    (text,) = run.outputs["8"]["text"]
    merged = STEPS if kind == "unet" else STEPS - 2  # under the preset, the first and the last step of Flux are full
    assert text.splitlines()[0].endswith(f"{merged} of {STEPS} steps.")
    assert "merged blocks: " in text
    assert run.outputs["9"]["text"] == [text]
    assert tiny_server.view(run.outputs["8"]["images"][0]).startswith(b"\x89PNG")
    progress = [data for kind, data in run.messages if kind == "progress" and data["node"] == "5"]
    assert progress[-1]["value"] == progress[-1]["max"] == STEPS
    assert re.search(rf"ToMA: On: .* of the tokens merged, .* blocks, {merged} of {STEPS} steps", tiny_server.log())


@pytest.mark.compat
def test_each_prompt_of_a_queue_is_as_if_alone(tiny_server: ComfyServer) -> None:
    """Two clients queue prompts at the same time. Then each prompt runs alone, on a newly loaded model."""
    server = tiny_server
    prompts = {
        "half": graph(advanced(server), "flux", steps=8),
        "off": graph({"class_type": "ToMA", "ratio": 0.0, "preset": "balanced"}, "flux", steps=8),
        "late": graph(advanced(server, start_percent=0.99), "flux", steps=8),
        "more": graph(advanced(server, ratio=0.7), "flux", steps=8),
        "another size": graph(advanced(server), "flux", size=144, steps=8),
        "another seed": graph(advanced(server), "flux", seed=6, steps=8),
        "without": graph(None, "flux", steps=8),
        "quality": graph(advanced(server, full_step_interval=2), "flux", steps=8),
        "another model": graph(advanced(server, ratio=0.6)),
    }
    queued = [(name, server.queue(each, client_id=f"client {n % 2}")) for n, (name, each) in enumerate(prompts.items())]
    found = {name: latent(server, server.wait(key)) for name, key in queued}
    assert found["off"] == found["late"] == found["without"]
    assert len(set(found.values())) == len(prompts) - 2
    for name in reversed(prompts):
        forget(server)
        again = server.run(prompts[name])
        assert not any("5" in data["nodes"] for kind, data in again.messages if kind == "execution_cached")
        assert latent(server, again) == found[name], name


@pytest.mark.compat
def test_a_run_that_is_interrupted_and_repeated(tiny_server: ComfyServer) -> None:
    """A run of 10,000 steps takes minutes, so the interrupt comes before its end."""
    wanted = graph(advanced(tiny_server), "flux", seed=61, steps=10_000)

    def after_some_steps(message: str, data: Any) -> None:
        if message == "progress" and data["node"] == "5" and data["value"] > 2:
            tiny_server.interrupt()

    assert tiny_server.run(wanted, timeout=900, on_message=after_some_steps).status == "interrupted"
    wanted["5"]["inputs"]["steps"] = 8
    repeated = latent(tiny_server, tiny_server.run(wanted))
    forget(tiny_server)
    assert latent(tiny_server, tiny_server.run(wanted)) == repeated
