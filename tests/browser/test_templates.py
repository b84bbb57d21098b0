"""The templates and the demo's graph open as they were saved, in both renderers."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageStat

from scripts.comfyui import ROOT
from tests.browser.conftest import SCREENSHOTS
from tests.browser.graphs import SEEDS

TEMPLATES = sorted((ROOT / "workflows").glob("*.json"))
COMPARE = "SDXL compare"
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

# Shows on every node of this pack what a long run ends with, through the page's own handlers: lines, and the size that
# a picture takes. Returns nodes that lie outside of the one group that they begin in.
AFTER_A_RUN = """lines => {
    for (const node of app.graph.nodes.filter(node => node.type.startsWith("ToMA") && node.widgets?.length)) {
        const message = { node: String(node.id), lines, more: [] }
        if (/Report|Benchmark|Calibrate/.test(node.type)) {
            const detail = { node: String(node.id), output: { toma: [message], images: [{}] } }
            window.comfyAPI.api.api.dispatchEvent(new CustomEvent("executed", { detail }))
        } else window.comfyAPI.api.api.dispatchEvent(new CustomEvent("toma.said", { detail: message }))
    }
}"""
# The Vue renderer measures only the nodes that are in view.
SEEN_WHOLE = "() => app.extensionManager.command.execute('Comfy.Canvas.FitView')"
OUTSIDE = """() => app.graph.nodes.filter(node => {
    const [x, y, w, h] = node.getBounding()
    return app.graph._groups.filter(({ _bounding: [left, top, width, height] }) =>
        left <= x && top <= y && x + w <= left + width && y + h <= top + height).length !== 1
}).map(node => [node.title, ...node.getBounding()])"""
LINES = [
    {
        "id": "on",
        "params": {"share": "50 %", "merged_blocks": 30, "blocks": 30, "merged_steps": 14, "steps": 20},
    },
    {"id": "work", "params": {"percent": 29}},
    {"id": "step_times", "params": {"seconds": 1.9, "without": 2.6, "times": 1.37}},
    {"id": "residual_cache", "params": {"size": 1234.5}},
    {"id": "no_kv_cache", "params": {"reason": {"id": "kv_too_large", "params": {"needed": 9.2, "limit": 4.8}}}},
]


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
    # The picture that is shown after a run does not exist.
    assert {each for each in page.noise - baseline if each[-1] != "/api/view"} == set()


def colours(page: Any, node_id: int) -> float:
    """Return how much the colours of a node's area differ on the screen: about 10 for an empty node."""
    page.evaluate("id => { app.canvas.ds.scale = 1; app.canvas.centerOnNode(app.graph.getNodeById(id)) }", node_id)
    page.tab.wait_for_timeout(1500)
    left, top, width, height = page.evaluate(
        """id => {
            const [x, y, w, h] = app.graph.getNodeById(id).getBounding()
            const [left, top] = app.canvas.convertOffsetToCanvas([x, y])
            const { x: dx, y: dy } = app.canvas.canvas.getBoundingClientRect()
            return [left + dx, top + dy, w, h]
        }""",
        node_id,
    )
    clip = {"x": left, "y": top + 60, "width": width, "height": height - 60}
    with Image.open(io.BytesIO(page.tab.screenshot(clip=clip))) as shot:
        return max(ImageStat.Stat(shot.convert("RGB")).stddev)


OF_TYPE = "type => app.graph.nodes.filter(node => node.type === type && node.mode === 0).map(node => node.id)"


def test_the_demo_opens_with_its_own_graph(page: Any) -> None:
    """The address that `make demo ARGS=--serve` prints opens it at a readable size, and it does what its note says."""
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
        seed = next(SEEDS)  # the other renderer's run is in ComfyUI's cache
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


def with_tiny_model(template: dict[str, Any]) -> dict[str, Any]:
    """Return a template with the demo's model, scene, latent and decoder in place of those that need a checkpoint."""
    kinds = {
        "CheckpointLoaderSimple": ("ToMADemoUNet", ["random", 0, "fixed"]),
        "EmptyLatentImage": ("ToMADemoLatent", [128, 128, 1]),
        "VAEDecode": ("ToMADemoDecode", [4]),
        "CLIPTextEncode": ("ToMADemoScene", [next(SEEDS), "fixed", 1, *["from seed"] * 14]),
    }
    gone = {link[0] for link in template["links"] if link[5] in ("CLIP", "VAE")}
    template["links"] = [link for link in template["links"] if link[0] not in gone]
    for node in template["nodes"]:
        if node["type"] in kinds:
            node["type"], node["widgets_values"] = kinds[node["type"]]
        node["inputs"] = [slot for slot in node["inputs"] if slot["link"] not in gone]
        node["outputs"] = [slot for slot in node["outputs"] if slot["type"] not in ("CLIP", "VAE")]
        if node["type"] == "KSampler":
            node["widgets_values"] = [next(SEEDS), "fixed", 3, 2, "euler", "normal", 1]
    return template


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
