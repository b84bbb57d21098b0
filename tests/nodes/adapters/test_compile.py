"""torch.compile as ComfyUI's own node sets it up, in both orders: same images, and no compiling anew at every step."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from benchmarks import models

SIDE = 16


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    yield
    torch._dynamo.reset()


class Counting:
    """A backend that runs what it gets as it is, and counts how often it is asked."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any, **_: Any) -> Any:
        self.graphs += 1
        return graph.forward


def compiled(model: Any, backend: Any) -> Any:
    """What TorchCompileModel does, with another backend."""
    from comfy_api.torch_helpers import set_torch_compile_wrapper
    from comfy_extras.nodes_torch_compile import skip_torch_compile_dict

    model = model.clone()
    options = {"guard_filter_fn": skip_torch_compile_dict}
    set_torch_compile_wrapper(model=model, backend=backend, options=options)
    return model


@pytest.fixture(params=["unet", "flux"])
def model(request: pytest.FixtureRequest) -> Any:
    """A small model of its own: compiling leaves traces in a module."""
    if request.param == "unet":
        shape = {"num_res_blocks": [1, 1], "transformer_depth": [0, 1], "transformer_depth_output": [0, 0, 2, 1]}
        return models.unet(depths=(0, 1), middle=1, **shape)
    return models.flux(double=2, single=2)


@pytest.fixture(params=["toma first", "compile first"])
def both(request: pytest.FixtureRequest, model: Any, attach: Any) -> Any:
    """both(backend, **settings): ToMA and the compiler on the model, in either order."""

    def make(backend: Any, **settings: Any) -> Any:
        if request.param == "toma first":
            return compiled(attach(model, **settings), backend)
        return attach(compiled(model, backend), **settings)

    return make


@pytest.mark.parametrize("granularity", ["stack", "module"])
def test_compiled_run_is_the_uncompiled_one(
    model: Any, attach: Any, stats_of: Any, both: Any, granularity: str
) -> None:
    """The merge ends in the middle of the run: a branch frozen at the first trace would go on merging. Later runs,
    also longer ones, have nothing left to compile."""
    settings = {"end_percent": 0.5, "granularity": granularity, "select_every": 2, "weigh_every": 1}
    plain_model = attach(model, **settings)
    plain = models.sample(plain_model, SIDE, SIDE, steps=4)
    backend = Counting()
    compiled_model = both(backend, **settings)
    assert torch.equal(models.sample(compiled_model, SIDE, SIDE, steps=4), plain)
    stats, expected = stats_of(compiled_model), stats_of(plain_model)
    assert 0 < len(stats.merged_steps) < 4
    assert stats.selections == expected.selections
    assert stats.merged_steps == expected.merged_steps

    warm = backend.graphs
    assert warm > 0
    assert torch.equal(models.sample(compiled_model, SIDE, SIDE, steps=4), plain)
    longer = models.sample(compiled_model, SIDE, SIDE, steps=7, seed=6)
    assert backend.graphs == warm
    assert torch.equal(longer, models.sample(plain_model, SIDE, SIDE, steps=7, seed=6))


def test_detail_is_reused_in_a_compiled_run(model: Any, attach: Any) -> None:
    settings = {"unet_whole_every": 2, "flux_whole_every": 2, "detail_reuse": True}
    plain = models.sample(attach(model, **settings), SIDE, SIDE, steps=5)
    backend = Counting()
    compiled_model = compiled(attach(model, **settings), backend)
    assert torch.equal(models.sample(compiled_model, SIDE, SIDE, steps=5), plain)
    warm = backend.graphs
    assert torch.equal(models.sample(compiled_model, SIDE, SIDE, steps=5), plain)
    assert backend.graphs == warm


def test_ahead_of_time_graphs_run_too(flux: Any, attach: Any) -> None:
    plain = models.sample(attach(flux, end_percent=0.5), SIDE, SIDE, steps=2)
    out = models.sample(compiled(attach(flux, end_percent=0.5), "aot_eager"), SIDE, SIDE, steps=2)
    torch.testing.assert_close(out, plain, rtol=1e-3, atol=1e-2)
