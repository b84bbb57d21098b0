"""Test that the committed icon and banner equal the code's drawings and have the registry's sizes."""

from __future__ import annotations

import numpy as np
from PIL import Image

from demo import emblem
from tests.loop import loop


@loop(("name", "size"), [("icon", (400, 400)), ("banner", (1260, 540))])
def test_committed_picture_is_the_drawn_one(name: str, size: tuple[int, int]) -> None:
    drawn = getattr(emblem, name)()
    committed = Image.open(emblem.FOLDER / f"{name}.png").convert(drawn.mode)
    assert drawn.size == committed.size == size
    # Not compared exactly: another version of Pillow may round edges differently.
    assert np.abs(np.asarray(drawn, np.int16) - np.asarray(committed, np.int16)).mean() < 1
