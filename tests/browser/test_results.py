"""Test the results on the page: report, benchmark and calibration, in both renderers."""

from typing import Any

from demo.showcase_graphs import DIT_FILE
from tests.browser.graphs import NEW, TEXTS, WATCH, graph, node, simple


def opened(page: Any, prompt: Any, name: str) -> None:
    """Open a graph, and watch its last node, which is small until there is something to show."""
    page.open(prompt, name)
    page.settle()
    assert page.text(7) == TEXTS[f"{name}_to_do"]
    assert page.height(7) < 440
    page.evaluate(WATCH, 7)


def has_grown(page: Any, height: int) -> None:
    page.expect(True, lambda: page.height(7) >= height)


def test_the_report_is_shown(page: Any, baseline: Any) -> None:
    """Run the demo's small Flux model, loaded by ComfyUI's own loader, with the default preset."""
    prompt = simple() | {"1": node("UNETLoader", unet_name=DIT_FILE, weight_dtype="default")}
    prompt["5"]["inputs"].update(steps=12, scheduler="simple")
    opened(page, prompt, "report")
    page.queue()
    has_grown(page, 1000)
    verdict, work, *lines = page.text(7).splitlines()
    assert verdict == "On: 50 % of the tokens merged, 7 of 7 blocks, 8 of 12 steps."
    assert work == "About 27 % less work, counted."
    assert [line for line in lines if line and line[0] != " "] == ["Where", "When", "How", "Picture"]
    picture = page.picture("text")
    assert picture.width == 816
    page.save("report", picture)
    page.photograph("report-node", 7)
    assert page.noise - baseline == set()


def test_the_benchmark_is_shown(page: Any, baseline: Any) -> None:
    opened(page, graph(last="ToMABenchmark"), "benchmark")
    page.queue()
    has_grown(page, 640)
    runs = [f"Measuring: run {n} of 12 ..." for n in range(1, 13)]
    assert page.evaluate("window.shown")[:-1] == runs, "four settings warm up and run twice"
    text = page.text(7)
    assert text.startswith(("Fastest worthwhile: ", "Leave ToMA off here", "Too noisy to tell"))
    assert "at 0.1 small shapes differ" in text, "what an error means is said"
    assert "\nBars: time per step" in text, "the picture has no words"
    assert "latent 64 x 64" in page.details(7)
    assert "4 of 4 steps" in page.details(7)
    assert page.picture("text")
    assert page.text(4) == NEW, "the model's own ToMA was not run"
    page.set(7, "runs", 3)
    page.set(7, "sweep", False)
    page.queue()
    assert page.text(4) == NEW, "it came from ComfyUI's cache, but the benchmark ran"
    assert page.noise - baseline == set()


def test_a_calibration_is_shown_and_not_made_again(page: Any, baseline: Any) -> None:
    opened(page, graph(last="ToMACalibrate"), "calibrate")
    page.queue()
    has_grown(page, 560)
    assert page.evaluate("window.shown")[:2] == [f"Measuring: run {n} of 3 ..." for n in (1, 2)]
    text = page.text(7)
    assert text.startswith(("Less error for the same work: ", "The preset 'balanced' is kept: "))
    assert "\nThe preset 'balanced' at ratio " in text
    assert page.picture("toma")
    page.evaluate("() => { window.shown = [] }")
    page.queue()
    assert not [shown for shown in page.evaluate("window.shown") if shown.startswith("Measuring")]
    assert page.text(7) == text
    assert page.noise - baseline == set()
