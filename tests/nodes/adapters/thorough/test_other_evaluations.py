"""Run tests of test_evaluations.py with the sizes and noise levels that it leaves out."""

from __future__ import annotations

from itertools import product

from tests.loop import loop
from tests.nodes.adapters import test_evaluations as quick

trained, plain_run, plain, usual = quick.trained, quick.plain_run, quick.plain, quick.usual

CHANGED = [each for each in product((0.9, 0.6, 1.1), (True, False)) if each not in quick.CHANGED]

test_a_sigma_that_is_changed_on_purpose = loop(("factor", "wraps"), CHANGED)(
    quick.test_a_sigma_that_is_changed_on_purpose.looped
)

test_another_size_in_the_same_run = loop("shape", ["wide"])(quick.test_another_size_in_the_same_run.looped)
