"""Provide helpers that read the screen: field values, colours, and whether nodes overlap or leave their group."""

import io
import re
from typing import Any

from PIL import Image, ImageStat

from scripts.comfyui import ROOT
from tests.browser.graphs import graph

OF_TYPE = "type => app.graph.nodes.filter(node => node.type === type && node.mode === 0).map(node => node.id)"
OVERLAPS = """() => {
    const found = [], nodes = app.graph.nodes, boxes = nodes.map(node => [...node.getBounding()])
    boxes.forEach(([x, y, w, h], i) => boxes.slice(0, i).forEach(([x2, y2, w2, h2], j) => {
        if (x < x2 + w2 && x2 < x + w && y < y2 + h2 && y2 < y + h) found.push([nodes[j].title, nodes[i].title])
    }))
    return found
}"""
# JavaScript that returns the nodes that are not inside exactly one group.
OUTSIDE = """() => app.graph.nodes.filter(node => {
    const [x, y, w, h] = node.getBounding()
    return app.graph._groups.filter(({ _bounding: [left, top, width, height] }) =>
        left <= x && top <= y && x + w <= left + width && y + h <= top + height).length !== 1
}).map(node => [node.title, ...node.getBounding()])"""
# JavaScript that brings all nodes into view, because the Vue renderer measures only visible nodes.
SEEN_WHOLE = "() => app.extensionManager.command.execute('Comfy.Canvas.FitView')"
# JavaScript that sends every ToMA node the messages of a finished run, with `lines` as the status text.
AFTER_A_RUN = """lines => {
    for (const node of app.graph.nodes.filter(node => node.type.startsWith("ToMA") && node.widgets?.length)) {
        const message = { node: String(node.id), lines, more: [] }
        if (/Report|Benchmark|Calibrate/.test(node.type)) {
            const detail = { node: String(node.id), output: { toma: [message], images: [{}] } }
            window.comfyAPI.api.api.dispatchEvent(new CustomEvent("executed", { detail }))
        } else window.comfyAPI.api.api.dispatchEvent(new CustomEvent("toma.said", { detail: message }))
    }
}"""
LINES = [
    {
        "id": "on",
        "params": {"share": "50 %", "merged_blocks": 30, "blocks": 30, "merged_steps": 14, "steps": 20},
    },
    {"id": "work", "params": {"percent": 29}},
    {"id": "step_times", "params": {"seconds": 1.9, "without": 2.6, "times": 1.37}},
    {"id": "cache_size", "params": {"size": 1234.5}},
    {"id": "no_kv_cache", "params": {"reason": {"id": "kv_too_large", "params": {"needed": 9.2, "limit": 4.8}}}},
]


def tidy(page: Any) -> None:
    """Check that nodes do not overlap before and after a run, and that after the run they are inside their groups."""
    page.evaluate(SEEN_WHOLE)
    page.settle()
    page.expect([], page.evaluate, OVERLAPS)
    page.evaluate(AFTER_A_RUN, LINES)
    page.settle()
    page.expect([], page.evaluate, OVERLAPS)
    page.expect([], page.evaluate, OUTSIDE)


def field(page: Any, name: str) -> str:
    """Return the text in a field of ToMA Advanced, node 4. In the Vue renderer, the node must be in view."""
    in_canvas = "name => app.graph.getNodeById(4).widgets.find(w => w.name === name)._displayValue"
    on_page = """name => {
        const element = document.querySelector('[data-node-id="4"]')
        const input = element?.querySelector(`[aria-label="${name}"] input[aria-valuenow]`)
        const { options, value } = app.graph.getNodeById(4).widgets.find(w => w.name === name)
        if (!input) return element?.textContent.includes(options.getOptionLabel(value)) && options.getOptionLabel(value)
        const cover = getComputedStyle(input.parentElement, "::after").content
        return cover === "none" ? input.value : JSON.parse(cover)
    }"""
    return str(page.evaluate(on_page if page.renderer == "vue" else in_canvas, name))


def focus(page: Any, node_id: int) -> None:
    """Bring a node into view at full size, because a node that is not visible has no size in the Vue renderer."""
    page.evaluate("id => { app.canvas.ds.scale = 1; app.canvas.centerOnNode(app.graph.getNodeById(id)) }", node_id)
    page.evaluate("() => app.canvas.setDirty(true, true)")
    page.settle()


def unfold(page: Any) -> None:
    page.evaluate("() => { app.graph.getNodeById(4).showAdvanced = true }")
    focus(page, 4)


def colours(page: Any, node_id: int) -> float:
    """Return the standard deviation of the colours in a node's area of the screen. Without a picture it is about 10."""
    focus(page, node_id)
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


def help_is_shown(page: Any, node_type: str) -> None:
    """Select a node, press its info button, and wait for the first sentence of the node's help page."""
    page.open(graph(last=node_type), "help")
    page.noise.clear()
    page.evaluate("() => app.canvas.selectNode(app.graph.getNodeById(7))")
    page.tab.get_by_test_id("info-button").first.click()
    text = (ROOT / "web" / "docs" / node_type / f"{page.language}.md").read_text(encoding="utf-8")
    sentence = re.split(r"[.*。]", text.split("\n\n")[1])[0]
    page.tab.get_by_text(sentence).first.wait_for()
    page.evaluate("() => app.canvas.deselectAll()")
    ours = {noise for noise in page.noise if "/extensions/" in noise[1] + noise[2] or "toma" in str(noise).lower()}
    assert ours == set(), "no page is looked for in vain"
