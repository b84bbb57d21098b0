"""Test the page in real Chromium, in both renderers, on a real server with tiny models."""

import json
import re
from typing import Any

import pytest

from tests.browser.graphs import ACTIVE, EARLIER, NEW, SEEDS, WATCH, graph, line, simple
from tests.browser.seen import field, focus, unfold


def test_the_line_follows_the_ratio(page: Any, baseline: Any) -> None:
    page.open(graph(0.5), "line")
    assert page.verdict(4) == NEW
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
    page.set(4, "ratio", 0.0)
    page.queue()
    assert page.verdict(4) == "Off: the ratio is 0."
    page.queue()
    assert page.verdict(4) == EARLIER.format("Off: the ratio is 0."), "all of it came from the cache"
    assert page.noise - baseline == set()


def test_a_number_after_every_run(page: Any) -> None:
    prompt = simple()
    prompt["3"]["inputs"]["width"] = 192  # no other test has timed this size without ToMA
    prompt["5"]["inputs"]["steps"] = 10  # a busy page hears of some steps late
    page.open(prompt, "numbers")
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
    def shows(name: str, value: str) -> None:
        page.expect(value, field, page, name)

    page.open(graph(full_step_interval=-1), "preset")
    unfold(page)
    shows("full_step_interval", "preset (0 / 4)")  # before a run: of UNets and of transformers
    shows("window_size", "preset (8 / 4)")
    page.expect(True, lambda: field(page, "end_percent").startswith("1"))  # it is set
    page.queue()
    shows("window_size", "preset (8)")
    shows("full_step_interval", "preset (0)")
    if page.renderer == "litegraph":  # the Vue renderer does not redraw a list until its choice changes
        shows("granularity", "preset (stack)")
    shows("min_tokens", "16")  # it is set
    page.set(4, "window_size", 4)
    shows("window_size", "4")
    page.set(4, "preset", "quality")
    shows("full_step_interval", "preset (0 / 2)")  # of another preset nothing is known yet
    page.set(4, "preset", "balanced")
    shows("full_step_interval", "preset (0)")
    assert "preset (" not in json.dumps(page.evaluate("() => app.graph.serialize()"))
    page.evaluate("() => app.graph.getNodeById(4).widgets.find(w => w.name === 'toma_reset').callback()")
    values = page.evaluate("() => app.graph.getNodeById(4).serialize().widgets_values")
    assert values[:2] == ["balanced", 0.5], "these stay"
    assert set(values[2:-1]) == {-1, "preset"}
    shows("window_size", "preset (8)")


def inside(page: Any, node_id: int) -> bool:
    """Return whether a node's status text is inside the node and partly visible."""
    focus(page, node_id)
    x, y, width, height = page.evaluate("id => [...app.graph.getNodeById(id).getBounding()]", node_id)
    left, top, wide, high = page.evaluate(
        """id => {
            const r = window.statusOf(id).getBoundingClientRect()
            const [x, y] = app.canvas.convertEventToCanvasOffset({ clientX: r.x, clientY: r.y })
            return [x, y, r.width / app.canvas.ds.scale, r.height / app.canvas.ds.scale]
        }""",
        node_id,
    )
    seen = wide > 100 and high >= 20
    return seen and x <= left and left + wide <= x + width + 1 and y <= top and top + high <= y + height + 1


def test_the_text_is_inside_its_node_and_not_saved(page: Any, baseline: Any) -> None:
    page.open(simple(), "simple")
    page.queue()
    assert page.verdict(4) == "On: 50 % of the tokens merged, 14 of 17 blocks, 4 of 4 steps"
    page.photograph("node-after", 4)
    for width in (1600, 900):
        page.tab.set_viewport_size({"width": width, "height": 1000})
        for node_id in (4, 7):
            page.expect(True, inside, page, node_id)
    page.tab.set_viewport_size({"width": 1600, "height": 1000})
    saved = page.evaluate("() => app.graphToPrompt()")
    assert "toma_status" not in json.dumps(saved["output"])
    assert "of the tokens merged" not in json.dumps(saved["workflow"])
    assert page.noise - baseline == set()


def readable(page: Any) -> bool:
    """Return whether node 4's status text and its background differ by more than 140 of 255 in brightness. Greys that
    differ so much have a contrast above 4.5 as WCAG defines it."""
    return page.evaluate(
        """() => {
            const { color, backgroundColor, opacity } = getComputedStyle(window.statusOf(4))
            const [text, back] = [color, backgroundColor].map(colour => {
                const [r, g, b] = colour.match(/[\\d.]+/g).map(Number)
                return 0.299 * r + 0.587 * g + 0.114 * b
            })
            return opacity === "1" && Math.abs(text - back) > 140
        }"""
    )


def test_texts_can_be_read(page: Any) -> None:
    page.open(graph(0.0, min_tokens=100 + next(SEEDS)), "contrast")  # not cached by the other renderer
    assert readable(page)
    page.queue()
    page.queue()
    assert "earlier" in page.verdict(4)
    assert readable(page)
    page.open(graph(window_size=0), "error")
    page.press_run()
    page.expect(True, lambda: "window size" in page.verdict(4))
    assert readable(page)
    page.noise.clear()


def test_a_new_node_is_as_large_as_what_is_visible(page: Any) -> None:
    page.open({}, "new")
    heights = {}
    for kind in ("ToMA", "ToMAAdvanced"):
        made = page.evaluate(
            """kind => {
                const node = LiteGraph.createNode(kind)
                app.graph.add(node)
                return node.id
            }""",
            kind,
        )
        focus(page, made)
        heights[kind] = page.evaluate("id => app.graph.getNodeById(id).getBounding()[3]", made)
        page.evaluate("id => app.graph.remove(app.graph.getNodeById(id))", made)
    assert heights["ToMAAdvanced"] < heights["ToMA"] + 4 * 40 + 60, "four more rows, and the button that unfolds"
