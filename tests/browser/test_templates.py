"""Test that the templates and the demo's graph open as they were saved, in both renderers."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from scripts.comfyui import ROOT
from tests.browser.graphs import SEEDS
from tests.browser.seen import OF_TYPE, OUTSIDE, OVERLAPS, colours, tidy

TEMPLATES = sorted((ROOT / "workflows").glob("*.json"))
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
    tidy(page)
    # `tidy` shows a picture that does not exist, which causes an error about /api/view.
    assert {each for each in page.noise - baseline if each[-1] != "/api/view"} == set()


def test_the_demo_opens_with_its_own_graph(page: Any) -> None:
    """Open the address that `make demo ARGS=--serve` prints."""
    with page.second() as second:
        second.tab.set_viewport_size({"width": 1280, "height": 720})
        second.tab.goto(f"{page.server.url}/?template=Demo-SDXL&source=demo")
        second.tab.wait_for_function("window.app?.graph?.nodes.some(node => node.comfyClass === 'ToMADemoUNet')")
        second.tab.wait_for_function("app.canvas.ds.scale !== 1")
        second.settle()
        assert second.evaluate("() => app.canvas.ds.scale") >= 0.55, "0.64 without the panel at the right"
        second.expect([], second.evaluate, OVERLAPS)
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
        second.expect([], second.evaluate, OVERLAPS)
        second.expect([], second.evaluate, OUTSIDE)
        for preview in second.evaluate(OF_TYPE, "PreviewImage"):
            second.expect(True, lambda preview=preview: colours(second, preview) > 30)


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
