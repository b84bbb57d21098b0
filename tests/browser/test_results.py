"""Test the results on the page: report, benchmark and calibration, in both renderers."""

from __future__ import annotations

from typing import Any

from tests.browser.graphs import NEW, TO_DO, WATCH, simple, workflow
from tests.browser.seen import height


def test_the_report_is_shown(page: Any, baseline: Any) -> None:
    """Run the demo's small Flux model, loaded by ComfyUI's own loader, with the default preset."""
    graph = simple()
    loader, sampler = graph["nodes"][0], graph["nodes"][4]
    loader.update(type="UNETLoader", widgets_values=["toma_demo_dit.safetensors", "default"])
    sampler["widgets_values"][2:6] = [12, 2, "euler", "simple"]
    page.open(graph, "report")
    assert page.text(7) == TO_DO["ToMAReport"]
    assert height(page, 7) < 360, "small until there is something to show"
    page.queue()
    page.tab.wait_for_timeout(1000)
    assert height(page, 7) >= 1000, "large enough for its picture"
    verdict, work, *lines = page.text(7).splitlines()
    assert verdict == "On: 50 % of the tokens merged, 7 of 7 blocks, 8 of 12 steps."
    assert work == "About 27 % less work, counted."
    assert [line for line in lines if line and line[0] != " "] == ["Where", "When", "How", "Picture"]
    assert page.picture("report", page.shown_image("text"), document=True).width == 816
    page.photograph("report-node", [7], document=True)
    assert page.noise - baseline == set()


def test_the_benchmark_is_shown(page: Any, baseline: Any) -> None:
    page.open(workflow(last="ToMABenchmark"), "benchmark")
    assert page.text(7) == TO_DO["ToMABenchmark"]
    assert height(page, 7) < 440
    page.evaluate(WATCH, 7)
    page.queue()
    page.tab.wait_for_timeout(1000)
    runs = [f"Measuring: run {n} of 12 ..." for n in range(1, 13)]
    assert page.evaluate("window.shown")[:-1] == runs, "four settings warm up and run twice"
    text = page.text(7)
    assert text.startswith(("Fastest worthwhile: ", "Leave ToMA off here", "Too noisy to tell"))
    assert "at 0.1 small shapes differ" in text, "what an error means is said"
    assert height(page, 7) >= 640
    assert "\nBars: time per step" in text, "the picture has no words"
    assert "latent 64 x 64" in page.details(7)
    assert "4 of 4 steps" in page.details(7)
    page.picture("benchmark", page.shown_image("text"))
    page.photograph("benchmark-node", [7])
    assert page.text(4) == NEW, "the model's own ToMA was not run"
    page.set(7, "runs", 3)
    page.set(7, "sweep", False)
    page.queue()
    assert page.text(4) == NEW, "it came from ComfyUI's cache, but the benchmark ran"
    assert page.noise - baseline == set()


def test_a_calibration_is_shown_and_not_made_again(page: Any, baseline: Any) -> None:
    page.open(workflow(last="ToMACalibrate"), "calibrate")
    assert page.text(7) == TO_DO["ToMACalibrate"]
    assert height(page, 7) < 440
    page.evaluate(WATCH, 7)
    page.queue()
    page.tab.wait_for_timeout(1000)
    shown = page.evaluate("window.shown")
    assert shown[:2] == [f"Measuring: run {n} of 3 ..." for n in (1, 2)]
    text = page.text(7)
    assert text.startswith(("Less error for the same work: ", "The preset 'balanced' is kept: "))
    assert "\nThe preset 'balanced' at ratio " in text
    assert page.shown_image("toma")
    page.photograph("calibrate-node", [7])
    page.evaluate("() => { window.shown = [] }")
    page.queue()
    page.tab.wait_for_timeout(1000)
    assert not [shown for shown in page.evaluate("window.shown") if shown.startswith("Measuring")]
    assert page.text(7) == text
    assert page.noise - baseline == set()
