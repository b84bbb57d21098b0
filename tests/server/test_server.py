"""Test a real server with the pack and small models: graphs over HTTP, their results, and their errors."""

from __future__ import annotations

import re
from typing import Any

import pytest

from scripts.comfy_client import PromptError, Run
from scripts.comfy_server import ComfyServer
from tests.server.graphs import STEPS, advanced, graph, latent, node, simple


def reload(server: ComfyServer) -> None:
    server.post("/free", {"unload_models": True, "free_memory": True})


@pytest.mark.compat
@pytest.mark.parametrize("kind", ["unet", "flux"])
def test_graph_samples_and_reports(tiny_server: ComfyServer, kind: str) -> None:
    settings = advanced(tiny_server, skip_first_blocks=1)
    run = tiny_server.run(graph(settings, kind))
    assert run.status == "success", run.error
    (text,) = run.outputs["8"]["text"]
    merged = STEPS if kind == "unet" else STEPS - 2  # under the preset, the first and the last step of Flux are full
    assert text.splitlines()[0].endswith(f"{merged} of {STEPS} steps.")
    assert "merged blocks: " in text
    assert run.outputs["9"]["text"] == [text]
    assert tiny_server.view(run.outputs["8"]["images"][0]).startswith(b"\x89PNG")
    progress = [data for kind, data in run.messages if kind == "progress" and data["node"] == "5"]
    assert progress[-1]["value"] == progress[-1]["max"] == STEPS
    assert re.search(rf"ToMA: On: .* of the tokens merged, .* blocks, {merged} of {STEPS} steps", tiny_server.log())


@pytest.mark.compat
def test_each_prompt_of_a_queue_is_as_if_alone(tiny_server: ComfyServer) -> None:
    """Two clients queue prompts at the same time. Then each prompt runs alone, on a newly loaded model."""
    server = tiny_server
    prompts = {
        "half": graph(advanced(server), "flux", steps=8),
        "off": graph(simple(0.0), "flux", steps=8),
        "late": graph(advanced(server, start_percent=0.99), "flux", steps=8),
        "more": graph(advanced(server, ratio=0.7), "flux", steps=8),
        "another size": graph(advanced(server), "flux", size=144, steps=8),
        "another seed": graph(advanced(server), "flux", seed=6, steps=8),
        "without": graph(None, "flux", steps=8),
        "quality": graph(advanced(server, full_step_interval=2), "flux", steps=8),
        "another model": graph(advanced(server, ratio=0.6)),
    }
    queued = [(name, server.queue(each, client_id=f"client {n % 2}")) for n, (name, each) in enumerate(prompts.items())]
    found = {name: latent(server, server.wait(key)) for name, key in queued}
    assert found["off"] == found["late"] == found["without"]
    assert len(set(found.values())) == len(prompts) - 2
    for name in reversed(prompts):
        reload(server)
        again = server.run(prompts[name])
        assert not any("5" in data["nodes"] for kind, data in again.messages if kind == "execution_cached")
        assert latent(server, again) == found[name], name


@pytest.mark.compat
def test_a_run_that_is_interrupted_and_repeated(tiny_server: ComfyServer) -> None:
    wanted = graph(advanced(tiny_server), "flux", seed=61, steps=300)

    def after_some_steps(message: str, data: Any) -> None:
        if message == "progress" and data["node"] == "5" and 2 < data["value"] < 200:
            tiny_server.interrupt()

    assert tiny_server.run(wanted, on_message=after_some_steps).status == "interrupted"
    wanted["5"]["inputs"]["steps"] = 8
    repeated = latent(tiny_server, tiny_server.run(wanted))
    reload(tiny_server)
    assert latent(tiny_server, tiny_server.run(wanted)) == repeated


def test_two_branches_of_one_loader_are_each_as_if_alone(tiny_server: ComfyServer) -> None:
    settings = [advanced(tiny_server, ratio=0.25), advanced(tiny_server, ratio=0.75, granularity="module")]
    alone = [latent(tiny_server, tiny_server.run(graph(s, seed=11))) for s in settings]
    reload(tiny_server)
    both, second = graph(settings[0], seed=11), graph(settings[1], seed=11)
    for old, new in (("4", "14"), ("5", "15"), ("7", "17"), ("8", "18")):
        both[new] = {**second[old], "inputs": dict(second[old]["inputs"])}
    both["15"]["inputs"]["model"] = both["18"]["inputs"]["model"] = ["14", 0]
    both["17"]["inputs"]["samples"] = both["18"]["inputs"]["latent"] = ["15", 0]
    run = tiny_server.run(both)
    assert [latent(tiny_server, run, n) for n in ("7", "17")] == alone
    texts = [run.outputs[n]["text"][0].splitlines()[0] for n in ("8", "18")]
    assert texts[0] != texts[1]


def said(run: Run) -> list[tuple[str, str]]:
    """Return (node, text) for each status message that the client received."""
    return [(data["node"], data["text"]) for kind, data in run.messages if kind == "toma.said"]


RANGE = {"start_percent": 0.8, "end_percent": 0.2}


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"ratio": 1.5}, ("ratio is", "0 to 0.95", "Try 0.5")),
        ({"ratio": float("nan")}, ("ratio is", "0 to 0.95", "Try 0.5")),
        (RANGE, ("Start percent (0.8)", "end percent (0.2)", "Lower start percent")),
    ],
    ids=str,
)
def test_bad_settings_are_refused_with_range_and_fix(
    tiny_server: ComfyServer, settings: Any, parts: tuple[str, ...]
) -> None:
    """ComfyUI reports the error at every input that was validated, even if the input is valid."""
    toma = {**simple(), **settings} if "ratio" in settings else advanced(tiny_server, **settings)
    with pytest.raises(PromptError) as refused:
        tiny_server.run(graph(toma))
    errors = refused.value.node_errors["4"]["errors"]
    assert {error["extra_info"]["input_name"] for error in errors} >= settings.keys()
    assert [error["details"] for error in errors if not all(part in error["details"] for part in parts)] == []


def test_bad_settings_over_a_link_fail_their_prompt_only(tiny_server: ComfyServer) -> None:
    toma = advanced(tiny_server, window_size=["20", 0])
    linked = {**graph(toma), "20": node("PrimitiveInt", value=0)}
    bad = tiny_server.queue(linked)
    good = tiny_server.queue(graph(advanced(tiny_server, ratio=0.4), seed=21))
    failed = tiny_server.wait(bad)
    assert failed.status == "error"
    assert failed.error is not None
    assert failed.error["node_type"] == "ToMAAdvanced"
    for part in ("window size is 0", "2 to 64", "Try 8"):
        assert part in failed.error["exception_message"]
    assert tiny_server.wait(good).status == "success"
    again = tiny_server.run(linked)
    (sent,) = [data for kind, data in again.messages if kind == "toma.said"]
    assert sent["error"]
    assert sent["node"] == "4"
    assert sent["text"].startswith("window size is 0. Allowed: a whole number from 2 to 64.")


def test_client_receives_the_runs_of_each_node_cached_or_not(tiny_server: ComfyServer) -> None:
    settings = advanced(tiny_server)
    for seed in (31, 32):  # in the second run, ComfyUI has cached the node's output
        run = tiny_server.run(graph(settings, seed=seed))
        assert run.status == "success", run.error
        (begin, end) = said(run)
        assert begin == ("4", "Sampling on fewer tokens ...")
        assert end[0] == "4"
        assert end[1].splitlines()[0] == "On: 50 % of the tokens merged, 14 of 17 blocks, 4 of 4 steps"
        assert re.fullmatch(r"About \d+ % less work, counted", end[1].splitlines()[1])
    prompt = graph(advanced(tiny_server, ratio=0.3), seed=33)
    prompt["14"] = prompt["4"]
    prompt["15"] = {**prompt["5"], "inputs": {**prompt["5"]["inputs"], "model": ["14", 0], "seed": 34}}
    prompt["17"] = node("SaveLatent", samples=["15", 0], filename_prefix="test")
    assert sorted(name for name, _ in said(tiny_server.run(prompt))) == ["14", "14", "4", "4"]


def test_node_that_is_off_says_so_in_its_output(tiny_server: ComfyServer) -> None:
    run = tiny_server.run(graph(simple(0.0), seed=35))
    assert said(run) == []
    outputs = {data["node"]: data["output"] for kind, data in run.messages if kind == "executed"}
    (message,) = outputs["4"]["toma"]
    assert message["text"] == "Off: the ratio is 0."
    (report,) = outputs["8"]["toma"]
    assert report["text"].startswith("This model has no ToMA node")
