"""A real server with the pack and small models: graphs over HTTP, their results, and their errors."""

from __future__ import annotations

import re
from typing import Any

import pytest
import safetensors.torch

from scripts.comfy_client import PromptError, Run
from scripts.comfy_server import ComfyServer

STEPS = 4  # with the defaults of ToMA Advanced the first and the last step are full


def graph(toma: dict[str, Any] | None, *, kind: str = "unet", seed: int = 5, size: int = 192) -> dict[str, Any]:
    """Return the graph loader -> ToMA -> KSampler -> report and latent. toma: class and inputs of the node, None to
    omit it."""
    latent = "EmptyLatentImage" if kind == "unet" else "EmptySD3LatentImage"
    prompt = {
        "1": node("TinyModel", kind=kind, seed=0),
        "3": node(latent, width=size, height=size, batch_size=1),
        "5": node(
            "KSampler",
            model=["4" if toma else "1", 0],
            positive=["1", 1],
            negative=["1", 2],
            latent_image=["3", 0],
            seed=seed,
            steps=STEPS,
            cfg=3.0,
            sampler_name="euler",
            scheduler="simple",
            denoise=1.0,
        ),
        "7": node("SaveLatent", samples=["5", 0], filename_prefix="test"),
    }
    if toma:
        prompt["4"] = node(model=["1", 0], **toma)
        prompt["8"] = node("ToMAReport", model=["4", 0], latent=["5", 0])
        prompt["9"] = node("PreviewAny", source=["8", 0])
    return prompt


def node(class_type: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": class_type, "inputs": inputs}


def simple(ratio: float = 0.5) -> dict[str, Any]:
    return {"class_type": "ToMA", "ratio": ratio, "preset": "balanced"}


def advanced(server: ComfyServer, **settings: Any) -> dict[str, Any]:
    """Return ToMAAdvanced with the defaults that the server sends to the page, and other settings on top."""
    required = server.object_info("ToMAAdvanced")["input"]["required"]
    defaults = {name: spec[1]["default"] for name, spec in required.items() if name != "model"}
    return {"class_type": "ToMAAdvanced", **defaults, "min_tokens": 16, **settings}


def latent(server: ComfyServer, run: Run, node_id: str = "7") -> bytes:
    """Return the numbers of the saved latent, without the prompt in its file."""
    assert run.status == "success", run.error
    file = safetensors.torch.load(server.view(run.outputs[node_id]["latents"][0]))
    assert file["latent_tensor"].isfinite().all()
    return file["latent_tensor"].numpy().tobytes()


@pytest.mark.compat
@pytest.mark.parametrize("kind", ["unet", "flux"])
def test_graph_samples_and_reports(tiny_server: ComfyServer, kind: str) -> None:
    settings = advanced(tiny_server, skip_first_blocks=1)
    run = tiny_server.run(graph(settings, kind=kind))
    assert run.status == "success", run.error
    (text,) = run.outputs["8"]["text"]
    merged = STEPS if kind == "unet" else STEPS - 2  # under the preset the first and the last step of Flux are full
    assert text.splitlines()[0].endswith(f"{STEPS if kind == 'unet' else merged} of {STEPS} steps.")
    assert "merged blocks: " in text
    assert run.outputs["9"]["text"] == [text]
    assert tiny_server.view(run.outputs["8"]["images"][0]).startswith(b"\x89PNG")
    progress = [data for kind, data in run.messages if kind == "progress" and data["node"] == "5"]
    assert progress[-1]["value"] == progress[-1]["max"] == STEPS
    assert re.search(
        rf"ToMA: On: .* of the tokens merged, .* blocks, ({STEPS}|{merged}) of {STEPS} steps", tiny_server.log()
    )


def test_same_prompt_same_latent_whatever_ran_between(tiny_server: ComfyServer) -> None:
    """ComfyUI caches results of equal prompts, so each comparison samples again after a run with another seed."""
    settings = advanced(tiny_server, ratio=0.6)
    first = latent(tiny_server, tiny_server.run(graph(settings)))
    tiny_server.run(graph(advanced(tiny_server, ratio=0.3), seed=9, size=96))
    tiny_server.post("/free", {"unload_models": True, "free_memory": True})
    again = tiny_server.run(graph(settings))
    assert not cached(again, "5")
    assert latent(tiny_server, again) == first
    assert latent(tiny_server, tiny_server.run(graph(None))) != first


def cached(run: Run, node_id: str) -> bool:
    return any(node_id in data["nodes"] for kind, data in run.messages if kind == "execution_cached")


def test_ratio_zero_and_steps_out_of_range_are_the_latent_without_it(tiny_server: ComfyServer) -> None:
    plain = latent(tiny_server, tiny_server.run(graph(None)))
    assert latent(tiny_server, tiny_server.run(graph(simple(0.0)))) == plain
    late = advanced(tiny_server, start_percent=0.99)
    assert latent(tiny_server, tiny_server.run(graph(late))) == plain
    merged = latent(tiny_server, tiny_server.run(graph(advanced(tiny_server))))
    assert merged != plain


def test_two_branches_of_one_loader_are_each_as_if_alone(tiny_server: ComfyServer) -> None:
    settings = [advanced(tiny_server, ratio=0.25), advanced(tiny_server, ratio=0.75, granularity="module")]
    alone = [latent(tiny_server, tiny_server.run(graph(s, seed=11))) for s in settings]
    tiny_server.post("/free", {"unload_models": True, "free_memory": True})
    both = graph(settings[0], seed=11)
    second = graph(settings[1], seed=11)
    for old, new in (("4", "14"), ("5", "15"), ("7", "17"), ("8", "18")):
        both[new] = {**second[old], "inputs": dict(second[old]["inputs"])}
    both["15"]["inputs"]["model"] = both["18"]["inputs"]["model"] = ["14", 0]
    both["17"]["inputs"]["samples"] = both["18"]["inputs"]["latent"] = ["15", 0]
    run = tiny_server.run(both)
    assert [latent(tiny_server, run, n) for n in ("7", "17")] == alone
    texts = [run.outputs[n]["text"][0].splitlines()[0] for n in ("8", "18")]
    assert texts[0] != texts[1]


@pytest.mark.parametrize("ratio", [1.5, -0.1, float("nan")])
def test_bad_ratio_is_refused_with_range_and_fix(tiny_server: ComfyServer, ratio: float) -> None:
    with pytest.raises(PromptError) as refused:
        tiny_server.run(graph(simple(ratio)))
    (error,) = refused.value.node_errors["4"]["errors"]
    assert error["extra_info"]["input_name"] == "ratio"
    for part in ("ratio is", "0 to 0.95", "Try 0.5"):
        assert part in error["details"]


def linked(server: ComfyServer) -> dict[str, Any]:
    """Return a graph whose window size comes over a link, so that it is refused only when the graph runs."""
    return {**graph(advanced(server, window_size=["20", 0])), "20": node("PrimitiveInt", value=0)}


def test_bad_settings_fail_their_prompt_only(tiny_server: ComfyServer) -> None:
    """It shows on the ToMA node, and the prompt queued behind it runs."""
    bad = tiny_server.queue(linked(tiny_server))
    good = tiny_server.queue(graph(advanced(tiny_server, ratio=0.4), seed=21))
    failed = tiny_server.wait(bad)
    assert failed.status == "error"
    assert failed.error is not None
    assert failed.error["node_type"] == "ToMAAdvanced"
    message = failed.error["exception_message"]
    for part in ("window size is 0", "2 to 64", "Try 8"):
        assert part in message
    assert tiny_server.wait(good).status == "success"


def test_an_error_stands_on_the_node_itself_too(tiny_server: ComfyServer) -> None:
    run = tiny_server.run(linked(tiny_server))
    assert run.status == "error"
    (sent,) = [data for kind, data in run.messages if kind == "toma.said"]
    assert sent["error"]
    assert sent["node"] == "4"
    assert sent["text"].startswith("window size is 0. Allowed: a whole number from 2 to 64.")


def test_a_range_without_steps_is_refused_before_anything_runs(tiny_server: ComfyServer) -> None:
    with pytest.raises(PromptError) as refused:
        tiny_server.run(graph(advanced(tiny_server, start_percent=0.8, end_percent=0.2)))
    errors = refused.value.node_errors["4"]["errors"]
    # ComfyUI marks every input that is checked; the page only those that the text names.
    assert {error["extra_info"]["input_name"] for error in errors} >= {"start_percent", "end_percent"}
    for part in ("Start percent (0.8)", "end percent (0.2)", "Lower start percent"):
        assert all(part in error["details"] for error in errors)


def said(run: Run) -> list[tuple[str, str]]:
    """Return (node, text) of the messages to the client."""
    return [(data["node"], data["text"]) for kind, data in run.messages if kind == "toma.said"]


def test_client_receives_its_runs_and_those_of_a_cached_node(tiny_server: ComfyServer) -> None:
    settings = advanced(tiny_server)
    for seed in (31, 32):  # in the second run ComfyUI has the node in its cache
        run = tiny_server.run(graph(settings, seed=seed))
        assert run.status == "success", run.error
        (begin, end) = said(run)
        assert begin == ("4", "Sampling on fewer tokens ...")
        assert end[0] == "4"
        assert end[1].splitlines()[0] == "On: 50 % of the tokens merged, 14 of 17 blocks, 4 of 4 steps"
        assert re.fullmatch(r"About \d+ % less work, counted", end[1].splitlines()[1])


def test_two_nodes_with_the_same_settings_are_distinguished(tiny_server: ComfyServer) -> None:
    prompt = graph(advanced(tiny_server, ratio=0.3), seed=33)
    prompt["14"] = prompt["4"]
    prompt["15"] = {**prompt["5"], "inputs": {**prompt["5"]["inputs"], "model": ["14", 0], "seed": 34}}
    prompt["17"] = node("SaveLatent", samples=["15", 0], filename_prefix="test")
    run = tiny_server.run(prompt)
    assert sorted(name for name, _ in said(run)) == ["14", "14", "4", "4"]


def test_node_that_is_off_says_so_in_its_output(tiny_server: ComfyServer) -> None:
    run = tiny_server.run(graph(simple(0.0), seed=35))
    assert said(run) == []
    outputs = {data["node"]: data["output"] for kind, data in run.messages if kind == "executed"}
    (message,) = outputs["4"]["toma"]
    assert message["text"] == "Off: the ratio is 0."
    (report,) = outputs["8"]["toma"]
    assert report["text"].startswith("This model has no ToMA node")
