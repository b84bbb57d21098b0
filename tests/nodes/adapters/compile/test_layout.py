"""Test the token layouts that ToMA passes to other nodes' attention, in the graphs of a compiled model."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from testbed import models
from tests.nodes.adapters.compile import test_compile
from tests.nodes.adapters.compile.test_compile import check_graphs
from tests.nodes.adapters.kv_helpers import overridden

fresh_compiler = test_compile.fresh_compiler


@pytest.mark.parametrize("kind", ["unet", "flux"])
@pytest.mark.parametrize("inside", [True, False])
def test_compiled_code_says_the_same(attach: Any, fresh_compiler: None, kind: str, inside: bool) -> None:
    """The attention override scales its output by the layout, so a wrong layout changes the image."""
    shape = {"num_res_blocks": [1, 1], "transformer_depth": [0, 1], "transformer_depth_output": [0, 0, 2, 1]}
    model = models.unet(depths=(0, 1), middle=3, **shape) if kind == "unet" else models.flux(single=3, double=2)

    def override(func: Any, *args: Any, transformer_options: Any, **kwargs: Any) -> Tensor:
        place = transformer_options["activations_shape"][2:] if kind == "unet" else transformer_options.get("img_slice")
        out: Tensor = func(*args, transformer_options=transformer_options, **kwargs)
        return out if place is None else out * (1 + place[0] / 100 + place[1] / 1000)

    toma = attach(overridden(model, override), end_percent=0.6, full_step_interval=3)
    check_graphs(toma, inside, 3, steps=4)
