"""Test the charts and the merge map pixel by pixel: the heights of bars, the colours of squares, dots and lines."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from scripts.comfy_pack import pack_module
from testbed import models
from tests.loop import loop

charts = pack_module("nodes.report_charts")
MARGIN, CAPTION = charts._MARGIN, charts._CAPTION
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


@pytest.fixture
def maps(unet: Any, attach: Any, stats_of: Any) -> Any:
    """Return the merge maps of a real run, by grid: 12 x 16 and 6 x 8."""
    model = attach(unet)
    models.sample(model, 24, 32, steps=1)
    return stats_of(model).maps


def pixel(image: torch.Tensor, y: float, x: float) -> tuple[int, int, int]:
    return tuple((image[0, int(y), int(x)] * 255).round().int().tolist())  # type: ignore[return-value]


Colour = Callable[[float, float], tuple[int, int, int]]


def drawn(merged: Any, picture: Any = None) -> Colour:
    """Draw one map. Return a function that returns the colour at (row, column), in units of tokens."""
    image, cell = charts.draw({(merged.height, merged.width): merged}, picture), side_of(merged, charts.WIDTH)
    return lambda row, column: pixel(image, MARGIN + CAPTION + row * cell, MARGIN + column * cell)


def side_of(merged: Any, width: int) -> int:
    """Return the side of a token in a panel of the given width, in pixels."""
    return int(width // max(merged.height, merged.width))


def tokens(merged: Any) -> Iterator[tuple[int, int, int]]:
    """Yield (index, row, column) of all tokens."""
    for token in range(merged.height * merged.width):
        yield token, *divmod(token, merged.width)


@pytest.mark.compat
def test_one_panel_per_grid_the_finest_first(maps: Any) -> None:
    """Dots are at the destinations and nowhere else."""
    both, *alone = (charts.draw(m) for m in (maps, *({grid: maps[grid]} for grid in maps)))
    assert {image.shape[2] for image in alone} == {both.shape[2]}, "as wide as one alone: letters stay as large"
    side = (charts.WIDTH - MARGIN) // 2
    for left, merged, number in ((MARGIN, maps[12, 16], 96), (2 * MARGIN + side, maps[6, 8], 24)):
        cell, places = side_of(merged, side), set(merged.destinations.tolist())
        assert len(places) == number
        for token, row, column in tokens(merged):
            y, x = MARGIN + CAPTION + (row + 0.5) * cell, left + (column + 0.5) * cell
            assert (pixel(both, y, x) == (255, 255, 255)) is (token in places)


def test_a_region_has_its_destinations_colour(maps: Any) -> None:
    merged = maps[12, 16]
    colour, owner = drawn(merged), merged.owner.tolist()
    assert set(owner) == set(merged.destinations.tolist())
    assert all(owner[d] == d for d in merged.destinations.tolist())
    for token, row, column in tokens(merged):
        there, across = divmod(owner[token], 16)
        # Avoid the middle of a cell, where dots are drawn, and its border, where lines are drawn.
        assert colour(row + 0.2, column + 0.2) == colour(there + 0.2, across + 0.2)


def test_a_picture_shows_through_and_everything_else_stays_on_it(maps: Any) -> None:
    merged = maps[12, 16]
    blue, grey = torch.tensor([0.0, 0.0, 1.0]).expand(3, 48, 64, 3), torch.full((1, 6, 8, 1), 0.5)
    assert charts.draw(maps, blue).shape == charts.draw(maps).shape == charts.draw(maps, grey).shape
    plain, over, tint = drawn(merged), drawn(merged, blue), charts._TINT
    for token, row, column in tokens(merged):
        here = row + 0.2, column + 0.2
        mixed = [(1 - tint) * 255 * (n == 2) + tint * part for n, part in enumerate(plain(*here))]
        assert over(*here) == pytest.approx(mixed, abs=2)
        if token in merged.destinations.tolist():
            assert over(row + 0.5, column + 0.5) == (255, 255, 255)


def test_lines_are_at_the_windows_and_between_tokens_with_different_destinations(maps: Any) -> None:
    merged = maps[12, 16]
    colour, owner = drawn(merged, torch.zeros(1, 8, 8, 3)), merged.owner.view(12, 16)
    assert merged.cuts == ((0, 6, 12), (0, 8, 16))
    assert [row for row in range(1, 12) if colour(row, 4.25) == charts.BLACK] == [6]
    assert [column for column in range(1, 16) if colour(2.25, column) == charts.BLACK] == [8]
    for _, row, column in tokens(merged):
        if column in (1, 2, 3, 5, 6, 7, 9):  # not column 8, at which windows meet
            line = colour(row + 0.2, column) == charts._EDGE
            assert line is bool(owner[row, column] != owner[row, column - 1])


def test_charts_stand_below_the_panels(maps: Any) -> None:
    from PIL import Image

    below = [Image.new("RGB", (99, 30), (1, 2, 3)), Image.new("RGB", (99, 20), (4, 5, 6))]
    plain, more = charts.draw(maps), charts.draw(maps, charts=below)
    assert more.shape[1] == plain.shape[1] + 50
    assert pixel(more, plain.shape[1] - MARGIN + 5, 40) == (1, 2, 3)
    assert pixel(more, plain.shape[1] - MARGIN + 35, 40) == (4, 5, 6)


@loop("size", [(1, 1), (1, 64), (64, 1), (3, 40)])
def test_any_grid_can_be_drawn(flux: Any, attach: Any, stats_of: Any, size: tuple[int, int]) -> None:
    model = attach(flux, min_tokens=4)
    models.sample(model, *(2 * side for side in size), steps=1)
    image = charts.draw(stats_of(model).maps)
    assert image.isfinite().all()
    assert min(image.shape[1:3]) > 40


def test_without_a_map_it_is_an_empty_picture() -> None:
    empty = charts.draw({})
    assert empty.shape[2] > 700
    assert pixel(empty, 5, 5) == charts.PAPER
