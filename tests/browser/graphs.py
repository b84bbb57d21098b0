"""Provide the graphs that browser tests open, in ComfyUI's API format, and the expected status texts."""

import json
from itertools import count
from typing import Any

from demo.showcase_graphs import Graph, widget_values
from scripts.comfy_server import ComfyServer
from scripts.comfyui import ROOT

IDS, SEEDS = count(1), count(1)  # ComfyUI sends no messages for a cached sampler, so seeds must be new
TEXTS = json.loads((ROOT / "web/i18n/en.json").read_text(encoding="utf-8"))["messages"]
CACHED, NEW, ACTIVE = TEXTS["cached"], TEXTS["no_run_yet"], TEXTS["active"]
STEPS = 4
EARLIER = "{} (from an earlier run)"
# Positions of the nodes 1 to 8. The nodes 11 to 18 are below them.
PLACES = [(0, 0), (0, 160), (0, 700), (400, 0), (850, 0), (850, 400), (1250, 0), (0, 900)]
# JavaScript that adds the first line of a node's status text to the list `window.shown` whenever the line changes.
WATCH = """id => {
    const element = window.statusOf(id)
    window.shown = []
    new MutationObserver(() => {
        const [line] = element.textContent.split("\\n")
        if (line !== window.shown.at(-1)) window.shown.push(line)
    }).observe(element, { childList: true, subtree: true, characterData: true })
}"""


def node(class_type: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": class_type, "inputs": inputs}


# A graph of ComfyUI's own nodes that runs without a model.
PLAIN = {
    "1": node("EmptyImage", width=64, height=64, batch_size=1, color=0),
    "7": node("PreviewImage", images=["1", 0]),
}


def graph(ratio: float = 0.5, *, last: str = "ToMAReport", steps: int = STEPS, **settings: Any) -> Graph:
    """Return the graph loader -> ToMA Advanced -> KSampler -> decode -> `last`. If `last` is the benchmark or
    calibration node, this node replaces KSampler and decode. settings: values of ToMA Advanced."""
    usual = {"skip_last_blocks": 1, "full_step_interval": 0, "end_percent": 1.0, "min_tokens": 16}
    sampling = {"steps": steps, "cfg": 2.0, "sampler_name": "euler", "scheduler": "normal"}
    nodes = {
        "1": node("ToMADemoUNet", weights="random", seed=0),
        "2": node("ToMADemoScene", seed=next(SEEDS), batch_size=1),
        "3": node("ToMADemoLatent", width=128, height=128, batch_size=1),
        "4": node("ToMAAdvanced", model=["1", 0], **widget_values(ratio, **{**usual, **settings})),
    }
    inputs: dict[str, Any] = {"model": ["4", 0], "positive": ["2", 0], "negative": ["2", 1]}
    if last == "ToMABenchmark":
        timed = {"ratio": 0.6, "preset": "balanced", "sweep": True, "steps": 4, "runs": 2}
        return {**nodes, "7": node(last, **inputs, latent=["3", 0], **timed)}
    if last == "ToMACalibrate":
        sampling["cfg"] += next(SEEDS) / 10  # prevents ComfyUI from using a cached result
        return {**nodes, "7": node(last, **inputs, latent=["3", 0], target="balanced", **sampling)}
    return {
        **nodes,
        "5": node("KSampler", **inputs, latent_image=["3", 0], seed=next(SEEDS), **sampling, denoise=1.0),
        "6": node("ToMADemoDecode", samples=["5", 0], scale=4),
        "7": node("ToMAReport", model=["4", 0], latent=["5", 0], image=["6", 0]),
    }


def simple() -> Graph:
    """Return `graph()` with the ToMA node in place of ToMA Advanced."""
    return graph() | {"4": node("ToMA", model=["1", 0], ratio=0.5, preset="balanced")}


def to_workflow(prompt: Graph, server: ComfyServer) -> dict[str, Any]:
    """Return a graph in the format of workflow files. Running the workflow does not change its seeds."""
    nodes: dict[str, Any] = {}
    links: list[list[Any]] = []
    for key, each in prompt.items():
        about = server.object_info(each["class_type"])
        x, y = PLACES[int(key) % 10 - 1]
        made = {"id": int(key), "type": each["class_type"], "pos": [x, y + 120 * (int(key) - int(key) % 10)]}
        made |= {"size": [320, 80], "flags": {}, "order": int(key), "mode": 0, "properties": {}}
        made |= {"inputs": [], "outputs": [], "widgets_values": []}
        nodes[key] = made
        for kind, name in zip(about["output"], about["output_name"], strict=True):
            made["outputs"].append({"name": name, "type": kind, "links": []})
        for name, (kind, *_) in {**about["input"]["required"], **about["input"].get("optional", {})}.items():
            value = each["inputs"].get(name)
            if isinstance(value, list):
                links.append([len(links) + 1, int(value[0]), value[1], int(key), len(made["inputs"]), kind])
                made["inputs"].append({"name": name, "type": kind, "link": len(links)})
                nodes[value[0]]["outputs"][value[1]]["links"].append(len(links))
                if kind == "FLOAT":  # a widget, which has a value beside its link
                    made["inputs"][-1]["widget"] = {"name": name}
                    made["widgets_values"].append(0.5)
            elif value is not None:
                made["widgets_values"] += [value, "fixed"] if name == "seed" else [value]
    graph_id = f"00000000-0000-4000-8000-{next(IDS):012}"
    return {"id": graph_id, "nodes": list(nodes.values()), "links": links, "groups": [], "version": 0.4}


def line(ratio: float) -> str:
    """Return ToMA Advanced's status line for a run in which every step is merged."""
    return f"On: {100 * ratio:.0f} % of the tokens merged, 16 of 17 blocks, {STEPS} of {STEPS} steps"
