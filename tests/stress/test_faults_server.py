"""Faults of prompts on a real server: afterwards the server's result equals that of a fresh process, and no object of
the run is alive.

Before, during and after each fault ComfyUI has the same patched MODEL in its cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from scripts.comfy_server import ComfyServer
from tests.server.graphs import advanced, node, sampling

# Milliseconds for each call of attention, so that a run takes two seconds and can be interrupted.
SLOW = {"unet": {"fault": "slow", "calls": 20}, "flux": {"fault": "slow", "calls": 110}}


@pytest.fixture(scope="module")
def graph(lab: ComfyServer, prompt: Any) -> Callable[..., dict[str, Any]]:
    """graph(kind, case, fault, calls): return the prompt of prompt.py as a graph with a fault."""

    def make(kind: str, case: str = "stack", fault: str = "none", calls: int = 0) -> dict[str, Any]:
        chosen = prompt.CASES[case]
        settings = {n: ("off", "on")[v] if isinstance(v, bool) else v for n, v in (chosen or {}).items()}
        toma = advanced(lab, **settings) if chosen else None
        made = sampling(kind, toma, size=8 * prompt.SIDE, steps=prompt.STEPS)
        made["1"]["inputs"]["faulty"] = True
        made["2"] = node("LabFault", samples=["3", 0], fault=fault, calls=calls)
        made["5"]["inputs"]["latent_image"] = ["2", 0]
        return made

    return make


@pytest.fixture(params=list(SLOW))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def good(lab: ComfyServer, graph: Any, saved_latent: Any, fresh: Any, census: Any) -> Callable[[str], int]:
    """good(kind): check that a prompt's result is that of a fresh process and leaves no objects; return the bytes of
    all tensors."""

    def check(kind: str) -> int:
        assert saved_latent(lab.run(graph(kind))) == fresh[kind]["stack"]
        return int(census(lab)["tensor_bytes"])

    return check


@pytest.fixture(scope="module")
def at_first(good: Any) -> dict[str, int]:
    """Count the bytes of a server that has run each model once without a fault."""
    return {kind: good(kind) for kind in (*SLOW, *SLOW)}


@pytest.fixture
def survived(lab: ComfyServer, graph: Any, at_first: dict[str, int], good: Any, kind: str) -> Iterator[None]:
    """Check that the next result is that of a fresh process, and that tensors take no more bytes than at first."""
    assert lab.run(graph(kind)).status == "success"
    yield
    assert good(kind) <= at_first[kind]


def running(lab: ComfyServer) -> list[str]:
    return [entry[1] for entry in lab.get("/queue")["queue_running"]]


def wait_until_it_samples(lab: ComfyServer, prompt_id: str) -> None:
    """Wait until a slow prompt samples; more than a second then remains."""
    deadline = time.monotonic() + 180
    while prompt_id not in running(lab):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.3)


@pytest.mark.parametrize("fault", ["error", "out of memory"])
def test_fault_inside_a_merged_block(lab: ComfyServer, graph: Any, kind: str, fault: str, survived: None) -> None:
    """ComfyUI reports the fault on the sampler. After out-of-memory it unloads every model."""
    seen = len(lab.log())
    run = lab.run(graph(kind, fault=fault, calls=9))
    assert run.status == "error"
    assert run.error is not None
    assert run.error["node_type"] == "KSampler"
    assert ("patch failed" if fault == "error" else "CUDA out of memory") in run.error["exception_message"]
    assert ("Got an OOM, unloading all loaded models." in lab.log()[seen:]) is (fault == "out of memory")


def test_interrupt_while_sampling(lab: ComfyServer, graph: Any, kind: str, survived: None) -> None:
    def after_a_step(message: str, data: Any) -> None:
        if message == "progress" and data["node"] == "5" and data["value"] == 1:
            lab.interrupt()

    run = lab.run(graph(kind, **SLOW[kind]), on_message=after_a_step)
    assert run.status == "interrupted"


def test_interrupt_between_prompts(lab: ComfyServer, kind: str, survived: None) -> None:
    lab.interrupt()


@pytest.mark.parametrize("asked", [{"unload_models": True}, {"free_memory": True, "unload_models": True}], ids=str)
def test_free_memory_while_sampling(
    lab: ComfyServer, graph: Any, saved_latent: Any, fresh: Any, kind: str, asked: Any, survived: None
) -> None:
    """ComfyUI frees memory at the end of the prompt, and the next prompt loads or makes its model again."""
    prompt_id = lab.queue(graph(kind, **SLOW[kind]))
    wait_until_it_samples(lab, prompt_id)
    assert running(lab) == [prompt_id]
    lab.post("/free", asked)
    assert saved_latent(lab.wait(prompt_id)) == fresh[kind]["stack"]
    lab.post("/free", asked)


def test_prompt_edited_while_queued(
    lab: ComfyServer, graph: Any, saved_latent: Any, fresh: Any, kind: str, survived: None
) -> None:
    """A prompt that waits behind a slow one is removed, and queued again with other settings of the same node."""
    first = lab.queue(graph(kind, "module", **SLOW[kind]))
    taken_back = lab.queue(graph(kind, "stack"))
    lab.post("/queue", {"delete": [taken_back]})
    edited = lab.queue(graph(kind, "detail"))
    off = lab.queue(graph(kind, "plain"))
    found = {case: lab.wait(key) for case, key in (("module", first), ("detail", edited), ("plain", off))}
    assert {case: saved_latent(run) for case, run in found.items()} == {case: fresh[kind][case] for case in found}
    assert lab.get(f"/history/{taken_back}") == {}


def test_killed_while_sampling_and_started_again(lab: ComfyServer, graph: Any, good: Any) -> None:
    """The server is killed without shutdown. The new process uses the same folders, and its first prompt is merged."""
    prompt_id = lab.queue(graph("unet", **SLOW["unet"]))
    wait_until_it_samples(lab, prompt_id)
    assert lab.process is not None
    lab.process.kill()
    lab.process.wait()
    lab.stop()
    lab.start()
    for kind in SLOW:
        good(kind)
