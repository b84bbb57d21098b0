"""Test a real server with the pack and the demo's models: graphs over HTTP, and their results."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import safetensors.torch

from demo.showcase_graphs import DIT, KINDS, LATENT, REPORT, SAMPLER, UNET, Graph, Kind, place_dit, sampling_graph
from scripts.comfy_client import Run
from scripts.comfy_server import ComfyServer
from scripts.comfyui import ROOT

STEPS = 4


@pytest.fixture(scope="module")
def demo_server(pack: Any) -> Iterator[ComfyServer]:
    server = ComfyServer(packs=[ROOT / "demo"])
    place_dit(server.base / "models")
    with server:
        yield server


def graph(kind: Kind = DIT, *, pixels: int = 128, steps: int = 8, seed: int = 5, **settings: Any) -> Graph:
    found = sampling_graph(kind, pixels, steps, seed, merged=True, **settings)
    if kind is UNET:
        found["loader"]["inputs"]["weights"] = "random"  # a smaller model than the trained one
    return found


def latent(server: ComfyServer, run: Run) -> bytes:
    assert run.status == "success", run.error
    file = safetensors.torch.load(server.view(run.outputs[LATENT]["latents"][0]))
    assert file["latent_tensor"].isfinite().all()
    return file["latent_tensor"].numpy().tobytes()


def forget(server: ComfyServer) -> None:
    """Unload all models and drop all cached results. The server may do this only when it runs another prompt, so run
    one."""
    server.post("/free", {"unload_models": True, "free_memory": True})
    server.run({"1": {"class_type": "PreviewAny", "inputs": {"source": "another prompt"}}})


@pytest.mark.compat
@pytest.mark.parametrize("kind", KINDS)
def test_graph_samples_and_reports(demo_server: ComfyServer, kind: Kind) -> None:
    prompt = graph(kind, steps=STEPS, skip_first_blocks=1)
    prompt["shown"] = {"class_type": "PreviewAny", "inputs": {"source": [REPORT, 0]}}
    run = demo_server.run(prompt)
    assert run.status == "success", run.error
    (text,) = run.outputs[REPORT]["text"]
    merged = STEPS if kind is UNET else STEPS - 2  # under the preset, the first and the last step of Flux are full
    assert text.splitlines()[0].endswith(f"{merged} of {STEPS} steps.")
    assert "merged blocks: " in text
    assert run.outputs["shown"]["text"] == [text]
    assert demo_server.view(run.outputs[REPORT]["images"][0]).startswith(b"\x89PNG")
    progress = [data for kind, data in run.messages if kind == "progress" and data["node"] == SAMPLER]
    assert progress[-1]["value"] == progress[-1]["max"] == STEPS
    assert re.search(rf"ToMA: On: .* of the tokens merged, .* blocks, {merged} of {STEPS} steps", demo_server.log())


@pytest.mark.compat
def test_each_prompt_of_a_queue_is_as_if_alone(demo_server: ComfyServer) -> None:
    """Two clients queue prompts at the same time. Each prompt must give the same latent as alone on a newly loaded
    model."""
    server = demo_server
    prompts = {
        "half": graph(),
        "off": graph(ratio=0.0),
        "late": graph(start_percent=0.99),
        "more": graph(ratio=0.7),
        "another size": graph(pixels=96),
        "another seed": graph(seed=6),
        "without": sampling_graph(DIT, 128, 8, 5, merged=False),
        "quality": graph(full_step_interval=2),
        "another model": graph(UNET, ratio=0.6),
    }
    queued = [(name, server.queue(each, client_id=f"client {n % 2}")) for n, (name, each) in enumerate(prompts.items())]
    found = {name: latent(server, server.wait(key)) for name, key in queued}
    assert found["off"] == found["late"] == found["without"]
    assert len(set(found.values())) == len(prompts) - 2
    for name in reversed(prompts):
        forget(server)
        again = server.run(prompts[name])
        assert not any(SAMPLER in data["nodes"] for kind, data in again.messages if kind == "execution_cached")
        assert latent(server, again) == found[name], name


@pytest.mark.compat
def test_a_run_that_is_interrupted_and_repeated(demo_server: ComfyServer) -> None:
    """A run of 10,000 steps takes minutes, so the interrupt comes before its end."""
    wanted = graph(seed=61, steps=10_000)

    def after_some_steps(message: str, data: Any) -> None:
        if message == "progress" and data["node"] == SAMPLER and data["value"] > 2:
            demo_server.interrupt()

    assert demo_server.run(wanted, timeout=900, on_message=after_some_steps).status == "interrupted"
    wanted[SAMPLER]["inputs"]["steps"] = 8
    repeated = latent(demo_server, demo_server.run(wanted))
    forget(demo_server)
    assert latent(demo_server, demo_server.run(wanted)) == repeated
