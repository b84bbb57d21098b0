from __future__ import annotations

import json
import re
from typing import Any

import pytest

from scripts.comfyui import ROOT
from tests.browser.conftest import SCREENSHOTS
from tests.browser.graphs import SEEDS, START, WINDOW_SIZE, broken, workflow
from tests.browser.seen import (
    AFTER_A_RUN,
    LINES,
    OF_TYPE,
    OUTSIDE,
    OVERLAPS,
    SEEN_WHOLE,
    colours,
    field,
    height,
    help_is_shown,
    unfold,
    with_tiny_model,
)

TEMPLATES = sorted((ROOT / "workflows").glob("*.json"))
NEW = "尚未运行。"


@pytest.fixture(scope="module", params=["litegraph", "vue"])
def page(request: pytest.FixtureRequest, only_page: Any) -> Any:
    only_page.noise.clear()
    only_page.start(vue=request.param == "vue", language="zh")
    return only_page


def test_labels_lines_errors_and_help(page: Any) -> None:
    graph = workflow(0.5)
    graph["nodes"][3]["widgets_values"][3] = -1
    page.open(graph, "chinese")
    assert page.verdict(4) == "尚未运行。"
    assert page.verdict(7) == "尚未运行。请连接 ToMA 之后的模型和采样器的 Latent，然后运行。"
    assert field(page, "full_step_interval") == "预设（0 / 4）"
    assert height(page, 7) < 360, "small until there is something to show"
    page.queue()
    assert page.verdict(4) == "已启用：合并了 50 % 的 Token，17 个块中的 16 个，4 步中的 4 步"
    assert not re.search("[a-z]{3}", re.sub("ComfyUI|Token|torch|(input|middle|output)[.]", "", page.details(4)))
    assert re.fullmatch(r"计算量约减少 \d+ %（计数）", page.text(4).splitlines()[1])
    assert re.fullmatch(r"实测：每步 [\d.]+ 秒", page.text(4).splitlines()[2])
    unfold(page)
    assert field(page, "window_size") == "预设（8）"
    assert page.text(7).startswith("已启用：合并了 50 % 的 Token")
    page.photograph("chinese", [4, 7])
    broken(page, START, 0.9, ends_at=0.5)
    page.wait_for_text(4, "开始位置")
    assert page.verdict(4) == "开始位置（0.9）大于结束位置（0.5），不会合并任何内容。请调低开始位置或调高结束位置。"
    broken(page, WINDOW_SIZE, 0)
    page.wait_for_text(4, "窗口大小")
    assert page.verdict(4) == "窗口大小为 0。允许：2 到 64 的整数。可试 8。"
    page.wait_until_idle()
    help_is_shown(page, "ToMABenchmark")


def test_a_template_opens_with_its_note_and_stays_in_its_frame(page: Any) -> None:
    path = next(path for path in TEMPLATES if path.stem.endswith("Wan 2.2 image to video"))
    template = json.loads(path.read_text(encoding="utf-8"))
    (theirs,) = [node["properties"]["toma_note"] for node in template["nodes"] if node["type"] == "MarkdownNote"]
    page.open(template, "note")
    page.evaluate(SEEN_WHOLE)
    page.tab.get_by_text("高噪声模型两步").first.wait_for(state="attached")
    saved = page.evaluate("() => app.graph.serialize().nodes.filter(node => node.type === 'MarkdownNote')")
    assert [node["widgets_values"] for node in saved] == [[theirs["zh"]]]
    assert "toma_note" not in saved[0]["properties"]
    page.evaluate(AFTER_A_RUN, LINES)
    page.tab.wait_for_timeout(500)
    assert page.evaluate(OVERLAPS) == []
    assert page.evaluate(OUTSIDE) == []
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.tab.screenshot(path=str(SCREENSHOTS / f"note-zh-{page.renderer}.png"))


def test_compared_pictures_are_seen(page: Any) -> None:
    (path,) = [path for path in TEMPLATES if path.stem.endswith("compare")]
    page.open(with_tiny_model(json.loads(path.read_text(encoding="utf-8"))), "compare")
    page.queue()
    for node_id in page.evaluate(OF_TYPE, "SaveImage"):
        assert colours(page, node_id) > 30, "the picture is seen"


def test_the_demo_says_what_it_saves(page: Any) -> None:
    """Open the graph that `make demo ARGS=--serve` opens."""
    page.open(json.loads((ROOT / "demo" / "workflows" / "Demo-SDXL.json").read_text(encoding="utf-8")), "demo")
    seed = next(SEEDS)
    for sampler in page.evaluate(OF_TYPE, "KSampler"):
        page.set(sampler, "steps", 2)
        page.set(sampler, "seed", seed)
    page.queue()
    (toma,) = page.evaluate(OF_TYPE, "ToMA")
    verdict, work, times = page.text(toma).splitlines()
    assert verdict == "已启用：合并了 50 % 的 Token，52 个块中的 46 个，2 步中的 2 步"
    assert re.fullmatch(r"计算量约减少 \d+ %（计数）", work)
    assert "绕过时" in times
    for preview in page.evaluate(OF_TYPE, "PreviewImage"):
        assert colours(page, preview) > 30, "the picture is seen"
    assert page.evaluate(OVERLAPS) == []
    assert page.evaluate(OUTSIDE) == []


def test_a_benchmark_says_nothing_of_the_cache(page: Any) -> None:
    page.open(workflow(last="ToMABenchmark"), "benchmark")
    assert page.verdict(7).startswith(NEW)
    assert height(page, 7) < 440
    page.set(7, "runs", 2)
    page.set(7, "steps", 2)
    page.set(7, "sweep", False)
    page.queue()
    assert page.verdict(7).startswith(("值得采用", "此处请关闭", "波动太大"))
    assert "0.1 时小形状有差别" in page.text(7), "what an error means is said"
    assert page.text(4) == NEW
    page.set(7, "runs", 3)
    page.queue()
    assert page.text(4) == NEW
