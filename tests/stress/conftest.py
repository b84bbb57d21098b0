"""Provide fixtures of the stress tests: models, results of fresh processes, counts of live objects, and a server."""

from __future__ import annotations

import gc
import hashlib
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import urllib.error
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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

HERE = Path(__file__).parent
OURS = json.loads((HERE.parent / "nodes" / "schema.json").read_text())
os.environ.setdefault("TOMA_FUZZ", "300")  # number of cases in test_fuzz.py; test_damaged.py tries fewer files


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"stress_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_nodes = _module(HERE.parent / "nodes" / "conftest.py")
one_thread, left_untouched = _nodes.one_thread, _nodes.left_untouched
shared, model_of, attach, stats_of = _nodes.shared, _nodes.model_of, _nodes.attach, _nodes.stats_of
hooks_left, plan_calls = _nodes.hooks_left, _nodes.plan_calls


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
def prompt() -> ModuleType:
    """Return the module prompt.py: the sampling that is repeated after every fault, its settings, and a hash for
    latents."""
    return _module(HERE / "prompt.py")


@pytest.fixture(scope="session")
def fresh(pack: ModuleType) -> dict[str, dict[str, str]]:
    """Return {model: {case: hash}} of latents that a fresh process sampled."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(HERE / "prompt.py"), *models.FAMILIES]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture
def born(pack: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Any]]:
    """Return a list that collects weak references to every run, its state and its plans."""
    sampling, state = pack_module("nodes.adapters.patch_model").SamplingRun, pack_module("toma_core.run").RunState
    refs: list[weakref.ref[Any]] = []
    start, plan = sampling.start.__func__, state.plan

    def started(cls: Any, *args: Any) -> Any:
        made = start(cls, *args)
        refs.extend((weakref.ref(made), weakref.ref(made.run), weakref.ref(made.run.cache)))
        return made

    def planned(self: Any, *args: Any) -> Any:
        made = plan(self, *args)
        refs.extend((weakref.ref(made), weakref.ref(made.merge_weights), weakref.ref(made.dest_slots)))
        return made

    monkeypatch.setattr(sampling, "start", classmethod(started))
    monkeypatch.setattr(state, "plan", planned)
    return refs


@pytest.fixture
def nothing_alive(born: list[weakref.ref[Any]]) -> Callable[[], None]:
    """nothing_alive(): check that there were runs, and that none of their objects is alive."""

    def check() -> None:
        gc.collect()
        assert born, "no run began: there was nothing to look for"
        assert [ref() for ref in born if ref() is not None] == []
        born.clear()

    return check


@pytest.fixture(scope="module")
def families_made(model_of: Callable[[str], Any], quick_garbage_collection: None) -> None:
    """Build the models before the tests and exclude them from garbage collection."""
    for kind in models.FAMILIES:
        model_of(kind)
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def tensors() -> Callable[[], int]:
    """tensors(): count the live tensors of the process."""

    def count() -> int:
        gc.collect()
        return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())

    return count


@pytest.fixture(scope="session")
def dtypes_used() -> Callable[[], Any]:
    """with dtypes_used() as found: count arguments and results of PyTorch operations by dtype."""

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            found.update(t.dtype for t in tree_iter((args, kwargs, out)) if isinstance(t, torch.Tensor))
            return out

    found: Counter[torch.dtype] = Counter()

    @contextmanager
    def watch() -> Iterator[Counter[torch.dtype]]:
        nonlocal found
        found = Counter()
        with Seen():
            yield found

    return watch


@pytest.fixture
def uninterrupted(pack: ModuleType) -> Iterator[None]:
    """Clear a pending interrupt after the test."""
    import comfy.model_management

    yield
    comfy.model_management.interrupt_current_processing(False)


@pytest.fixture(scope="session")
def lab(pack: ModuleType) -> Iterator[ComfyServer]:
    """Run a server with the pack, the demo's two models and a node that counts live objects. The server caches only the
    results of the last prompt, so that memory grows only if the pack leaks."""
    flags = ["--use-pytorch-cross-attention", "--cache-classic"]
    environ = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    # Use the CPU: the server's results are compared with those of forked processes, which cannot use CUDA.
    server = ComfyServer(packs=[ROOT / "demo", HERE / "lab.py"], flags=flags, environ=environ, cpu=True)
    try:
        place_dit(server.base / "models")
        yield server.start()
    finally:
        server.stop()


@pytest.fixture(scope="session")
def census() -> Callable[..., dict[str, Any]]:
    """census(server, with_routes=False): count the live objects of the server, see lab.py."""
    count = itertools.count()

    def ask(server: ComfyServer, with_routes: bool = False) -> dict[str, Any]:
        inputs = {"nonce": next(count), "with_routes": with_routes}
        run = server.run({"1": {"class_type": "LabCensus", "inputs": inputs}})
        assert run.status == "success", run.error
        return dict(json.loads(run.outputs["1"]["text"][0]))

    return ask


@pytest.fixture(scope="session")
def outcome() -> Callable[[ComfyServer, Any], str]:
    """outcome(server, graph): run a graph, and fail unless it succeeds or is refused with a documented error."""

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
def saved_latent(lab: ComfyServer) -> Callable[[Run], str]:
    """saved_latent(run): return a hash of the saved latent, because pytest takes minutes to compare bytes."""

    def of(run: Run) -> str:
        assert run.status == "success", run.error
        latent = safetensors.torch.load(lab.view(run.outputs[LATENT]["latents"][0]))["latent_tensor"]
        return hashlib.sha256(latent.numpy().tobytes()).hexdigest()

    return of


@pytest.fixture
def steady(lab: ComfyServer, saved_latent: Callable[[Run], str]) -> Iterator[ComfyServer]:
    """Yield the server, and check afterwards that it samples the same latent as before."""
    good = sampling_graph(DIT, 64, 2, seed=4321, merged=True, full_step_interval=0, similarity_from="tokens")
    run = lab.run(good)
    before = saved_latent(run)
    assert "2 of 2 steps" in run.outputs[REPORT]["text"][0]
    yield lab
    lab.check_alive()
    lab.post("/free", {"unload_models": True, "free_memory": True})
    assert saved_latent(lab.run(good)) == before
