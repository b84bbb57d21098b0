"""Make prompts fail on a real server. Afterwards the server samples the same latent as a fresh process, and no object
of the failed run is alive.

lab.py has the nodes that fail. Before and after each fault, ComfyUI has the same patched MODEL in its cache.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from demo.showcase_graphs import LATENT
from scripts.comfy_client import Run
from scripts.comfy_server import ComfyServer
from tests.stress import prompt

KINDS = {"unet": 4, "flux": 16}
# By kind of model: a fault that delays each call of attention by `calls` milliseconds. A run then takes two seconds and
# can be interrupted.
SLOW = {"unet": {"fault": "slow", "calls": 20}, "flux": {"fault": "slow", "calls": 110}}


@pytest.fixture(scope="module")
def server(pack: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyServer]:
    """Start a server of this file, which a test kills and restarts."""
    base = tmp_path_factory.mktemp("server")
    nodes = Path(__file__).parent / "lab.py"
    # Use PyTorch's attention and one thread, as the fresh process does, because results depend on the order of sums.
    environ = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    flags = ["--use-pytorch-cross-attention"]
    with ComfyServer(base=base, packs=[nodes], environ=environ, flags=flags) as running:
        yield running


def node(class_type: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": class_type, "inputs": inputs}


@pytest.fixture(scope="module")
def graph(server: ComfyServer) -> Callable[..., dict[str, Any]]:
    """graph(kind, case, fault, calls): return a graph that samples as prompt.py does, with a fault of LabLatent."""
    required = server.object_info("ToMAAdvanced")["input"]["required"]
    defaults = {name: spec[1]["default"] for name, spec in required.items() if name != "model"}

    def make(kind: str, case: str = "stack", fault: str = "none", calls: int = 0) -> dict[str, Any]:
        chosen = prompt.CASES[case] or {}
        settings = {n: ("off", "on")[v] if isinstance(v, bool) else v for n, v in chosen.items()}
        links = {"positive": ["model", 1], "negative": ["model", 2], "latent_image": ["empty", 0]}
        sampler = {"sampler_name": "euler", "scheduler": "simple", "denoise": 1.0}
        nodes = {
            "model": node("LabModel", family=kind, seed=0, faulty=True),
            "empty": node("LabLatent", channels=KINDS[kind], side=prompt.SIDE, fault=fault, calls=calls),
            "sampler": node(
                "KSampler",
                model=["toma" if settings else "model", 0],
                seed=5,
                steps=prompt.STEPS,
                cfg=3.0,
                **links,
                **sampler,
            ),
            LATENT: node("SaveLatent", samples=["sampler", 0], filename_prefix="fault"),
        }
        if settings:
            nodes["toma"] = node("ToMAAdvanced", model=["model", 0], **{**defaults, **settings})
        return nodes

    return make


@pytest.fixture(scope="module")
def sampled(server: ComfyServer, saved_latent: Any) -> Callable[[Run], str]:
    return functools.partial(saved_latent, server)


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def good(server: ComfyServer, graph: Any, sampled: Any, fresh: Any, census: Any) -> Callable[[str], int]:
    """good(kind): check that a latent equals the latent of a fresh process, and that no object of the run is left.
    Return the server's number of tensors."""

    def check(kind: str) -> int:
        assert sampled(server.run(graph(kind))) == fresh[kind]["stack"]
        return int(census(server)["tensors"])

    return check


@pytest.fixture(scope="module")
def at_first(good: Any) -> dict[str, int]:
    """Count the tensors of a server that has run each model without a fault."""
    return {kind: good(kind) for kind in (*KINDS, *KINDS)}


@pytest.fixture
def survived(at_first: dict[str, int], good: Any, kind: str) -> Iterator[None]:
    """Check after the test that the next latent equals the latent of a fresh process. The test must leave no additional
    tensors."""
    yield
    assert good(kind) <= at_first[kind]


def running(server: ComfyServer) -> list[str]:
    return [entry[1] for entry in server.get("/queue")["queue_running"]]


def wait_until_it_samples(server: ComfyServer, prompt_id: str) -> None:
    """Wait until a slow prompt samples. Sampling then takes at least another second."""
    deadline = time.monotonic() + 180
    while prompt_id not in running(server):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.3)


@pytest.mark.parametrize("fault", ["error", "out of memory"])
def test_fault_inside_a_merged_block(server: ComfyServer, graph: Any, kind: str, fault: str, survived: None) -> None:
    """ComfyUI reports the fault on the sampler node. After an out-of-memory error it unloads every model."""
    seen = len(server.log())
    run = server.run(graph(kind, fault=fault, calls=9))
    assert run.status == "error"
    assert run.error is not None
    assert run.error["node_type"] == "KSampler"
    assert ("patch failed" if fault == "error" else "CUDA out of memory") in run.error["exception_message"]
    assert ("Got an OOM, unloading all loaded models." in server.log()[seen:]) is (fault == "out of memory")


def test_interrupt_while_sampling(server: ComfyServer, graph: Any, kind: str, survived: None) -> None:
    def after_a_step(message: str, data: Any) -> None:
        if message == "progress" and data["node"] == "sampler" and data["value"] == 1:
            server.interrupt()

    run = server.run(graph(kind, **SLOW[kind]), on_message=after_a_step)
    assert run.status == "interrupted"


def test_interrupt_between_prompts(server: ComfyServer, kind: str, survived: None) -> None:
    server.interrupt()


@pytest.mark.parametrize("asked", [{"unload_models": True}, {"free_memory": True, "unload_models": True}], ids=str)
def test_free_memory_while_sampling(
    server: ComfyServer, graph: Any, sampled: Any, fresh: Any, kind: str, asked: Any, survived: None
) -> None:
    """ComfyUI frees memory at the end of the prompt. The next prompt then loads or builds its model again."""
    prompt_id = server.queue(graph(kind, **SLOW[kind]))
    wait_until_it_samples(server, prompt_id)
    assert running(server) == [prompt_id]
    server.post("/free", asked)
    assert sampled(server.wait(prompt_id)) == fresh[kind]["stack"]
    server.post("/free", asked)


def test_prompt_edited_while_queued(
    server: ComfyServer, graph: Any, sampled: Any, fresh: Any, kind: str, survived: None
) -> None:
    """A prompt waits behind a slow prompt. It is removed, and queued again with other settings of ToMA."""
    first = server.queue(graph(kind, "module", **SLOW[kind]))
    taken_back = server.queue(graph(kind, "stack"))
    server.post("/queue", {"delete": [taken_back]})
    edited = server.queue(graph(kind, "detail"))
    off = server.queue(graph(kind, "plain"))
    found = {case: server.wait(key) for case, key in (("module", first), ("detail", edited), ("plain", off))}
    assert {case: sampled(run) for case, run in found.items()} == {case: fresh[kind][case] for case in found}
    assert server.get(f"/history/{taken_back}") == {}


def test_killed_while_sampling_and_started_again(server: ComfyServer, graph: Any, good: Any) -> None:
    """The new server uses the folders of the killed server. Its first prompt must be merged."""
    prompt_id = server.queue(graph("unet", **SLOW["unet"]))
    wait_until_it_samples(server, prompt_id)
    assert server.process is not None
    server.process.kill()
    server.process.wait()
    server.stop()
    server.start()
    for kind in KINDS:
        good(kind)
