"""Run tests of test_tiled_sampling.py with the models and presets that it leaves out."""

from __future__ import annotations

from itertools import product

import pytest

from tests.loop import loop
from tests.nodes.adapters import test_tiled_sampling as quick

model, preset = quick.model, quick.preset

ALL = list(product(quick.KINDS, quick.PRESETS))

test_a_tile_does_not_depend_on_the_others = pytest.mark.compat(
    loop(("kind", "name"), [each for each in ALL if each not in quick.IN_ANY_ORDER])(
        quick.test_a_tile_does_not_depend_on_the_others.looped
    )
)
test_joined_and_split_calls_agree_on_tiles = loop(("kind", "name"), [each for each in ALL if each not in quick.SPLIT])(
    quick.test_joined_and_split_calls_agree_on_tiles.looped
)
