"""Run a test of test_free_memory.py with the presets and prompts that it leaves out."""

from __future__ import annotations

from itertools import product

import pytest

from tests.loop import loop
from tests.nodes.adapters import test_free_memory as quick

model, preset, unmerged = quick.model, quick.preset, quick.unmerged

RUNS = [each for each in product(quick.PRESETS, ("two", "late")) if each not in quick.RUNS]

test_joined_and_split_calls_give_one_picture = quick.every_kind(
    pytest.mark.compat(loop(("name", "prompts"), RUNS)(quick.test_joined_and_split_calls_give_one_picture.looped))
)
