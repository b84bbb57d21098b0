from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from scripts.comfy_pack import pack_module
from testbed import models
from tests.loop import loop

drawing = pack_module("nodes.report_charts")
MARGIN, CAPTION = drawing._MARGIN, drawing._CAPTION


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
    """Draw one map. Return a function from (row, column), in units of tokens, to the colour there."""
    image, cell = drawing.draw({(merged.height, merged.width): merged}, picture), side_of(merged, drawing.WIDTH)
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
    both, *alone = (drawing.draw(m) for m in (maps, *({grid: maps[grid]} for grid in maps)))
    assert {image.shape[2] for image in alone} == {both.shape[2]}, "as wide as one alone: letters stay as large"
    side = (drawing.WIDTH - MARGIN) // 2
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
    assert drawing.draw(maps, blue).shape == drawing.draw(maps).shape == drawing.draw(maps, grey).shape
    plain, over, tint = drawn(merged), drawn(merged, blue), drawing._TINT
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
    assert [row for row in range(1, 12) if colour(row, 4.25) == drawing.BLACK] == [6]
    assert [column for column in range(1, 16) if colour(2.25, column) == drawing.BLACK] == [8]
    for _, row, column in tokens(merged):
        if column in (1, 2, 3, 5, 6, 7, 9):  # not column 8, at which windows meet
            line = colour(row + 0.2, column) == drawing._EDGE
            assert line is bool(owner[row, column] != owner[row, column - 1])


def test_charts_stand_below_the_panels(maps: Any) -> None:
    from PIL import Image

    charts = [Image.new("RGB", (99, 30), (1, 2, 3)), Image.new("RGB", (99, 20), (4, 5, 6))]
    plain, more = drawing.draw(maps), drawing.draw(maps, charts=charts)
    assert more.shape[1] == plain.shape[1] + 50
    assert pixel(more, plain.shape[1] - MARGIN + 5, 40) == (1, 2, 3)
    assert pixel(more, plain.shape[1] - MARGIN + 35, 40) == (4, 5, 6)


@loop("size", [(1, 1), (1, 64), (64, 1), (3, 40)])
def test_any_grid_can_be_drawn(flux: Any, attach: Any, stats_of: Any, size: tuple[int, int]) -> None:
    model = attach(flux, min_tokens=4)
    models.sample(model, *(2 * side for side in size), steps=1)
    image = drawing.draw(stats_of(model).maps)
    assert image.isfinite().all()
    assert min(image.shape[1:3]) > 40


def test_without_a_map_it_is_an_empty_picture() -> None:
    empty = drawing.draw({})
    assert empty.shape[2] > 700
    assert pixel(empty, 5, 5) == drawing.PAPER
