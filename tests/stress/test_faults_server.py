"""Make prompts fail on a real server. Afterwards the server samples the same latent as a fresh process, and no object
of the failed run is alive.

lab.py has the nodes that fail. During and after each fault, ComfyUI has the same patched MODEL in its cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from demo.showcase_graphs import DIT, sampling_graph
from scripts.comfy_client import Run
from scripts.comfy_server import ComfyServer
from tests.stress import prompt
from tests.stress.served import census, saved_latent

CHANNELS = {"unet": 4, "flux": 16}
# By kind of model: a fault in the second step, which waits for an interrupt or for the file `go`.
HOLD = {"unet": {"fault": "hold", "calls": 40}, "flux": {"fault": "hold", "calls": 9}}


def graph(kind: str, case: str = "stack", fault: str = "none", calls: int = 0) -> dict[str, Any]:
    """Return a graph that samples as prompt.py does, with a fault of LabLatent."""
    chosen = prompt.CASES[case]
    nodes = sampling_graph(DIT, 64, prompt.STEPS, 5, merged=chosen is not None, **(chosen or {}))
    for name in ("scene", "decode", "picture", "report"):
        nodes.pop(name, None)
    latent = {"channels": CHANNELS[kind], "side": prompt.SIDE, "fault": fault, "calls": calls}
    nodes["loader"] = {"class_type": "LabModel", "inputs": {"family": kind, "seed": 0, "faulty": True}}
    nodes["empty"] = {"class_type": "LabLatent", "inputs": latent}
    nodes["sampler"]["inputs"].update(positive=["loader", 1], negative=["loader", 2], cfg=3.0)
    return nodes


@pytest.fixture(params=list(CHANNELS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def good(lab: ComfyServer, fresh: Any) -> Callable[[str], int]:
    """good(kind): check that a latent equals the latent of a fresh process, and that no object of the run is left.
    Return the server's number of tensors."""

    def check(kind: str) -> int:
        assert saved_latent(lab, lab.run(graph(kind))) == fresh[kind]["stack"]
        return int(census(lab)["tensors"])

    return check


@pytest.fixture(scope="module")
def at_first(good: Any) -> dict[str, int]:
    """Count the tensors of a server that has run each model without a fault."""
    return {kind: good(kind) for kind in (*CHANNELS, *CHANNELS)}


@pytest.fixture
def survived(at_first: dict[str, int], good: Any, kind: str) -> Iterator[None]:
    """Check after the test that the next latent equals the latent of a fresh process. The test must leave no additional
    tensors."""
    yield
    assert good(kind) <= at_first[kind]


@pytest.fixture
def go(lab: ComfyServer) -> Iterator[Path]:
    """Return the path of the file that ends the fault "hold"."""
    path = lab.base / "input" / "go"
    yield path
    path.unlink()


def held(server: ComfyServer, kind: str, act: Callable[[], object]) -> Run:
    """Run a prompt that is held in its second step. Call `act` after its first step."""

    def after_a_step(message: str, data: Any) -> None:
        if message == "progress" and data["node"] == "sampler" and data["value"] == 1:
            act()

    return server.run(graph(kind, **HOLD[kind]), on_message=after_a_step)


@pytest.mark.parametrize("fault", ["error", "out of memory"])
def test_fault_inside_a_merged_block(lab: ComfyServer, kind: str, fault: str, survived: None) -> None:
    """ComfyUI reports the fault on the sampler node. After an out-of-memory error it unloads every model."""
    seen = len(lab.log())
    run = lab.run(graph(kind, fault=fault, calls=9))
    assert run.status == "error"
    assert run.error is not None
    assert run.error["node_type"] == "KSampler"
    assert ("patch failed" if fault == "error" else "CUDA out of memory") in run.error["exception_message"]
    assert ("Got an OOM, unloading all loaded models." in lab.log()[seen:]) is (fault == "out of memory")


def test_interrupt_while_sampling(lab: ComfyServer, kind: str, survived: None) -> None:
    assert held(lab, kind, lab.interrupt).status == "interrupted"


@pytest.mark.parametrize("asked", [{"unload_models": True}, {"free_memory": True, "unload_models": True}], ids=str)
def test_free_memory_while_sampling(
    lab: ComfyServer, fresh: Any, kind: str, asked: Any, go: Path, survived: None
) -> None:
    """ComfyUI frees memory at the end of the prompt. The next prompt then loads or builds its model again."""
    run = held(lab, kind, lambda: (lab.post("/free", asked), go.touch()))
    assert saved_latent(lab, run) == fresh[kind]["stack"]


def test_prompt_edited_while_queued(lab: ComfyServer, fresh: Any, kind: str, go: Path, survived: None) -> None:
    """A prompt waits behind a held prompt. It is removed, and queued again with other settings of ToMA."""
    first = lab.queue(graph(kind, "module", **HOLD[kind]))
    taken_back = lab.queue(graph(kind))
    lab.post("/queue", {"delete": [taken_back]})
    queued = {"module": first, "detail": lab.queue(graph(kind, "detail")), "plain": lab.queue(graph(kind, "plain"))}
    go.touch()
    latents = {case: saved_latent(lab, lab.wait(prompt_id)) for case, prompt_id in queued.items()}
    assert latents == {case: fresh[kind][case] for case in queued}
    assert lab.get(f"/history/{taken_back}") == {}
