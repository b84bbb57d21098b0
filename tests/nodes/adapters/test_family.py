"""Common to every family: Auto's input for a chain."""

from __future__ import annotations

from typing import Any

import pytest
import torch

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

    def obstacle(x: torch.Tensor, images: int, least: int, block: Any, where: Any) -> str:
        asked.add(where.value)
        return ""

    monkeypatch.setattr(pack_module("toma_core.pipeline"), "obstacle", obstacle)
    patched = attach(model(), granularity=granularity)
    if patch:
        patched.set_model_patch(SHOWN[patch], patch)
    models.sample(patched, 24, 24, steps=1, cfg=1.0)
    assert asked == around
