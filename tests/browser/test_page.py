"""What a person sees: the real page in Chromium, in both of ComfyUI's renderers, on a real server with tiny models."""

from __future__ import annotations

import copy
import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from scripts.comfyui import ROOT

TEMPLATES = sorted((ROOT / "workflows").glob("*.json"))
IDS, SEEDS = count(1), count(1)  # a sampler that ComfyUI takes from its cache tells nothing new
ACTIVE = "sampling on fewer tokens ..."
STEPS = 4
WINDOW_SIZE = 20  # its place among the widgets of ToMA Advanced
# Records every text that a node of ours shows.
WATCH = """id => {
    const element = window.said(id)
    window.shown = []
    new MutationObserver(() => window.shown.push(element.textContent))
        .observe(element, { childList: true, subtree: true, characterData: true })
}"""
MISSING = """() => {
    const found = [], look = graph => graph.nodes.forEach(node => {
        if (!LiteGraph.registered_node_types[node.type] && !node.subgraph) found.push(node.type)
        if (node.subgraph) look(node.subgraph)
    })
    look(app.graph)
    return found
}"""

OVERLAPS = """() => {
    const found = [], nodes = app.graph.nodes, boxes = nodes.map(node => [...node.getBounding()])
    boxes.forEach(([x, y, w, h], i) => boxes.slice(0, i).forEach(([x2, y2, w2, h2], j) => {
        if (x < x2 + w2 && x2 < x + w && y < y2 + h2 && y2 < y + h) found.push([nodes[j].title, nodes[i].title])
    }))
    return found
}"""


def node(node_id: int, kind: str, pos: tuple[int, int], values: Any = (), inputs: Any = (), outputs: Any = ()) -> Any:
    """A node as a workflow file has it. inputs: (name, type, link). outputs: (type, links)."""
    return {
        "id": node_id,
        "type": kind,
        "pos": list(pos),
        "size": [320, 80],
        "flags": {},
        "order": node_id,
        "mode": 0,
        "inputs": [{"name": name, "type": type_, "link": link} for name, type_, link in inputs],
        "outputs": [{"name": type_, "type": type_, "links": list(links)} for type_, links in outputs],
        "properties": {},
        "widgets_values": list(values),
    }


def workflow(ratio: float = 0.5, *, last: str = "ToMAReport", ends_at: float = 1.0) -> dict[str, Any]:
    """Loader -> ToMA Advanced -> KSampler -> decode and report, or the benchmark instead of all that samples."""
    scene = [next(SEEDS), "fixed", 1, *["from seed"] * 14]
    advanced = ["balanced", ratio, 1, 0, -1, ends_at, "off", -1, 16, *["preset"] * 6, -1, 10, 5, *["preset"] * 2]
    advanced += [-1, "off", "preset", -1, "preset", "stack", -1]
    sampled = last == "ToMAReport"
    nodes = [
        node(1, "ToMADemoUNet", (0, 0), ["random", 0, "fixed"], outputs=[("MODEL", [1])]),
        node(
            2, "ToMADemoScene", (0, 160), scene, outputs=[("CONDITIONING", [2]), ("CONDITIONING", [3]), ("STRING", [])]
        ),
        node(3, "ToMADemoLatent", (0, 700), [128, 128, 1], outputs=[("LATENT", [4])]),
        node(4, "ToMAAdvanced", (400, 0), advanced, [("model", "MODEL", 1)], [("MODEL", [5, 6] if sampled else [5])]),
    ]
    links = [[1, 1, 0, 4, 0, "MODEL"]]
    if sampled:
        values = [next(SEEDS), "fixed", STEPS, 2, "euler", "normal", 1]
        into = [("model", "MODEL", 5), ("positive", "CONDITIONING", 2), ("negative", "CONDITIONING", 3)]
        nodes += [
            node(5, "KSampler", (850, 0), values, [*into, ("latent_image", "LATENT", 4)], [("LATENT", [7, 8])]),
            node(6, "ToMADemoDecode", (850, 400), [4], [("samples", "LATENT", 7)], [("IMAGE", [9])]),
            node(
                7,
                "ToMAReport",
                (1250, 0),
                [],
                [("model", "MODEL", 6), ("latent", "LATENT", 8), ("image", "IMAGE", 9)],
                [("STRING", []), ("IMAGE", []), ("LATENT", [])],
            ),
        ]
        links += [[2, 2, 0, 5, 1, "CONDITIONING"], [3, 2, 1, 5, 2, "CONDITIONING"], [4, 3, 0, 5, 3, "LATENT"]]
        links += [[5, 4, 0, 5, 0, "MODEL"], [6, 4, 0, 7, 0, "MODEL"], [7, 5, 0, 6, 0, "LATENT"]]
        links += [[8, 5, 0, 7, 1, "LATENT"], [9, 6, 0, 7, 2, "IMAGE"]]
    else:
        into = [("model", "MODEL", 5), ("positive", "CONDITIONING", 2), ("latent", "LATENT", 4)]
        outputs = [("IMAGE", []), ("STRING", []), ("FLOAT", [])]
        values = [0.6, "balanced", True, 4, 2]
        nodes.append(node(7, last, (850, 0), values, [*into, ("negative", "CONDITIONING", 3)], outputs))
        links += [[2, 2, 0, 7, 1, "CONDITIONING"], [3, 2, 1, 7, 3, "CONDITIONING"], [4, 3, 0, 7, 2, "LATENT"]]
        links += [[5, 4, 0, 7, 0, "MODEL"]]
    graph_id = f"00000000-0000-4000-8000-{next(IDS):012}"
    size = {"last_node_id": 7, "last_link_id": 9, "groups": [], "version": 0.4}
    return {"id": graph_id, "nodes": nodes, "links": links, **size}


def simple() -> dict[str, Any]:
    """The same with the simple ToMA node; it leaves grids below 256 tokens whole."""
    graph = workflow()
    graph["nodes"][3].update(type="ToMA", widgets_values=[0.5, "balanced"])
    return graph


def line(kept: float, *, coarse: bool = True) -> str:
    """What ToMA Advanced has to say of a run with every step merged, on grids of 32 x 32 and 16 x 16."""
    grids = f"1024 -> {round(1024 * kept)}" + (f", 256 -> {round(256 * kept)}" if coarse else "")
    return f"{grids} tokens in 16/17 blocks, {STEPS}/{STEPS} steps"


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_template_opens_without_a_missing_node(page: Any, baseline: Any, path: Path) -> None:
    listed = page.evaluate("() => fetch('/api/workflow_templates').then(r => r.json())")
    (pack,) = [name for name, templates in listed.items() if path.stem in templates]
    url = f"/api/workflow_templates/{pack}/{path.name}"
    template = page.evaluate("url => fetch(encodeURI(url)).then(r => r.json())", url)
    page.open(template, path.stem)
    assert page.evaluate("() => app.graph.nodes.length") == len(template["nodes"])
    assert page.evaluate(MISSING) == []
    assert page.evaluate(OVERLAPS) == [], "nodes are as large as the page makes them"
    assert page.noise - baseline == set()


def test_the_line_follows_the_ratio(page: Any, baseline: Any) -> None:
    page.open(workflow(0.5), "line")
    assert page.text(4) == "No run seen yet."
    page.photograph("advanced-before", [4])
    page.evaluate(WATCH, 4)
    page.queue()
    assert page.text(4) == line(0.5)
    assert page.evaluate("window.shown")[:1] == [ACTIVE]
    page.set(4, "ratio", 0.75)
    page.queue()
    assert page.text(4) == line(0.25)
    assert page.evaluate("window.shown") == [ACTIVE, line(0.5), ACTIVE, line(0.25)]
    page.photograph("advanced-after", [4])
    page.set(4, "ratio", 0.0)
    page.queue()
    assert page.text(4) == "Nothing is merged: the ratio is 0, or no step is in the range."
    page.queue()
    opacity = "() => getComputedStyle(window.said(4)).opacity"
    assert page.evaluate(opacity) == "0.5", "all of it came from the cache: the text is from an earlier run"
    assert page.noise - baseline == set()


def test_the_simple_node_before_and_after_a_run(page: Any, baseline: Any) -> None:
    page.open(simple(), "simple")
    page.photograph("node-before", [4], document=True)
    page.queue()
    assert page.text(4).startswith("1024 -> 512, 256 -> 128 tokens in 14/17 blocks")
    page.photograph("node-after", [4], document=True)
    assert page.noise - baseline == set()


def test_the_text_is_inside_its_node_and_not_saved(page: Any) -> None:
    page.open(workflow(), "inside")
    page.queue()
    for node_id in (4, 7):
        box = page.evaluate("id => { const r = app.graph.getNodeById(id).getBounding(); return [...r] }", node_id)
        element = page.evaluate(
            """id => {
                const r = window.said(id).getBoundingClientRect()
                const [x, y] = app.canvas.convertEventToCanvasOffset({ clientX: r.x, clientY: r.y })
                return [x, y, r.width / app.canvas.ds.scale, r.height / app.canvas.ds.scale]
            }""",
            node_id,
        )
        assert element[2] > 100
        assert element[3] >= 20
        assert box[0] <= element[0]
        assert element[0] + element[2] <= box[0] + box[2] + 1
        assert element[1] + element[3] <= box[1] + box[3] + 1
    saved = page.evaluate("() => app.graph.serialize()")
    values = {n["id"]: n.get("widgets_values") for n in saved["nodes"]}
    assert len(values[4]) == 27
    assert not values[7]
    assert "toma_said" not in json.dumps(page.evaluate("() => app.graphToPrompt().then(p => p.output)"))


def test_two_nodes_and_a_queue_of_prompts(page: Any) -> None:
    one = workflow(0.5)
    other = copy.deepcopy(one)
    for part in other["nodes"]:
        part["id"] += 10
        part["pos"][1] += 1200
        for slot in part["inputs"]:
            slot["link"] += 10
        for slot in part["outputs"]:
            slot["links"] = [link + 10 for link in slot["links"]]
    links = [[i + 10, a + 10, s, b + 10, t, kind] for i, a, s, b, t, kind in other["links"]]
    one["nodes"] += other["nodes"]
    one["links"] += links
    one.update(last_node_id=17, last_link_id=19)
    page.open(one, "two")
    page.set(14, "ratio", 0.75)
    page.press_run()
    page.set(4, "ratio", 0.25)
    page.queue()
    assert page.text(4) == line(0.75)
    assert page.text(14) == line(0.25)


def test_a_run_is_told_to_its_own_workflow(page: Any) -> None:
    """Another workflow that is open at the end, with the same node ids, is not written into; and the line is there
    when its own is opened again."""
    slow = workflow(0.5)
    slow["nodes"][4]["widgets_values"][2] = 12
    page.open(slow, "mine")
    page.press_run()
    page.open(workflow(0.5), "other")
    page.wait_until_idle()
    assert page.text(4) == "No run seen yet."
    page.open(slow, "mine again")
    assert page.text(4) == line(0.5).replace("4/4", "12/12")


def test_another_browser_tab_is_not_told(page: Any) -> None:
    same = workflow(0.5)
    page.open(same, "first")
    with page.second() as second:
        second.open(same, "second")
        page.queue()
        assert page.text(4) == line(0.5)
        assert second.text(4) == "No run seen yet."


def test_an_error_is_on_the_right_field(page: Any) -> None:
    """As in a file that was edited by hand: the widgets themselves keep to their range."""
    graph = workflow()
    widget = graph["nodes"][3]["widgets_values"]
    widget[WINDOW_SIZE] = 0
    page.open(graph, "error")
    page.press_run()
    page.tab.wait_for_function("app.lastNodeErrors?.[4]")
    (error,) = page.evaluate("() => app.lastNodeErrors[4].errors")
    assert error["extra_info"]["input_name"] == "window_size"
    for part in ("window_size is 0", "2 to 64", "Try 8"):
        assert part in error["details"]
    marked = "() => app.graph.getNodeById(4).inputs.filter(i => i.hasErrors).map(i => i.name)"
    page.tab.wait_for_function(f"() => ({marked})().length")
    assert page.evaluate(marked) == ["window_size"]
    page.photograph("error", [4])
    page.noise.clear()  # the page logs what the server refused
    widget[WINDOW_SIZE] = 8
    page.open(graph, "mended")
    page.queue()
    assert page.text(4) == line(0.5)


@pytest.mark.parametrize(
    ("last", "words"),
    [("ToMAReport", "in the last sampling run of a model"), ("ToMABenchmark", "recommends a ratio")],
)
def test_help_page_opens(page: Any, last: str, words: str) -> None:
    page.open(workflow(last=last), "help")
    page.evaluate("() => app.canvas.selectNode(app.graph.getNodeById(7))")
    page.tab.get_by_test_id("info-button").first.click()
    page.tab.get_by_text(words).first.wait_for()
    page.evaluate("() => app.canvas.deselectAll()")
    page.noise.clear()  # the page looks for a translation first


def test_the_report_is_shown(page: Any, baseline: Any) -> None:
    """With the small Flux model, which the stock loader loads and which is trained."""
    graph = workflow(0.5, ends_at=0.6)
    loader, advanced, sampler = (graph["nodes"][index] for index in (0, 3, 4))
    loader.update(type="UNETLoader", widgets_values=["toma_demo_dit.safetensors", "default"])
    advanced["widgets_values"][2:5] = [0, 0, 1]
    sampler["widgets_values"][2:6] = [12, 2, "euler", "simple"]
    page.open(graph, "report")
    page.queue()
    page.tab.wait_for_timeout(1000)
    assert page.text(7).startswith("1024 -> 512 tokens (32x32) in 5/7 blocks, ")
    (shown,) = page.evaluate(
        "() => Object.values(app.nodeOutputs).filter(o => o.text && o.images).map(o => o.images[0])"
    )
    assert page.picture("report", shown).width == 800
    page.photograph("report-node", [7], document=True)
    assert page.noise - baseline == set()


def test_the_benchmark_is_shown(page: Any, baseline: Any) -> None:
    page.open(workflow(last="ToMABenchmark"), "benchmark")
    page.queue()
    page.tab.wait_for_timeout(1000)
    text = page.text(7)
    for part in ("Recommended", "without ToMA: ", "ratio 0.2: ", "ratio 0.4: ", "ratio 0.6: ", "latent 64 x 64"):
        assert part in text
    assert "4/4 steps" in text
    (shown,) = page.evaluate(
        "() => Object.values(app.nodeOutputs).filter(o => o.text && o.images).map(o => o.images[0])"
    )
    picture = page.picture("benchmark", shown)
    assert isinstance(picture, Image.Image)
    page.photograph("benchmark-node", [7], document=True)
    assert page.text(4) == "No run seen yet.", "the model's own ToMA was not run"
    assert page.noise - baseline == set()
