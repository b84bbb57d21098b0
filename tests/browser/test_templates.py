"""Test that the templates and the demo's graph open as they were saved, in both renderers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from scripts.comfyui import ROOT
from tests.browser.conftest import SCREENSHOTS
from tests.browser.graphs import SEEDS
from tests.browser.seen import AFTER_A_RUN, LINES, OF_TYPE, OUTSIDE, OVERLAPS, SEEN_WHOLE, colours, with_tiny_model

TEMPLATES = sorted((ROOT / "workflows").glob("*.json"))
COMPARE = "03 SDXL compare"
MISSING = """() => {
    const found = [], look = graph => graph.nodes.forEach(node => {
        if (!LiteGraph.registered_node_types[node.type] && !node.subgraph) found.push(node.type)
        if (node.subgraph) look(node.subgraph)
    })
    look(app.graph)
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
    page.evaluate(SEEN_WHOLE)
    page.evaluate(AFTER_A_RUN, LINES)
    page.tab.wait_for_timeout(500)
    assert page.evaluate(OVERLAPS) == [], "after a run too"
    assert page.evaluate(OUTSIDE) == [], "every node is in its frame"
    # AFTER_A_RUN shows a picture that does not exist, which causes an error about /api/view.
    assert {each for each in page.noise - baseline if each[-1] != "/api/view"} == set()


def test_the_demo_opens_with_its_own_graph(page: Any) -> None:
    """Open the address that `make demo ARGS=--serve` prints."""
    with page.second() as second:
        second.tab.set_viewport_size({"width": 1280, "height": 720})
        second.tab.goto(f"{page.server.url}/?template=Demo-SDXL&source=demo")
        second.tab.wait_for_function("window.app?.graph?.nodes.some(node => node.comfyClass === 'ToMADemoUNet')")
        second.tab.wait_for_timeout(1000)
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        second.tab.screenshot(path=str(SCREENSHOTS / f"demo-1280-{page.renderer}.png"))
        assert second.evaluate("() => app.canvas.ds.scale") >= 0.55, "0.64 without the panel at the right"
        assert second.evaluate(OVERLAPS) == []
        second.hear()
        (toma,) = second.evaluate(OF_TYPE, "ToMA")
        seed = next(SEEDS)  # a new seed, because ComfyUI has cached the first renderer's run
        for sampler in second.evaluate(OF_TYPE, "KSampler"):
            second.set(sampler, "steps", 3)
            second.set(sampler, "seed", seed)
        second.queue()
        verdict, work, times = second.text(toma).splitlines()
        assert verdict == "On: 50 % of the tokens merged, 46 of 52 blocks, 3 of 3 steps"
        assert re.fullmatch(r"About \d+ % less work, counted", work)
        assert "bypassed" in times
        second.tab.screenshot(path=str(SCREENSHOTS / f"demo-1280-run-{page.renderer}.png"))
        assert second.evaluate(OVERLAPS) == []
        assert second.evaluate(OUTSIDE) == []
        for preview in second.evaluate(OF_TYPE, "PreviewImage"):
            assert colours(second, preview) > 30, "the picture is seen"


def test_compared_pictures_are_seen_and_saved(page: Any) -> None:
    template = json.loads((ROOT / "workflows" / f"{COMPARE}.json").read_text(encoding="utf-8"))
    page.open(with_tiny_model(template), "compare")
    saved = page.evaluate(OF_TYPE, "SaveImage")
    assert len(saved) == 2
    empty = [colours(page, node_id) for node_id in saved]
    page.queue()
    for node_id, before in zip(saved, empty, strict=True):
        assert colours(page, node_id) > before + 20, "the picture is seen"
    found = "() => Object.values(app.nodeOutputs).flatMap(o => o.images ?? []).filter(i => i.type === 'output').length"
    assert page.evaluate(found) == 2
    page.photograph("compare", page.evaluate(OF_TYPE, "SaveImage") + page.evaluate(OF_TYPE, "ImageCompare"))


def test_an_app_shows_its_fields(page: Any) -> None:
    """Open the template for App mode, which shows a form in place of the graph."""
    template = json.loads((ROOT / "workflows" / "19 Z-Image Turbo.app.json").read_text(encoding="utf-8"))
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
