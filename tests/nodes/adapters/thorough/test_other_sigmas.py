"""Run tests of test_sigmas.py with the models, schedulers and presets that it leaves out."""

from __future__ import annotations

from itertools import product

import pytest

from tests.loop import loop
from tests.nodes.adapters import test_sigmas as quick

model, received, own_reads = quick.model, quick.received, quick.own_reads

KNOWN = [each for each in product(quick.SAMPLERS, ("unet", "flux"), ("simple", "karras")) if each not in quick.KNOWN]
PRESETS = [
    each
    for each in product(("balanced", "quality", "paper"), ("euler", "dpmpp_2m", "er_sde"))
    if each not in quick.PRESETS
]

test_known_samplers_keep_to_their_schedule = pytest.mark.compat(
    loop(("sampler", "kind", "scheduler"), KNOWN)(quick.test_known_samplers_keep_to_their_schedule.looped)
)
test_nothing_is_read_inside_the_steps = quick.every_kind(
    loop(("preset", "sampler"), PRESETS)(quick.test_nothing_is_read_inside_the_steps.looped)
)
