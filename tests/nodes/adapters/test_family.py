"""Test code that all families share: Auto's choice of blocks to merge, and the work that a run saved."""

from typing import Any

import pytest

from scripts.comfy_pack import pack_module
from testbed import models
from tests.loop import loop
from tests.nodes.adapters.helpers import balanced

report_text = pack_module("nodes.adapters.report_text")
SHOWN = {"attn1_patch": lambda n, context, value, options: (n, context, value), "double_block": lambda args: args}


@loop(
    ("model", "granularity", "patch", "around"),
    [
        pytest.param(models.unet, "stack", "", {"stack", "block"}, id="stacks of two and of one"),
        pytest.param(lambda: models.unet(depths=(1, 1, 0), middle=1), "stack", "", {"block"}, id="SD1.5"),
        pytest.param(models.unet, "block", "", {"block"}, id="blocks"),
        pytest.param(models.unet, "module", "", {"module"}, id="modules"),
        pytest.param(models.unet, "stack", "attn1_patch", {"module"}, id="modules, as others look inside"),
        pytest.param(lambda: models.flux(double=1, single=3), "stack", "", {"stack", "block"}, id="Flux"),
        pytest.param(models.flux, "module", "", {"module"}, id="Flux by modules"),
        pytest.param(models.qwen_image, "stack", "", {"stack"}, id="Qwen-Image"),
        pytest.param(models.qwen_image, "stack", "double_block", {"block"}, id="blocks, as others look between"),
    ],
)
def test_auto_receives_the_blocks_that_are_merged_together(
    model: Any, granularity: str, patch: str, around: set[str], attach: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For Auto, a stack of one block counts as a block."""
    asked = set()

    def too_little(*sizes: Any) -> None:
        asked.add(sizes[-1].value)

    monkeypatch.setattr(pack_module("toma_core.cost_model"), "too_little", too_little)
    patched = attach(model(), granularity=granularity, min_tokens=0)
    if patch:
        patched.set_model_patch(SHOWN[patch], patch)
    models.sample(patched, 24, 24, steps=1, cfg=1.0)
    assert asked == around


def run_of(model: Any, steps: int = 4, **settings: Any) -> Any:
    patched = balanced(model, **{"ratio": 0.5, "min_tokens": 16, "skip_last_blocks": 0, **settings})
    models.sample(patched, 32, 32, steps=steps)
    return pack_module("nodes.adapters.attachment").last_stats(patched)


def test_the_report_says_how_much_work_was_saved(unet: Any) -> None:
    """Convolutions are not merged, so a UNet saves a smaller share of work than its ratio. Full steps save nothing."""
    runs = [run_of(unet, **settings) for settings in ({"ratio": 0.25}, {"full_step_interval": 2}, {}, {"ratio": 0.75})]
    quarter, full, half, most = (run.times_less_work for run in runs)
    assert 1 < quarter < half < most < 4
    assert 1 < full < half
    (work,) = report_text.work(runs[2])
    assert str(work) == f"About {100 - 100 / half:.0f} % less work, counted"
    assert str(report_text.report(runs[2])[1]) == f"{work}."
    assert str(work) in report_text.summary(runs[2])
    nothing = run_of(unet, min_tokens=1 << 20)
    assert (nothing.times_less_work, report_text.work(nothing)) == (None, [])
