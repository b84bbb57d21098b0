"""Test the token layouts that ToMA passes to other nodes' attention, in the graphs of a compiled model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from testbed import models
from tests.nodes.adapters.compile import test_compile

fresh_compiler = test_compile.fresh_compiler


@pytest.mark.parametrize("kind", ["unet", "flux"])
@pytest.mark.parametrize("inside", [True, False])
def test_compiled_code_says_the_same(attach: Any, fresh_compiler: None, kind: str, inside: bool) -> None:
    """The attention override scales its output by the layout, so a wrong layout changes the image."""
    from comfy_api.torch_helpers import set_torch_compile_wrapper
    from comfy_extras.nodes_torch_compile import skip_torch_compile_dict

    shape = {"num_res_blocks": [1, 1], "transformer_depth": [0, 1], "transformer_depth_output": [0, 0, 2, 1]}
    model = models.unet(depths=(0, 1), middle=3, **shape) if kind == "unet" else models.flux(single=3, double=2)

    def override(func: Any, *args: Any, transformer_options: Any, **kwargs: Any) -> Tensor:
        place = transformer_options["activations_shape"][2:] if kind == "unet" else transformer_options.get("img_slice")
        out: Tensor = func(*args, transformer_options=transformer_options, **kwargs)
        return out if place is None else out * (1 + place[0] / 100 + place[1] / 1000)

    model.model_options["transformer_options"]["optimized_attention_override"] = override
    settings = {"end_percent": 0.6, "full_step_interval": 3}
    toma = attach(model, **settings)
    plain = models.sample(toma, 16, 16, steps=4)
    graphs = []

    def backend(graph: Any, inputs: Any, **_: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = toma.clone()
    options = {"guard_filter_fn": skip_torch_compile_dict}
    set_torch_compile_wrapper(model=compiled, backend=backend, options=options, keys=["diffusion_model"])
    if inside:
        compiled.model_options["torch_compile_kwargs"]["backend"] = "inductor"
    assert torch.equal(models.sample(compiled, 16, 16, steps=4), plain)
    warm = len(graphs)
    assert warm == 3 if inside else warm > 3, "full with caches, merged, and full at the end"
    assert torch.equal(models.sample(compiled, 16, 16, steps=4), plain)
    assert len(graphs) == warm
