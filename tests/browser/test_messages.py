"""Test in one renderer which node, browser tab and workflow show a run's status. Also test the help panel."""

from typing import Any

import pytest

from tests.browser.graphs import CACHED, EARLIER, NEW, graph, line, simple
from tests.browser.seen import help_is_shown

pytestmark = pytest.mark.parametrize("page", ["vue en"], indirect=True)


def test_after_a_reload_a_run_from_the_cache_says_so(page: Any) -> None:
    cached = page.open(simple(), "cached")
    page.queue()
    page.start(vue=True)
    page.open(cached, "cached")
    assert page.verdict(4) == NEW
    page.queue()
    assert page.verdict(4) == CACHED


def test_an_arrow_leads_from_the_presets_value_to_zero_and_back(page: Any) -> None:
    """Values between -1 and 0 are not allowed, so the arrows of a number field must skip them."""
    page.open(graph(), "arrows")
    value = "() => app.graph.getNodeById(4).widgets.find(w => w.name === 'start_percent').value"
    for given, stands in ((-1, -1), (-0.99, 0), (0.3, 0.3), (-0.01, -1)):
        page.set(4, "start_percent", given)
        assert page.evaluate(value) == stands


def test_two_nodes_and_a_queue_of_prompts(page: Any) -> None:
    both = graph()
    for key, each in list(both.items()):
        inputs = {k: [f"1{v[0]}", v[1]] if isinstance(v, list) else v for k, v in each["inputs"].items()}
        both[f"1{key}"] = {**each, "inputs": inputs}
    page.open(both, "two")
    page.set(14, "ratio", 0.75)
    page.press_run()
    page.set(4, "ratio", 0.25)
    page.queue()
    assert page.verdict(4) == line(0.25)
    assert page.verdict(14) == EARLIER.format(line(0.75)), "ComfyUI took it from its cache in the second run"


def test_a_run_is_shown_in_its_own_workflow(page: Any) -> None:
    """When the run ends, a second workflow with the same node ids is open. The second workflow must not show the run's
    status."""
    mine = page.open(graph(steps=16), "mine")
    page.press_run()
    page.open(graph(), "other")
    page.wait_until_idle()
    assert page.verdict(4) == NEW
    page.open(mine, "mine again")
    assert page.verdict(4).startswith("On: 50 % of the tokens merged")


def test_another_browser_tab_shows_nothing(page: Any) -> None:
    same = page.open(graph(), "first")
    with page.second() as second:
        second.open(same, "second")
        page.queue()
        assert page.verdict(4) == line(0.5)
        assert second.verdict(4) == NEW


def test_the_panel_of_parameters_shows_no_empty_field(page: Any) -> None:
    page.open(simple(), "panel")
    page.evaluate("() => app.canvas.selectNode(app.graph.getNodeById(4))")
    options = "() => app.graph.getNodeById(4).widgets.find(w => w.name === 'toma_status').options"
    assert page.evaluate(f"() => ({options})().hideInPanel") is True
    page.evaluate("() => app.canvas.deselectAll()")


@pytest.mark.parametrize("node_type", ["ToMAReport", "ToMABenchmark", "ToMACalibrate"])
def test_help_page_opens(page: Any, node_type: str) -> None:
    help_is_shown(page, node_type)
