"""Test in one renderer which node, browser tab and workflow show a run's status. Also test the help panel."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.browser.graphs import CACHED, EARLIER, NEW, line, simple, workflow
from tests.browser.seen import help_is_shown


@pytest.fixture(scope="module", params=["vue"])
def page(request: pytest.FixtureRequest, only_page: Any) -> Any:
    only_page.start(vue=True)
    return only_page


def test_after_a_reload_a_run_from_the_cache_says_so(page: Any) -> None:
    graph = simple()
    page.open(graph, "cached")
    page.queue()
    page.start(vue=page.renderer == "vue")
    page.open(graph, "cached")
    assert page.verdict(4) == NEW
    page.queue()
    assert page.verdict(4) == CACHED


def test_an_arrow_leads_from_the_presets_value_to_zero_and_back(page: Any) -> None:
    """Values between -1 and 0 are not allowed, so the arrow must skip them."""
    page.open(workflow(), "arrows")
    value = "() => app.graph.getNodeById(4).widgets.find(w => w.name === 'start_percent').value"
    for given, stands in ((-1, -1), (-0.99, 0), (0.3, 0.3), (-0.01, -1)):
        page.set(4, "start_percent", given)
        assert page.evaluate(value) == stands


def test_two_nodes_and_a_queue_of_prompts(page: Any) -> None:
    one = workflow(0.5)
    other = copy.deepcopy(one)
    for part in other["nodes"]:
        part["id"] += 10
        part["pos"][1] += 1200
        for slot in part["inputs"]:
            slot["link"] += 10
        for slot in part["outputs"]:
            slot["links"] = [link + 10 for link in slot["links"]]
    links = [[i + 10, a + 10, s, b + 10, t, kind] for i, a, s, b, t, kind in other["links"]]
    one["nodes"] += other["nodes"]
    one["links"] += links
    one.update(last_node_id=17, last_link_id=19)
    page.open(one, "two")
    page.set(14, "ratio", 0.75)
    page.press_run()
    page.set(4, "ratio", 0.25)
    page.queue()
    assert page.verdict(4) == line(0.25)
    assert page.verdict(14) == EARLIER.format(line(0.75)), "ComfyUI took it from its cache in the second run"


def test_a_run_is_shown_in_its_own_workflow(page: Any) -> None:
    """When the run ends, a second workflow with the same node ids is open. It must not show the run's status."""
    slow = workflow(0.5)
    slow["nodes"][4]["widgets_values"][2] = 12
    page.open(slow, "mine")
    page.press_run()
    page.open(workflow(0.5), "other")
    page.wait_until_idle()
    assert page.verdict(4) == NEW
    page.open(slow, "mine again")
    assert page.verdict(4) == line(0.5, 12)


def test_another_browser_tab_shows_nothing(page: Any) -> None:
    same = workflow(0.5)
    page.open(same, "first")
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
