"""Test the charts pixel by pixel: the heights of bars and the colours of squares."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from scripts.comfy_pack import pack_module
from tests.loop import loop

charts = pack_module("nodes.report_charts")
Stats = pack_module("toma_core.stats").RunStats
Reason = pack_module("toma_core.reasons").Reason
report_text = pack_module("nodes.adapters.report_text")


@pytest.fixture
def stats() -> Any:
    """Return stats of ten steps, of which steps 3 to 8 merge 25 to 75 % of the tokens. The block middle.0 is never
    merged. The block double.1 is merged, except for its part attn1."""
    made = Stats(total_steps=10)
    for step in range(10):
        made.count_evaluation(step, {2: 0.25, 3: 0.5, 4: 0.5, 5: 0.5, 6: 0.5, 7: 0.75}.get(step, 0.0))
    for block in ("double.0", "double.1", "single.0", "single.10", "single.2"):
        for step in range(2, 8):
            made.merged(block, step)
    made.not_merged("middle.0", Reason.TOO_FEW_TOKENS(least=9))
    made.not_merged("double.1", Reason.BLOCK_REPLACED(), "attn1")
    return made


def runs(column: np.ndarray, colour: tuple[int, int, int]) -> int:
    return int((column == colour).all(-1).sum())


def test_a_steps_bar_is_as_high_as_its_share_of_tokens(stats: Any) -> None:
    pixels = np.asarray(charts.steps_chart(stats, 800))
    each = (800 - charts._AXIS - charts._PAD) / 10
    for step, share in enumerate([1, 1, 0.75, 0.5, 0.5, 0.5, 0.5, 0.25, 1, 1]):
        column = pixels[:, int(charts._AXIS + (step + 0.5) * each)]
        height = runs(column, charts.MERGED) + runs(column, charts.FULL)
        assert abs(height - share * charts._STRIP) <= 3


def test_a_run_that_merged_nothing_shows_full_steps_only() -> None:
    made = Stats(total_steps=2)
    made.count_evaluation(0, 0.5)
    made.not_merged("double.0", Reason.TOO_FEW_TOKENS(least=9))
    assert not (np.asarray(charts.steps_chart(made, 400)) == charts.MERGED).all(-1).any()


@loop(("width", "steps"), [(330, 1), (330, 1000), (800, 0)])
def test_any_number_of_steps_fits(width: int, steps: int) -> None:
    made = Stats(total_steps=steps)
    for step in range(steps):
        made.count_evaluation(step, 0.5)
    assert charts.steps_chart(made, width).size[0] == width


def test_blocks_have_a_row_for_each_stack_in_natural_order(stats: Any) -> None:
    image = charts.blocks_chart(stats, 800)
    left = 2 * charts._PAD + round(charts.font(charts.SMALL).getlength("middle"))
    rows = [
        [image.getpixel((left + column * charts._PITCH + 3, row * charts._PITCH + 3)) for column in range(3)]
        for row in range(3)
    ]
    assert rows[0] == [charts.MERGED, charts.PARTLY, charts.PAPER]
    assert rows[1] == [charts.FULL, charts.PAPER, charts.PAPER]
    assert rows[2] == [charts.MERGED] * 3


def test_many_blocks_break_into_lines(stats: Any) -> None:
    narrow, wide = charts.blocks_chart(stats, 330), charts.blocks_chart(stats, 1600)
    for index in range(38):
        stats.merged(f"single.{index}", 2)
    assert charts.blocks_chart(stats, 330).height > narrow.height
    assert charts.blocks_chart(stats, 1600).height == wide.height


def test_numbers_in_squares_are_those_of_the_report(stats: Any) -> None:
    for block in range(5):
        stats.not_merged(f"late.{block}", Reason.NOTHING_TO_MERGE())
    assert stats.unmerged_reasons()[0] == Reason.NOTHING_TO_MERGE()
    first = next(line for line in map(str, report_text.report(stats)) if "not merged (" in line)
    assert "late.0-4" in first


def test_nothing_lies_on_another_and_no_margin_is_wide(stats: Any) -> None:
    """Check that few rows and columns of pixels at the edges are empty, and that no letter is cut off."""
    for image in (charts.steps_chart(stats, 800), charts.blocks_chart(stats, 800)):
        used = (np.asarray(image) != charts.PAPER).any(-1)
        rows, columns = np.flatnonzero(used.any(1)), np.flatnonzero(used.any(0))
        assert rows[0] <= 20
        assert image.height - rows[-1] <= 40
        assert columns[0] >= 1
        assert columns[-1] < 799
    assert min(charts.LARGE, charts.SMALL) * 450 / 816 >= 12, "letters of a picture in a node"


def test_bars_are_as_long_as_their_values_and_errors() -> None:
    bars = [
        charts.Bar("without ToMA", 100.0, "100 ms", charts.FULL, (95.0, 105.0)),
        charts.Bar("ratio 0.25", 80.0, "1.25x", charts.RECOMMENDED, (80.0, 80.0), 0.5),
        charts.Bar("ratio 0.5", 50.0, "2.00x", charts.MERGED, (50.0, 50.0), 1.0),
    ]
    image = charts.bar_chart(bars)
    pixels = np.asarray(image)
    full, merged = (max(runs(row, colour) for row in pixels) for colour in (charts.FULL, charts.MERGED))
    assert full == pytest.approx(2 * merged, abs=8), "whiskers hide a little of each"
    errors = {length for row in pixels if (length := runs(row, charts.ERROR))}
    assert max(errors) == pytest.approx(2 * min(errors), abs=3)


@loop("error", [float("nan"), float("inf")])
def test_an_error_that_is_no_number_is_the_longest(error: float) -> None:
    bars = [charts.Bar("preset", 0.7, "", error=0.5), charts.Bar("calibrated", 0.7, "", error=error)]
    assert max(runs(row, charts.ERROR) for row in np.asarray(charts.bar_chart(bars))) > 680
