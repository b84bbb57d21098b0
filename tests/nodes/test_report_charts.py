"""The charts, looked at pixel by pixel: bars as high as what they stand for, squares in their colours."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from scripts.comfy_pack import pack_module
from tests.loop import loop

charts = pack_module("nodes.report_charts")
Stats = pack_module("toma_core.stats").RunStats
Reason = pack_module("toma_core.reasons").Reason


@pytest.fixture
def stats() -> Any:
    """Ten steps, of which 3 to 8 merged half and more; three stages, one block whole and one merged in part."""
    told = Stats(total_steps=10)
    for step in range(10):
        told.count_evaluation(step, {2: 0.25, 3: 0.5, 4: 0.5, 5: 0.5, 6: 0.5, 7: 0.75}.get(step, 0.0))
    for block in ("double.0", "double.1", "single.0", "single.10", "single.2"):
        told.merged(block)
    told.not_merged("middle.0", Reason.TOO_FEW_TOKENS(least=9))
    told.not_merged("double.1 attn1", Reason.BLOCK_REPLACED())
    return told


def count(image: Any, colour: tuple[int, int, int]) -> int:
    return int((np.asarray(image) == colour).all(-1).sum())


def runs(column: np.ndarray, colour: tuple[int, int, int]) -> int:
    return int((column == colour).all(-1).sum())


def test_a_steps_bar_is_as_high_as_its_share_of_tokens(stats: Any) -> None:
    pixels = np.asarray(charts.steps_chart(stats, 800))
    each = (800 - 76 - charts._PAD) / 10
    heights = []
    for step in range(10):
        column = pixels[: charts._TOP + charts._STRIP, int(76 + (step + 0.5) * each)]
        heights.append(runs(column, charts.MERGED) + runs(column, charts.WHOLE))
    full = charts._STRIP
    for height, share in zip(heights, [1, 1, 0.75, 0.5, 0.5, 0.5, 0.5, 0.25, 1, 1], strict=True):
        assert abs(height - share * full) <= 3


def test_a_run_that_merged_nothing_shows_whole_steps_only() -> None:
    told = Stats(total_steps=2)
    told.count_evaluation(0, 0.5)
    told.not_merged("double.0", Reason.TOO_FEW_TOKENS(least=9))
    image = charts.steps_chart(told, 400)
    square = count(image.crop((0, charts._TOP + charts._STRIP, 400, image.height)), charts.MERGED)
    assert count(image, charts.MERGED) == square, "only the legend has the colour"


@loop(("width", "steps"), [(330, 1), (330, 1000), (800, 0)])
def test_any_number_of_steps_fits(width: int, steps: int) -> None:
    told = Stats(total_steps=steps)
    for step in range(steps):
        told.count_evaluation(step, 0.5)
    assert charts.steps_chart(told, width).size[0] == width


def test_blocks_have_a_row_for_each_stage_in_natural_order(stats: Any) -> None:
    image = charts.blocks_chart(stats, 800)
    square = charts._SQUARE + charts._GAP

    def colour(row: int, column: int) -> tuple[int, ...]:
        corner = charts._LABEL + column * square + 3, charts._TOP + row * square + 3
        return image.getpixel(corner)  # type: ignore[return-value]

    assert [colour(0, 0), colour(0, 1), colour(0, 2)] == [charts.MERGED, charts.PARTLY, charts.PAPER]
    assert [colour(1, 0), colour(1, 1)] == [charts.WHOLE, charts.PAPER]
    assert [colour(2, 0), colour(2, 1), colour(2, 2)] == [charts.MERGED] * 3


def test_many_blocks_break_into_lines_and_reasons_are_spelled_out(stats: Any) -> None:
    narrow, wide = charts.blocks_chart(stats, 330), charts.blocks_chart(stats, 1600)
    for index in range(38):
        stats.merged(f"single.{index}")
    assert charts.blocks_chart(stats, 330).height > narrow.height
    assert charts.blocks_chart(stats, 1600).height == wide.height
    stats.not_merged("double.0", "a reason that goes on and on " * 9)
    assert charts.blocks_chart(stats, 330).height > charts.blocks_chart(stats, 1600).height


def test_benchmark_bars_are_as_long_as_their_values() -> None:
    bars = [
        charts.Bar("without ToMA", 100.0, 95.0, 105.0, "100 ms", charts.WHOLE),
        charts.Bar("ratio 0.25", 80.0, 80.0, 80.0, "1.25x", charts.RECOMMENDED, 0.5),
        charts.Bar("ratio 0.5", 50.0, 50.0, 50.0, "2.00x", charts.MERGED, 1.0),
    ]
    image = charts.bar_chart(["verdict"], bars, ["a note " * 60])
    pixels = np.asarray(image)
    whole, merged = (max(runs(row, colour) for row in pixels) for colour in (charts.WHOLE, charts.MERGED))
    assert whole == pytest.approx(2 * merged, abs=8), "whiskers hide a little of each"
    distances = {length for row in pixels if (length := runs(row, charts.SECOND)) > 30}  # the legend's square is less
    assert max(distances) == pytest.approx(2 * min(distances), abs=3)
    assert image.height > charts.bar_chart(["verdict"], bars, ["a note"]).height
    assert charts.bar_chart(["a long verdict " * 9], bars, []).height > charts.bar_chart(["verdict"], bars, []).height


def test_a_setting_lies_left_of_dearer_ones_and_above_nearer_ones() -> None:
    dots = [charts.Dot(0.8, 0.1, "preset", charts.MERGED), charts.Dot(0.6, 0.2, "calibrated", charts.RECOMMENDED)]
    dots.append(charts.Dot(0.6, 0.05, "predicted", charts.RECOMMENDED, hollow=True))
    line = [(1.0, 0.0), (0.8, 0.05), (0.6, 0.15), (0.3, 9.0)]
    image = charts.front_chart(["verdict", "more"], line, dots, ["a note"])
    pixels = np.asarray(image)
    preset, found = (np.argwhere((pixels == dot.colour).all(-1)).mean(0) for dot in dots[:2])
    assert found[1] < preset[1] - 50, "less work is further left"
    assert found[0] < preset[0] - 50, "farther is higher"
    filled = count(image, charts.RECOMMENDED)
    assert filled == count(charts.front_chart(["verdict", "more"], line, dots[:2], ["a note"]), charts.RECOMMENDED)
    assert charts.front_chart(["verdict", "more"], [], [], []).width == image.width


def test_text_is_broken_into_lines_that_fit() -> None:
    lines = charts._wrapped("one two three four five six seven eight nine ten", 120)
    assert len(lines) > 2
    assert " ".join(lines) == "one two three four five six seven eight nine ten"
