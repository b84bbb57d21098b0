from __future__ import annotations

from typing import Any

import pytest
import torch

from scripts.comfy_pack import pack_module
from testbed import models
from tests.loop import loop

drawing = pack_module("nodes.merge_map_image")
MARGIN, CAPTION = drawing._MARGIN, drawing._CAPTION


@pytest.fixture
def maps(unet: Any, attach: Any, stats_of: Any) -> Any:
    """Return the merge maps of a real run, by grid: 12 x 16 and 6 x 8."""
    model = attach(unet)
    models.sample(model, 24, 32, steps=1)
    return stats_of(model).maps


def pixel(image: torch.Tensor, y: float, x: float) -> tuple[int, int, int]:
    return tuple((image[0, int(y), int(x)] * 255).round().int().tolist())  # type: ignore[return-value]


def test_one_panel_per_grid_the_finest_first(maps: Any) -> None:
    assert set(maps) == {(12, 16), (6, 8)}
    both = drawing.draw(maps)
    fine = drawing.draw({(12, 16): maps[12, 16]})
    coarse = drawing.draw({(6, 8): maps[6, 8]})
    assert both.shape[2] == fine.shape[2] == coarse.shape[2], "as wide as one alone: letters stay as large"
    side = (drawing.WIDTH - MARGIN) // 2
    for left, merged in ((MARGIN, maps[12, 16]), (2 * MARGIN + side, maps[6, 8])):
        cell = side // max(merged.height, merged.width)
        for token in merged.destinations.tolist():
            row, column = divmod(token, merged.width)
            middle = MARGIN + CAPTION + (row + 0.5) * cell, left + (column + 0.5) * cell
            assert pixel(both, *middle) == (255, 255, 255)


@pytest.mark.compat
@loop("grid", [(12, 16), (6, 8)])
def test_dots_are_at_the_destinations_and_nowhere_else(maps: Any, grid: tuple[int, int]) -> None:
    merged = maps[grid]
    image = drawing.draw({grid: merged})
    cell = drawing.WIDTH // max(grid)
    places = set(merged.destinations.tolist())
    assert len(places) == grid[0] * grid[1] // 2
    for token in range(grid[0] * grid[1]):
        row, column = divmod(token, grid[1])
        middle = pixel(image, MARGIN + CAPTION + (row + 0.5) * cell, MARGIN + (column + 0.5) * cell)
        assert (middle == (255, 255, 255)) is (token in places)


def test_a_region_has_its_destinations_colour(maps: Any) -> None:
    merged = maps[12, 16]
    image = drawing.draw({(12, 16): merged})
    cell = drawing.WIDTH // 16

    def colour(token: int) -> tuple[int, int, int]:
        row, column = divmod(token, 16)
        # Avoid the middle of a cell, where dots are drawn, and its border, where lines are drawn.
        return pixel(image, MARGIN + CAPTION + (row + 0.2) * cell, MARGIN + (column + 0.2) * cell)

    owner = merged.owner.tolist()
    assert set(owner) == set(merged.destinations.tolist())
    assert all(owner[d] == d for d in merged.destinations.tolist())
    for token in range(192):
        assert colour(token) == colour(owner[token])


def test_a_picture_shows_through_and_everything_else_stays_on_it(maps: Any) -> None:
    merged = maps[12, 16]
    plain = drawing.draw({(12, 16): merged})
    blue, grey = torch.tensor([0.0, 0.0, 1.0]).expand(3, 48, 64, 3), torch.full((1, 6, 8, 1), 0.5)
    over = drawing.draw({(12, 16): merged}, blue)
    assert over.shape == plain.shape == drawing.draw({(12, 16): merged}, grey).shape
    cell, tint = drawing.WIDTH // 16, drawing._TINT
    for token in range(192):
        row, column = divmod(token, 16)
        y, x = int(MARGIN + CAPTION + (row + 0.2) * cell), int(MARGIN + (column + 0.2) * cell)
        assert torch.allclose(over[0, y, x], (1 - tint) * blue[0, 0, 0] + tint * plain[0, y, x], atol=2 / 255)
        middle = int(MARGIN + CAPTION + (row + 0.5) * cell), int(MARGIN + (column + 0.5) * cell)
        if token in merged.destinations.tolist():
            assert pixel(over, *middle) == (255, 255, 255)
    rows, columns = merged.cuts
    assert pixel(over, MARGIN + CAPTION + rows[1] * cell, MARGIN + 4.25 * cell) == drawing.BLACK
    assert pixel(over, MARGIN + CAPTION + 2.25 * cell, MARGIN + columns[1] * cell) == drawing.BLACK


def test_touching_tokens_with_different_destinations_are_parted_by_a_line(maps: Any) -> None:
    merged = maps[12, 16]
    image = drawing.draw({(12, 16): merged}, torch.zeros(1, 8, 8, 3))
    cell, owner = drawing.WIDTH // 16, merged.owner.view(12, 16)
    for row in range(12):
        for column in (1, 2, 3, 5, 6, 7, 9):  # not column 8, at which windows meet
            line = pixel(image, MARGIN + CAPTION + (row + 0.2) * cell, MARGIN + column * cell) == drawing._EDGE
            assert line is bool(owner[row, column] != owner[row, column - 1])


def test_charts_stand_below_the_panels(maps: Any) -> None:
    from PIL import Image

    charts = [Image.new("RGB", (99, 30), (1, 2, 3)), Image.new("RGB", (99, 20), (4, 5, 6))]
    plain, more = drawing.draw(maps), drawing.draw(maps, charts=charts)
    assert more.shape[1] == plain.shape[1] + 50
    assert pixel(more, plain.shape[1] - MARGIN + 5, 40) == (1, 2, 3)
    assert pixel(more, plain.shape[1] - MARGIN + 35, 40) == (4, 5, 6)


def test_lines_are_at_the_windows(maps: Any) -> None:
    merged = maps[12, 16]
    rows, columns = merged.cuts
    assert (rows, columns) == ((0, 6, 12), (0, 8, 16))
    image = drawing.draw({(12, 16): merged})
    cell = drawing.WIDTH // 16
    ink = drawing.BLACK
    for row in range(1, 12):
        assert (pixel(image, MARGIN + CAPTION + row * cell, MARGIN + 4.25 * cell) == ink) is (row == 6)
    for column in range(1, 16):
        assert (pixel(image, MARGIN + CAPTION + 2.25 * cell, MARGIN + column * cell) == ink) is (column == 8)


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
