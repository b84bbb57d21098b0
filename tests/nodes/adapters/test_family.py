"""Common to every family: Auto's input for a chain."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import models
from scripts.comfy_pack import pack_module
from tests.loop import loop

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
    """A stack of one block adds as many operations as a block, and so does a block that runs alone."""
    asked = set()

    def too_little(*sizes: Any) -> None:
        asked.add(sizes[-1].value)

    monkeypatch.setattr(pack_module("toma_core.cost_model"), "too_little", too_little)
    patched = attach(model(), granularity=granularity, min_tokens=0)
    if patch:
        patched.set_model_patch(SHOWN[patch], patch)
    models.sample(patched, 24, 24, steps=1, cfg=1.0)
    assert asked == around
