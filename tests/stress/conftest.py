"""Provide fixtures of the stress tests: models, results of fresh processes, counts of live objects, and a server."""

from __future__ import annotations

import gc
import hashlib
import itertools
import json
import os
import subprocess
import sys
import urllib.error
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import safetensors.torch
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from demo.showcase_graphs import DIT, LATENT, REPORT, place_dit, sampling_graph
from scripts.comfy_client import Run
from scripts.comfy_pack import pack_module
from scripts.comfy_server import PACK_FOLDER, ComfyServer
from scripts.comfyui import ROOT
from testbed import models
from tests.nodes import conftest as nodes
from tests.stress import prompt

HERE = Path(__file__).parent
OURS = json.loads((HERE.parent / "nodes" / "schema.json").read_text())
one_thread, left_untouched = nodes.one_thread, nodes.left_untouched
shared, model_of, attach, stats_of = nodes.shared, nodes.model_of, nodes.attach, nodes.stats_of
hooks_left, plan_calls = nodes.hooks_left, nodes.plan_calls
os.environ.setdefault("TOMA_FUZZ", "300")  # number of cases in test_fuzz.py; test_damaged.py tries fewer files


@pytest.fixture(scope="session")
def new_model(pack: ModuleType) -> Callable[[str], Any]:
    """new_model(kind): make a small model as prompt.py does in its own process."""
    return lambda kind: getattr(models, kind)()


@pytest.fixture(params=models.FAMILIES)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model(model_of: Callable[[str], Any], kind: str) -> Any:
    return model_of(kind)


@pytest.fixture(scope="session")
def fresh(pack: ModuleType) -> dict[str, dict[str, str]]:
    """Return {model: {case: hash}} of latents that a fresh process sampled."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(HERE / "prompt.py"), *models.FAMILIES]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


@dataclass
class Rig:
    """The small model of a family, and checks that a fault leaves nothing of a run behind."""

    kind: str
    model: Any
    fresh: dict[str, str]  # by case of prompt.py: the hash of the latent that a fresh process samples
    attach: Callable[..., Any]
    hooks_left: Callable[[Any], list[str]]
    born: list[weakref.ref[Any]]  # every run, its state and its plans

    def patched(self, case: str = "stack", model: Any = None, **settings: Any) -> Any:
        return self.attach(model or self.model, **{**(prompt.CASES[case] or {}), **settings})

    def sampled(self, model: Any, **options: Any) -> str:
        return prompt.digest(prompt.sample(model, **options))

    def tensors(self) -> int:
        """Count the live tensors of the process."""
        gc.collect()
        return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())

    def check_clean(self) -> None:
        """Check that there were runs, that no hook is left, and that no object of a run is alive."""
        assert self.hooks_left(self.model) == []
        gc.collect()
        assert self.born, "no run began: there was nothing to look for"
        assert [ref() for ref in self.born if ref() is not None] == []
        self.born.clear()


@pytest.fixture
def rig(
    kind: str, model: Any, fresh: Any, attach: Any, hooks_left: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Rig]:
    """Return the family's model with the checks of `Rig`. After the test, clear a pending interrupt."""
    import comfy.model_management

    sampling, state = pack_module("nodes.adapters.patch_model").SamplingRun, pack_module("toma_core.run").RunState
    born: list[weakref.ref[Any]] = []
    start, plan = sampling.start.__func__, state.plan

    def started(cls: Any, *args: Any) -> Any:
        made = start(cls, *args)
        born.extend((weakref.ref(made), weakref.ref(made.run), weakref.ref(made.run.cache)))
        return made

    def planned(self: Any, *args: Any) -> Any:
        made = plan(self, *args)
        born.extend((weakref.ref(made), weakref.ref(made.merge_weights), weakref.ref(made.dest_slots)))
        return made

    monkeypatch.setattr(sampling, "start", classmethod(started))
    monkeypatch.setattr(state, "plan", planned)
    yield Rig(kind, model, fresh[kind], attach, hooks_left, born)
    comfy.model_management.interrupt_current_processing(False)


@pytest.fixture(scope="module")
def families_made(model_of: Callable[[str], Any], quick_garbage_collection: None) -> None:
    """Build the models before the tests and exclude them from garbage collection."""
    for kind in models.FAMILIES:
        model_of(kind)
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def dtypes_used() -> Callable[[], Any]:
    """with dtypes_used() as seen: count arguments and results of PyTorch operations by dtype, in `seen.found`."""

    class Seen(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.found: Counter[torch.dtype] = Counter()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            self.found.update(t.dtype for t in tree_iter((args, kwargs, out)) if isinstance(t, torch.Tensor))
            return out

    return Seen


@pytest.fixture(scope="session")
def lab(pack: ModuleType) -> Iterator[ComfyServer]:
    """Run a server with the pack, the demo's two models and a node that counts live objects. The server caches only the
    results of the last prompt, so that memory grows only if the pack leaks."""
    flags = ["--use-pytorch-cross-attention", "--cache-classic"]
    environ = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    # Use the CPU. The server's results are compared with results of forked processes, which cannot use CUDA.
    server = ComfyServer(packs=[ROOT / "demo", HERE / "lab.py"], flags=flags, environ=environ, cpu=True)
    try:
        place_dit(server.base / "models")
        yield server.start()
    finally:
        server.stop()


# Classes whose objects live no longer than a run.
OF_A_RUN = {
    *("RunState", "Schedule", "SamplingRun", "Evaluation", "MergePlan", "Cache", "Coverage", "Refresh", "Cached"),
    *("_Entry", "Dispatch"),
}
# Classes whose objects are cached -> maximum number of these objects. The report needs stats and maps of the last runs.
# Layouts are cached too.
BOUNDED = {"RunStats": 32, "MergeMap": 4 * 32, "Windows": 64, "Budget": 64}


@pytest.fixture(scope="session")
def census() -> Callable[..., dict[str, Any]]:
    """census(server, with_routes=False): count the live objects of the server, see lab.py, and check that no object of
    a run is left."""
    count = itertools.count()

    def ask(server: ComfyServer, with_routes: bool = False) -> dict[str, Any]:
        inputs = {"nonce": next(count), "with_routes": with_routes}
        run = server.run({"1": {"class_type": "LabCensus", "inputs": inputs}})
        assert run.status == "success", run.error
        found = dict(json.loads(run.outputs["1"]["text"][0]))
        assert not OF_A_RUN & set(found["objects"]), found["objects"]
        assert all(found["objects"].get(name, 0) <= most for name, most in BOUNDED.items()), found["objects"]
        return found

    return ask


@pytest.fixture(scope="session")
def outcome() -> Callable[[ComfyServer, Any], str]:
    """outcome(server, graph): run a graph. The graph must succeed, or be refused with a documented error."""

    def of(server: ComfyServer, graph: Any) -> str:
        before = len(server.log())
        try:
            answer = server.post("/prompt", {"prompt": graph, "client_id": "fuzz"})
            run = server.wait(answer["prompt_id"])
        except urllib.error.HTTPError as error:
            if error.code == 400:
                body = json.loads(error.read())
                assert body["error"].get("message") or body["node_errors"], "refused without a word"
                return "refused"
            # ComfyUI itself fails on some graphs. The traceback must then contain no code of the pack.
            assert f"custom_nodes/{PACK_FOLDER}/" not in server.log()[before:], server.log()[before:]
            return f"HTTP {error.code}"
        if run.status == "error":
            assert run.error is not None
            assert run.error["node_type"] not in OURS or run.error["exception_message"].startswith("ToMA"), run.error
            assert run.error["exception_message"].strip(), run.error
            return f"error in {run.error['node_type']}"
        assert run.status == "success"
        # ComfyUI runs the valid outputs and lists the errors of the invalid ones.
        return "refused" if answer["node_errors"] else "success"

    return of


@pytest.fixture(scope="session")
def saved_latent() -> Callable[[ComfyServer, Run], str]:
    """saved_latent(server, run): return a hash of the saved latent, because pytest takes minutes to compare bytes."""

    def of(server: ComfyServer, run: Run) -> str:
        assert run.status == "success", run.error
        latent = safetensors.torch.load(server.view(run.outputs[LATENT]["latents"][0]))["latent_tensor"]
        return hashlib.sha256(latent.numpy().tobytes()).hexdigest()

    return of


@pytest.fixture
def steady(lab: ComfyServer, saved_latent: Any) -> Iterator[ComfyServer]:
    """Yield the server, and check afterwards that it samples the same latent as before."""
    good = sampling_graph(DIT, 64, 2, seed=4321, merged=True, full_step_interval=0, similarity_from="tokens")
    run = lab.run(good)
    before = saved_latent(lab, run)
    assert "2 of 2 steps" in run.outputs[REPORT]["text"][0]
    yield lab
    lab.check_alive()
    lab.post("/free", {"unload_models": True, "free_memory": True})
    assert saved_latent(lab, lab.run(good)) == before
