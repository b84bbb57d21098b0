"""Provide checks of prompts that a server has run."""

import hashlib
import itertools
import json
import urllib.error
from pathlib import Path
from typing import Any

import safetensors.torch

from demo.showcase_graphs import LATENT
from scripts.comfy_client import Run
from scripts.comfy_server import PACK_FOLDER, ComfyServer

OURS = sorted(json.loads((Path(__file__).parents[1] / "nodes" / "schema.json").read_text()))
# Classes whose objects live no longer than a run.
OF_A_RUN = {"RunState", "Schedule", "SamplingRun", "Evaluation", "MergePlan", "Cache", "Coverage", "Refresh", "Cached"}
OF_A_RUN |= {"_Entry", "Dispatch"}
# Classes whose objects outlive a run -> the largest allowed number of these objects. Reports need stats and maps of the
# last runs. Windows and budgets are cached for later runs.
BOUNDED = {"RunStats": 32, "MergeMap": 4 * 32, "Windows": 64, "Budget": 64}
_nonces = itertools.count()


def census(server: ComfyServer) -> dict[str, Any]:
    """Count the live objects of the server with a node of lab.py, and check that no object of a run is left."""
    run = server.run({"1": {"class_type": "LabCensus", "inputs": {"nonce": next(_nonces)}}})
    assert run.status == "success", run.error
    found = dict(json.loads(run.outputs["1"]["text"][0]))
    assert not OF_A_RUN & set(found["objects"]), found["objects"]
    assert all(found["objects"].get(name, 0) <= most for name, most in BOUNDED.items()), found["objects"]
    return found


def outcome(server: ComfyServer, graph: Any) -> str:
    """Run a graph. The graph must succeed, or be refused with a documented error."""
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
    # If only some outputs are invalid, ComfyUI lists their errors and runs the others.
    return "refused" if answer["node_errors"] else "success"


def saved_latent(server: ComfyServer, run: Run) -> str:
    """Return a hash of the saved latent, because pytest takes minutes to show how two long byte strings differ."""
    assert run.status == "success", run.error
    latent = safetensors.torch.load(server.view(run.outputs[LATENT]["latents"][0]))["latent_tensor"]
    return hashlib.sha256(latent.numpy().tobytes()).hexdigest()
