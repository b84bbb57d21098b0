from __future__ import annotations

import json
import re
from typing import Any

import pytest

from scripts.comfyui import ROOT
from tests.browser.conftest import SCREENSHOTS
from tests.browser.graphs import START, WINDOW_SIZE, broken, workflow
from tests.browser.seen import (
    AFTER_A_RUN,
    LINES,
    OF_TYPE,
    OUTSIDE,
    OVERLAPS,
    SEEN_WHOLE,
    field,
    height,
    help_is_shown,
    unfold,
)

NOTE = "MarkdownNote"


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


@pytest.mark.parametrize(
    "path", ["workflows/10 Wan 2.2 image to video.json", "demo/workflows/Demo-SDXL.json"], ids=["template", "demo"]
)
def test_a_graph_stays_in_its_frame_and_notes_are_chinese(page: Any, path: str) -> None:
    graph = json.loads((ROOT / path).read_text(encoding="utf-8"))
    theirs = [node["properties"].get("toma_note", {}).get("zh") for node in graph["nodes"] if node["type"] == NOTE]
    page.open(graph, "note")
    page.evaluate(SEEN_WHOLE)
    saved = page.evaluate("kind => app.graph.serialize().nodes.filter(node => node.type === kind)", NOTE)
    if any(theirs):
        page.tab.get_by_text("高噪声模型两步").first.wait_for(state="attached")
        assert [node["widgets_values"] for node in saved] == [[text] for text in theirs]
        assert not any("toma_note" in node["properties"] for node in saved)
    page.evaluate(AFTER_A_RUN, LINES)
    page.tab.wait_for_timeout(500)
    assert all("绕过时" in page.text(toma) for toma in page.evaluate(OF_TYPE, "ToMA"))
    assert page.evaluate(OVERLAPS) == []
    assert page.evaluate(OUTSIDE) == []
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.tab.screenshot(path=str(SCREENSHOTS / f"note-zh-{page.renderer}.png"))
