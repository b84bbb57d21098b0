"""Make prompts fail on a real server. Afterwards the server samples the same latent as the tests' own process,
and no object of the failed run is alive.

lab.py has the nodes that fail. ComfyUI keeps the same patched MODEL in its cache during and after each fault.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from demo.showcase_graphs import DIT, sampling_graph
from scripts.comfy_server import ComfyServer
from tests.stress import prompt
from tests.stress.served import census, saved_latent

CHANNELS = {"unet": 4, "flux": 16}
# Kind of model -> a fault, which waits in the second step until the prompt is interrupted.
HOLD = {"unet": {"fault": "hold", "calls": 40}, "flux": {"fault": "hold", "calls": 9}}


def graph(kind: str, fault: str = "none", calls: int = 0) -> dict[str, Any]:
    """Return a graph that samples as prompt.py does in the case "served", with a fault of LabLatent."""
    nodes = sampling_graph(DIT, 64, prompt.STEPS, 5, merged=True, **prompt.CASES["served"] or {})
    for name in ("scene", "decode", "picture", "report"):
        del nodes[name]
    latent = {"channels": CHANNELS[kind], "side": prompt.SIDE, "fault": fault, "calls": calls}
    nodes["loader"] = {"class_type": "LabModel", "inputs": {"family": kind, "seed": 0, "faulty": True}}
    nodes["empty"] = {"class_type": "LabLatent", "inputs": latent}
    nodes["sampler"]["inputs"].update(positive=["loader", 1], negative=["loader", 2], cfg=3.0)
    return nodes


@pytest.fixture(params=list(CHANNELS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def good(lab: ComfyServer, latents: Any) -> Callable[[str], int]:
    """good(kind): sample on the server. The latent must equal the one of this process, and no object of the run may be
    left. Return the server's number of live tensors."""

    def check(kind: str) -> int:
        assert saved_latent(lab, lab.run(graph(kind))) == latents(kind)["served"]
        return int(census(lab)["tensors"])

    return check


@pytest.fixture(scope="module")
def at_first(good: Any) -> dict[str, int]:
    """Count the tensors of a server that has run each model without a fault."""
    return {kind: good(kind) for kind in (*CHANNELS, *CHANNELS)}


@pytest.fixture
def survived(at_first: dict[str, int], good: Any, kind: str) -> Iterator[None]:
    """After the test, sample without a fault. The latent must be as expected, and no additional tensors may be left."""
    yield
    assert good(kind) <= at_first[kind]


@pytest.mark.parametrize("fault", ["error", "out of memory"])
def test_fault_inside_a_merged_block(lab: ComfyServer, kind: str, fault: str, survived: None) -> None:
    """ComfyUI reports the fault on the sampler node. After an out-of-memory error, ComfyUI unloads every model."""
    seen = len(lab.log())
    run = lab.run(graph(kind, fault=fault, calls=9))
    assert run.status == "error"
    assert run.error is not None
    assert run.error["node_type"] == "KSampler"
    assert ("patch failed" if fault == "error" else "CUDA out of memory") in run.error["exception_message"]
    assert ("Got an OOM, unloading all loaded models." in lab.log()[seen:]) is (fault == "out of memory")


def test_interrupt_while_sampling(lab: ComfyServer, kind: str, survived: None) -> None:
    def after_a_step(message: str, data: Any) -> None:
        if message == "progress" and data["node"] == "sampler" and data["value"] == 1:
            lab.interrupt()

    assert lab.run(graph(kind, **HOLD[kind]), on_message=after_a_step).status == "interrupted"
