"""Provide fixtures of the stress tests: models, their latents without a fault, and a server."""

import functools
import gc
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from demo.showcase_graphs import DIT, REPORT, place_dit, sampling_graph
from scripts.comfy_pack import pack_module
from scripts.comfy_server import ComfyServer
from scripts.comfyui import ROOT
from testbed import models
from tests.nodes import conftest as nodes
from tests.stress import prompt
from tests.stress.served import saved_latent

HERE = Path(__file__).parent
one_thread, left_untouched = nodes.one_thread, nodes.left_untouched
shared, model_of, attach, stats_of = nodes.shared, nodes.model_of, nodes.attach, nodes.stats_of
plan_calls, record = nodes.plan_calls, nodes.record
os.environ.setdefault("TOMA_FUZZ", "300")  # number of cases in test_fuzz.py; test_damaged.py tries fewer files


@pytest.fixture(scope="session")
def new_model(pack: ModuleType) -> Callable[[str], Any]:
    """new_model(kind): make a small model as lab.py does in the process of the server."""
    return lambda kind: getattr(models, kind)()


@pytest.fixture(params=models.FAMILIES)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model(model_of: Callable[[str], Any], kind: str) -> Any:
    return model_of(kind)


@pytest.fixture(scope="session")
def latents(model_of: Callable[[str], Any]) -> Callable[[str], dict[str, str]]:
    """latents(kind): return the hash of a model's latent for each case of prompt.py. The first call for a kind samples
    the latents."""

    def sampled(kind: str) -> dict[str, str]:
        return {case: prompt.digest(prompt.sample(prompt.patched(model_of(kind), case))) for case in prompt.CASES}

    return functools.cache(sampled)


@dataclass
class Rig:
    """The small model of a family, with checks that no hook and no object of a run is left after a fault."""

    kind: str
    model: Any
    expected: dict[str, str]  # by case of prompt.py: the hash of the latent without a fault

    def patched(self, case: str = "stack", model: Any = None, **settings: Any) -> Any:
        return prompt.patched(model or self.model, case, **settings)

    def sampled(self, model: Any, **options: Any) -> str:
        return prompt.digest(prompt.sample(model, **options))

    def tensors(self) -> int:
        """Count the live tensors of the process."""
        gc.collect()
        return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())

    def check_clean(self) -> None:
        """Check that no hook is left, and that no object of a run is alive."""
        assert nodes.hooked(self.model) == []
        gc.collect()
        run, merge = pack_module("toma_core.run"), pack_module("toma_core.merge")
        kinds = run.RunState, run.Cache, merge.MergePlan, pack_module("nodes.adapters.sampling_run").SamplingRun
        assert [o for o in gc.get_objects() if issubclass(type(o), kinds)] == []


@pytest.fixture
def rig(kind: str, model: Any, latents: Any) -> Iterator[Rig]:
    """Return the family's model with the checks of `Rig`. After the test, clear a pending interrupt."""
    import comfy.model_management

    yield Rig(kind, model, latents(kind))
    comfy.model_management.interrupt_current_processing(False)


@pytest.fixture(scope="module")
def families_made(model_of: Callable[[str], Any], quick_garbage_collection: None) -> None:
    """Build the models before the tests and exclude them from garbage collection."""
    for kind in models.FAMILIES:
        model_of(kind)
    gc.collect()
    gc.freeze()


def new_lab() -> ComfyServer:
    """Return a server, not yet started, with the pack, the demo's two models and the nodes of lab.py. The server caches
    only the results of the last prompt, so that memory grows only if the pack leaks. The server uses the CPU, on which
    two processes sample bit-identical latents."""
    flags = ["--use-pytorch-cross-attention", "--cache-classic"]
    environ = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    server = ComfyServer(packs=[ROOT / "demo", HERE / "lab.py"], flags=flags, environ=environ, cpu=True)
    place_dit(server.base / "models")
    return server


@pytest.fixture(scope="session")
def lab(pack: ModuleType) -> Iterator[ComfyServer]:
    with new_lab() as server:
        yield server


@pytest.fixture
def steady(lab: ComfyServer) -> Iterator[ComfyServer]:
    """Yield the server. After the test, check that the server samples the same latent as before the test."""
    good = sampling_graph(DIT, 64, 2, seed=4321, merged=True, full_step_interval=0)
    run = lab.run(good)
    before = saved_latent(lab, run)
    assert "2 of 2 steps" in run.outputs[REPORT]["text"][0]
    yield lab
    lab.check_alive()
    lab.post("/free", {"unload_models": True, "free_memory": True})
    assert saved_latent(lab, lab.run(good)) == before
