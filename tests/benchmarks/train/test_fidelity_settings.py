"""Test that every row of the fidelity benchmark runs, and that rivals do what their names say."""

import json
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import variants
from benchmarks.fidelity.judge import counting
from benchmarks.fidelity.page import RESULTS
from benchmarks.fidelity.settings import settings
from testbed import models

SIDE, STEPS = 32, 4


@pytest.fixture(scope="module")
def small(pack: ModuleType) -> dict[str, Any]:
    return {"dit": models.flux(double=2, single=3), "unet": models.unet(depths=(0, 1, 1), middle=1)}


def sample(model: Any, **options: Any) -> Tensor:
    return models.sample(model, SIDE, SIDE, steps=STEPS, **options)


@pytest.mark.parametrize("kind", ["dit", "unet"])
def test_every_setting_runs(small: dict[str, Any], kind: str) -> None:
    plain = sample(small[kind])
    for name, setting in settings(kind).items():
        out = sample(setting.patch(small[kind]))
        assert out.isfinite().all(), name
        if not name.startswith(("rival", "stacked")):
            assert not torch.equal(out, plain), name
    assert torch.equal(sample(small[kind]), plain), "something of them is left"


def test_every_row_of_the_pages_that_is_drawn_here_has_a_setting(pack: ModuleType) -> None:
    """Three kinds of rows need no setting: unmerged pictures, a removed setting, and half the evaluations."""
    gone = {"levels: coarser", "rival: half the evaluations", "stacked: half the evaluations + every step"}
    for file in RESULTS.glob("*steps-*px-*.json"):
        rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
        missing = set(rows) - set(settings(file.name.partition("-")[0]))
        assert missing <= {"unmerged", *gone}, file.name


@pytest.mark.parametrize("kind", ["dit", "unet"])
def test_todo(small: dict[str, Any], kind: str) -> None:
    assert torch.equal(sample(variants.todo(1, 1).patch(small[kind])), sample(small[kind]))
    counters = []
    for patched in (small[kind], variants.todo(2, 2).patch(small[kind])):
        with counting() as counter:
            sample(patched)
        counters.append(counter)
    assert counters[1].get_total_flops() < counters[0].get_total_flops()
    assert any("scaled_dot_product" in str(op) for op in counters[0].get_flop_counts()["Global"])
    tokens = torch.arange(4 * 6.0).view(1, 24, 1)
    assert variants._thinned(tokens, (4, 6), 2, 3).flatten().tolist() == [0, 3, 12, 15]
