"""Test that the page shows an error on the node that caused it, at validation and during a run, in both renderers."""

from typing import Any

import pytest

from tests.browser.graphs import NEW, graph, line, node

MARKED = "() => app.graph.getNodeById(4).inputs.filter(i => i.hasErrors).map(i => i.name)"


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (
            {"end_percent": 0.5, "start_percent": 0.9},
            "Start percent (0.9) is larger than end percent (0.5), so nothing would be merged. Lower start "
            "percent or raise end percent.",
        ),
        ({"window_size": 1}, "window size is 1. Allowed: a whole number from 2 to 64. Try 8."),
        ({"ratio": 2.0}, "ratio is 2. Allowed: a number from 0 to 0.95. Try 0.5."),
        ({"preset": "best"}, 'preset is "best". Allowed: balanced, quality, paper. Choose one of them.'),
    ],
    ids=["range", "least", "limit", "choice"],
)
def test_what_is_refused_is_said_on_the_node(page: Any, wrong: dict[str, Any], sentence: str) -> None:
    prompt = graph(**wrong)
    page.open(prompt, "error")
    page.press_run()
    page.expect(sentence, page.verdict, 4)
    page.expect(list(wrong), page.evaluate, MARKED)
    page.noise.clear()  # the page logs the server's refusal
    page.open(graph(), "mended")
    page.queue()
    assert page.verdict(4) == line(0.5)


def test_what_fails_while_running_is_said_on_the_node(page: Any) -> None:
    """ComfyUI does not validate a value that comes over a link, so an invalid value causes an error during the run."""
    prompt = {"8": node("PrimitiveFloat", value=2.0), **graph(ratio=["8", 0])}
    page.open(prompt, "link")
    page.queue()
    assert page.verdict(4) == "ratio is 2.0. Allowed: a number from 0 to 0.95. Try 0.5."
    assert page.text(7).startswith(NEW)
    page.noise.clear()  # the page logs the error in its console
    page.set(8, "value", 0.5)
    page.queue()
    assert page.verdict(4) == line(0.5)


def test_an_input_that_is_missing_is_said_on_the_node(page: Any) -> None:
    prompt = graph()
    del prompt["4"]["inputs"]["model"]
    page.open(prompt, "missing")
    page.press_run()
    page.expect("Nothing is connected to model. Connect it.", page.verdict, 4)
    page.noise.clear()
