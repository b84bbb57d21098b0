"""A server with several runs in its queue: each gives the result that it has alone, on a newly loaded model."""

from __future__ import annotations

from typing import Any

import pytest

from scripts.comfy_server import ComfyServer
from tests.server.test_server import advanced, graph, latent, simple


def prompt(toma: dict[str, Any] | None, **options: Any) -> dict[str, Any]:
    made = graph(toma, kind="flux", **options)
    made["5"]["inputs"]["steps"] = 8
    return made


def reload(server: ComfyServer) -> None:
    server.post("/free", {"unload_models": True, "free_memory": True})


@pytest.mark.compat
def test_ratio_changed_and_off_in_mid_queue_and_two_runs_at_once(tiny_server: ComfyServer) -> None:
    """Two clients queue at the same time; each latent is that of its prompt alone."""
    server = tiny_server
    prompts = {
        "half": prompt(advanced(server)),
        "off": prompt(simple(0.0)),
        "more": prompt(advanced(server, ratio=0.7)),
        "another size": prompt(advanced(server), size=144),
        "another seed": prompt(advanced(server), seed=6),
        "without": prompt(None),
        "quality": prompt(advanced(server, full_step_interval=2)),
    }
    queued = [(name, server.queue(each, client_id=f"client {n % 2}")) for n, (name, each) in enumerate(prompts.items())]
    found = {name: latent(server, server.wait(key)) for name, key in queued}
    assert found["off"] == found["without"]
    assert len(set(found.values())) == len(prompts) - 1
    for name in reversed(prompts):
        reload(server)
        assert latent(server, server.run(prompts[name])) == found[name], name


@pytest.mark.compat
def test_a_run_that_is_interrupted_and_repeated(tiny_server: ComfyServer) -> None:
    server = tiny_server
    wanted = prompt(advanced(server), seed=61)
    wanted["5"]["inputs"]["steps"] = 300

    def after_some_steps(message: str, data: Any) -> None:
        if message == "progress" and data["node"] == "5" and 2 < data["value"] < 200:
            server.interrupt()

    assert server.run(wanted, on_message=after_some_steps).status == "interrupted"
    wanted["5"]["inputs"]["steps"] = 8
    repeated = latent(server, server.run(wanted))
    reload(server)
    assert latent(server, server.run(wanted)) == repeated
