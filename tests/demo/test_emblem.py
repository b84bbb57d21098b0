"""The icon and the banner equal the drawing of the code, at the registry's sizes."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from demo import emblem
from tests.loop import loop


@loop(("name", "size"), [("icon", (400, 400)), ("banner", (1260, 540))])
def test_committed_picture_is_the_drawn_one(name: str, size: tuple[int, int]) -> None:
    drawn = getattr(emblem, name)()
    committed = Image.open(emblem.FOLDER / f"{name}.png").convert(drawn.mode)
    assert drawn.size == committed.size == size
    # Another Pillow may round edges differently.
    assert np.abs(np.asarray(drawn, np.int16) - np.asarray(committed, np.int16)).mean() < 1


def test_similar_tokens_are_merged_and_edges_are_not() -> None:
    """Fewer than half of 256 tokens remain, and the sun's tokens are not merged."""
    boxes: list[tuple[float, ...]] = []

    class Pen:
        def rounded_rectangle(self, box: list[float], *_: object, **__: object) -> None:
            boxes.append(tuple(box))

    emblem._mosaic(Pen(), (0, 0, 16, 16), rows=16)  # type: ignore[arg-type]
    sides = sorted({round(box[2] - box[0]) for box in boxes})
    assert sides == [1, 2, 4]
    assert 16 < len(boxes) < 128
    assert sum((box[2] - box[0] + 0.12) ** 2 for box in boxes) == pytest.approx(256)
