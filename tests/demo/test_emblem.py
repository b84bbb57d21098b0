import numpy as np
import pytest
from PIL import Image

from demo import emblem


@pytest.mark.parametrize("name", ["icon", "banner"])
def test_committed_picture_is_the_drawn_one(name: str) -> None:
    drawn = getattr(emblem, name)()
    committed = Image.open(emblem.FOLDER / f"{name}.png").convert(drawn.mode)
    # The pictures are not compared exactly, because another version of Pillow may round edges differently.
    assert np.abs(np.asarray(drawn, np.int16) - np.asarray(committed, np.int16)).mean() < 1
