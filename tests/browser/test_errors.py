"""Test that the page shows an error on the node that caused it, at validation and during a run, in both renderers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.browser.graphs import NEW, START, WINDOW_SIZE, broken, line, workflow

# JavaScript that connects a number to the input `ratio` of ToMA Advanced.
LINKED = """value => {
    const toma = app.graph.getNodeById(4)
    window.source = LiteGraph.createNode("PrimitiveFloat")
    window.source.pos = [0, 900]
    app.graph.add(window.source)
    window.source.widgets[0].value = value
    window.source.connect(0, toma, toma.findInputSlot("ratio"))
}"""
MARKED = "() => app.graph.getNodeById(4).inputs.filter(i => i.hasErrors).map(i => i.name)"


@pytest.mark.parametrize(
    ("index", "value", "sentence", "marked"),
    [
        (
            START,
            0.9,
            "Start percent (0.9) is larger than end percent (0.5), so nothing would be merged. Lower start "
            "percent or raise end percent.",
            ["end_percent", "start_percent"],
        ),
        (WINDOW_SIZE, 1, "window size is 1. Allowed: a whole number from 2 to 64. Try 8.", ["window_size"]),
        (1, 2.0, "ratio is 2. Allowed: a number from 0 to 0.95. Try 0.5.", ["ratio"]),
        (0, "best", 'preset is "best". Allowed: balanced, quality, paper. Choose one of them.', ["preset"]),
    ],
    ids=["range", "least", "limit", "choice"],
)
def test_what_is_refused_is_said_on_the_node(
    page: Any, index: int, value: Any, sentence: str, marked: list[str]
) -> None:
    graph = broken(page, index, value, ends_at=0.5)
    page.wait_for_text(4, "llowed" if "llowed" in sentence else "raise end")
    assert page.verdict(4) == sentence
    page.tab.wait_for_function(f"() => ({MARKED})().length")
    assert page.evaluate(MARKED) == marked
    page.photograph("error", [4])
    page.noise.clear()  # the page logs the server's refusal
    graph["nodes"][3]["widgets_values"][index] = workflow()["nodes"][3]["widgets_values"][index]
    page.open(graph, "mended")
    page.queue()
    assert page.verdict(4).startswith("On: 50 % of the tokens merged, ")


def test_what_fails_while_running_is_said_on_the_node(page: Any) -> None:
    """ComfyUI does not validate a value that comes over a link, so an invalid value causes an error during the run."""
    page.open(workflow(), "link")
    page.evaluate(LINKED, 2.0)
    page.queue()
    assert page.verdict(4) == "ratio is 2.0. Allowed: a number from 0 to 0.95. Try 0.5."
    assert page.text(7).startswith(NEW)
    page.noise.clear()  # the page logs the error in its console
    page.evaluate("() => { window.source.widgets[0].value = 0.5 }")
    page.queue()
    assert page.verdict(4) == line(0.5)


def test_an_input_that_is_missing_is_said_on_the_node(page: Any) -> None:
    graph = workflow()
    graph["nodes"][3]["inputs"][0]["link"] = None
    graph["nodes"][0]["outputs"][0]["links"] = []
    graph["links"] = graph["links"][1:]
    page.open(graph, "missing")
    page.press_run()
    page.wait_for_text(4, "connected")
    assert page.verdict(4) == "Nothing is connected to model. Connect it."
    page.noise.clear()
