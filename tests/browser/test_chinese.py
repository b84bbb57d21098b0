import json
import re
from typing import Any

import pytest

from scripts.comfyui import ROOT
from tests.browser.graphs import graph
from tests.browser.seen import OF_TYPE, field, help_is_shown, tidy, unfold

NOTE = "MarkdownNote"
pytestmark = pytest.mark.parametrize("page", ["litegraph zh", "vue zh"], indirect=True)


def test_labels_lines_errors_and_help(page: Any) -> None:
    page.open(graph(full_step_interval=-1), "chinese")
    unfold(page)
    assert page.verdict(4) == "尚未运行。"
    assert page.verdict(7) == "尚未运行。请连接 ToMA 之后的模型和采样器的 Latent，然后运行。"
    page.expect("预设（0 / 4）", field, page, "full_step_interval")
    page.queue()
    verdict, work, timed = page.text(4).splitlines()
    assert verdict == "已启用：合并了 50 % 的 Token，17 个块中的 16 个，4 步中的 4 步"
    assert not re.search("[a-z]{3}", re.sub("ComfyUI|Token|torch|(input|middle|output)[.]", "", page.details(4)))
    assert re.fullmatch(r"计算量约减少 \d+ %（计数）", work)
    assert re.fullmatch(r"实测：每步 [\d.]+ 秒", timed)
    page.expect("预设（8）", field, page, "window_size")
    assert page.text(7).startswith("已启用：合并了 50 % 的 Token")
    page.open(graph(window_size=0), "error")
    page.press_run()
    page.expect("窗口大小为 0。允许：2 到 64 的整数。可试 8。", page.verdict, 4)
    help_is_shown(page, "ToMABenchmark")


@pytest.mark.parametrize(
    "path", ["workflows/10 Wan 2.2 image to video.json", "demo/workflows/Demo-SDXL.json"], ids=["template", "demo"]
)
def test_a_graph_stays_in_its_frame_and_notes_are_chinese(page: Any, path: str) -> None:
    template = json.loads((ROOT / path).read_text(encoding="utf-8"))
    theirs = [node["properties"].get("toma_note", {}).get("zh") for node in template["nodes"] if node["type"] == NOTE]
    page.open(template, "note")
    saved = page.evaluate("kind => app.graph.serialize().nodes.filter(node => node.type === kind)", NOTE)
    if any(theirs):
        page.tab.get_by_text("高噪声模型两步").first.wait_for(state="attached")
        assert [node["widgets_values"] for node in saved] == [[text] for text in theirs]
        assert not any("toma_note" in node["properties"] for node in saved)
    tidy(page)
    assert all("绕过时" in page.text(toma) for toma in page.evaluate(OF_TYPE, "ToMA"))
