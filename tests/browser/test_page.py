"""Test the page in real Chromium, in both renderers, on a real server with tiny models."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.browser.graphs import ACTIVE, EARLIER, EMPTY, NEW, SEEDS, WATCH, WINDOW_SIZE, broken, line, simple, workflow
from tests.browser.seen import field, unfold


def test_the_line_follows_the_ratio(page: Any, baseline: Any) -> None:
    page.open(workflow(0.5), "line")
    assert page.verdict(4) == NEW
    page.photograph("advanced-before", [4])
    page.evaluate(WATCH, 4)
    page.queue()
    assert page.verdict(4) == line(0.5)
    assert page.evaluate("window.shown")[:1] == [ACTIVE]
    page.set(4, "ratio", 0.75)
    page.queue()
    assert page.verdict(4) == line(0.75)
    assert page.evaluate("window.shown") == [ACTIVE, line(0.5), EARLIER.format(line(0.5)), ACTIVE, line(0.75)]
    details = page.details(4).splitlines()
    assert details[0] == "tokens: 1024 -> 256 (32 x 32), 256 -> 64 (16 x 16)"
    assert "merged steps: 1-4, at ratio 0.75" in details
    page.photograph("advanced-after", [4])
    page.set(4, "ratio", 0.0)
    page.queue()
    assert page.verdict(4) == "Off: the ratio is 0."
    page.queue()
    assert page.verdict(4) == EARLIER.format("Off: the ratio is 0."), "all of it came from the cache"
    assert page.noise - baseline == set()


def test_the_simple_node_before_and_after_a_run(page: Any, baseline: Any) -> None:
    page.open(simple(), "simple")
    page.photograph("node-before", [4])
    page.queue()
    assert page.verdict(4) == "On: 50 % of the tokens merged, 14 of 17 blocks, 4 of 4 steps"
    page.photograph("node-after", [4], document=True)
    assert page.noise - baseline == set()


def test_a_number_after_every_run(page: Any) -> None:
    page.open(simple(), "numbers")
    page.set(3, "width", 192)  # no other test has timed this size without ToMA
    page.queue()
    verdict, work, timed = page.text(4).splitlines()
    assert re.fullmatch(r"About \d+ % less work, counted", work)
    assert re.fullmatch(r"Timed: [\d.]+ s per step", timed)
    page.evaluate("() => { app.graph.getNodeById(4).mode = 4 }")
    page.queue()
    times = r"Timed: ([\d.]+) s per step, ([\d.]+) s bypassed: ([\d.]+)x as fast"
    *before, compared = page.text(4).splitlines()
    assert before == [EARLIER.format(verdict), work]
    merged, bypassed, gain = map(float, re.fullmatch(times, compared).groups())
    assert bypassed / merged == pytest.approx(gain, rel=0.2), "both are rounded"
    page.evaluate("() => { app.graph.getNodeById(4).mode = 0 }")
    page.set(5, "seed", next(SEEDS))  # without a new seed ComfyUI could use its cached result
    page.queue()
    assert page.text(4).splitlines()[:2] == [verdict, work]
    assert float(re.fullmatch(times, page.text(4).splitlines()[2])[2]) == bypassed
    page.set(3, "width", 160)
    page.queue()
    assert "bypassed" not in page.text(4), "of another size nothing is known"


def test_the_presets_values_are_shown_and_reset(page: Any) -> None:
    graph = workflow()
    graph["nodes"][3]["widgets_values"][3] = -1
    page.open(graph, "preset")
    unfold(page)
    assert field(page, "full_step_interval") == "preset (0 / 4)", "before a run: of UNets and of transformers"
    assert field(page, "window_size") == "preset (8 / 4)"
    assert field(page, "end_percent").startswith("1"), "it is set"
    page.photograph("advanced-unfolded", [4])
    page.queue()
    assert field(page, "window_size") == "preset (8)"
    if page.renderer == "litegraph":  # the Vue renderer does not redraw a list until its choice changes
        assert field(page, "similarity_from") == "preset (tokens)"
    assert field(page, "full_step_interval") == "preset (0)"
    assert field(page, "min_tokens") == "16", "it is set"
    page.set(4, "window_size", 4)
    assert field(page, "window_size") == "4"
    page.set(4, "preset", "quality")
    assert field(page, "full_step_interval") == "preset (0 / 2)", "of another preset nothing is known yet"
    page.set(4, "preset", "balanced")
    assert field(page, "full_step_interval") == "preset (0)"
    assert "preset (" not in json.dumps(page.evaluate("() => app.graph.serialize()"))
    page.evaluate("() => app.graph.getNodeById(4).widgets.find(w => w.name === 'toma_reset').callback()")
    values = page.evaluate("() => app.graph.getNodeById(4).serialize().widgets_values")
    assert values[:2] == ["balanced", 0.5], "these stay"
    assert set(values[2:15]) == {-1, "preset"}
    assert field(page, "window_size") == "preset (8)"


def inside(page: Any, node_id: int) -> None:
    """Check that a node's status text is inside the node and partly visible."""
    box = page.evaluate("id => { const r = app.graph.getNodeById(id).getBounding(); return [...r] }", node_id)
    element = page.evaluate(
        """id => {
            const r = window.statusOf(id).getBoundingClientRect()
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


def test_the_text_is_inside_its_node_and_not_saved(page: Any) -> None:
    page.open(workflow(), "inside")
    page.queue()
    for node_id in (4, 7):
        inside(page, node_id)
    saved = page.evaluate("() => app.graph.serialize()")
    values = {n["id"]: n.get("widgets_values") for n in saved["nodes"]}
    assert len(values[4]) == 16
    assert not values[7]
    assert "toma_status" not in json.dumps(page.evaluate("() => app.graphToPrompt().then(p => p.output)"))


def contrast(page: Any, selector: str) -> float:
    """Return the contrast of a text against its background, as WCAG defines it."""
    colours = page.evaluate(
        """selector => {
            const element = typeof selector === "number" ? window.statusOf(selector) : document.querySelector(selector)
            const style = getComputedStyle(element)
            return [style.color, style.backgroundColor, style.opacity]
        }""",
        selector,
    )
    assert colours[2] == "1"

    def luminance(colour: str) -> float:
        parts = [float(part) / 255 for part in re.findall(r"[\d.]+", colour)[:3]]
        assert len(parts) == 3
        return sum(
            weight * (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4)
            for part, weight in zip(parts, (0.2126, 0.7152, 0.0722), strict=True)
        )

    light, dark = sorted(map(luminance, colours[:2]), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_texts_can_be_read(page: Any) -> None:
    page.open(workflow(0.0), "contrast")
    assert contrast(page, 4) >= 4.5
    page.queue()
    page.queue()
    assert "earlier" in page.verdict(4)
    assert contrast(page, 4) >= 4.5
    broken(page, WINDOW_SIZE, 0)
    page.wait_for_text(4, "window size")
    assert "window size" in page.verdict(4)
    assert contrast(page, 4) >= 4.5
    page.noise.clear()


def test_a_new_node_is_as_large_as_what_is_visible(page: Any) -> None:
    page.open(EMPTY, "new")
    heights = {}
    for kind in ("ToMA", "ToMAAdvanced"):
        page.evaluate(
            """kind => {
                const node = LiteGraph.createNode(kind)
                node.pos = [100, 100]
                app.graph.add(node)
                window.made = node.id
            }""",
            kind,
        )
        page.tab.wait_for_timeout(700)
        heights[kind] = page.evaluate("() => app.graph.getNodeById(window.made).getBounding()[3]")
        page.evaluate("() => app.graph.remove(app.graph.getNodeById(window.made))")
    assert heights["ToMAAdvanced"] < heights["ToMA"] + 4 * 40 + 60, "four more rows, and the button that unfolds"


def test_in_a_narrow_window_the_text_is_inside_its_node_too(narrow: Any) -> None:
    narrow.open(simple(), "narrow")
    narrow.queue()
    # Bring the node into view at full size, because the text of an invisible node has no size.
    narrow.evaluate(
        """() => {
            app.canvas.ds.scale = 1
            app.canvas.centerOnNode(app.graph.getNodeById(4))
            app.canvas.setDirty(true, true)
        }"""
    )
    narrow.tab.wait_for_timeout(1200)
    inside(narrow, 4)
