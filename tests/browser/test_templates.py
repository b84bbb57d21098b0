"""The templates and the demo's graph open as they were saved, in both renderers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scripts.comfyui import ROOT
from tests.browser.graphs import SEEDS

TEMPLATES = sorted((ROOT / "workflows").glob("*.json"))
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


def test_the_demo_opens_with_its_own_graph(page: Any) -> None:
    """The address that `make demo ARGS=--serve` prints opens it at a readable size, and it does what its note says."""
    with page.second() as second:
        second.tab.goto(f"{page.server.url}/?template=Demo-SDXL&source=demo")
        second.tab.wait_for_function("window.app?.graph?.nodes.some(node => node.comfyClass === 'ToMADemoUNet')")
        second.tab.wait_for_timeout(1000)
        assert second.evaluate("() => app.canvas.ds.scale") >= 0.6
        assert second.evaluate(OVERLAPS) == []
        second.hear()
        of_type = "type => app.graph.nodes.filter(node => node.type === type && node.mode === 0).map(node => node.id)"
        (toma,) = second.evaluate(of_type, "ToMA")
        seed = next(SEEDS)  # the other renderer's run is in ComfyUI's cache
        for sampler in second.evaluate(of_type, "KSampler"):
            second.set(sampler, "steps", 3)
            second.set(sampler, "seed", seed)
        second.queue()
        verdict, work, times = second.text(toma).splitlines()
        assert verdict == "On: 50 % of the tokens merged, 46 of 52 blocks, 3 of 3 steps"
        assert "less work, counted" in work
        assert "bypassed" in times
        shown = "() => Object.values(app.nodeOutputs).filter(o => o.toma && o.images || o.a_images).length"
        assert second.evaluate(shown) == 2, "the report's picture and the compared ones"
        second.photograph("demo", second.evaluate("() => app.graph.nodes.map(n => n.id)"))


def test_an_app_shows_its_fields(page: Any) -> None:
    """The template for App mode shows its form instead of the graph, with ToMA's ratio."""
    template = json.loads((ROOT / "workflows" / "Z-Image Turbo.app.json").read_text(encoding="utf-8"))
    page.open(template, "app")
    fields = ["prompt", "ToMA ratio (0 = off)", "ToMA preset", "width", "height", "seed"]
    shown = """fields => {
        const lines = document.body.innerText.split("\\n")
        return fields.every(field => lines.includes(field))
    }"""
    try:
        page.tab.wait_for_function(shown, arg=fields)
    finally:
        page.evaluate("() => app.extensionManager.command.execute('Comfy.ToggleLinear')")
