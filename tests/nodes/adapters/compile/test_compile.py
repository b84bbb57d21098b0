"""Test that ComfyUI's torch.compile node, before or after ToMA, changes no image and compiles nothing in later steps.

With Inductor, merging is part of the compiled graph (`inside`). With any other backend, merging breaks the graph. Most
tests use `Counting`, which runs graphs unchanged, so compiled and uncompiled images must be bit-identical.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from comfy.patcher_extension import WrappersMP

from scripts.comfy_pack import pack_module
from testbed import models
from tests.nodes.adapters.compiling import Counting, compiled

SIDE = 16


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    yield
    torch._dynamo.reset()


@pytest.fixture(params=["unet", "flux"])
def model(request: pytest.FixtureRequest) -> Any:
    """Build a new small model, because compiling changes a model's modules."""
    return small_unet() if request.param == "unet" else models.flux(double=2, single=2)


def small_unet() -> Any:
    shape = {"num_res_blocks": [1, 1], "transformer_depth": [0, 1], "transformer_depth_output": [0, 0, 2, 1]}
    return models.unet(depths=(0, 1), middle=1, **shape)


@pytest.fixture
def both(order: str, model: Any, attach: Any) -> Any:
    """both(backend, inside, **settings): apply ToMA and torch.compile to the model. `order` says which of them comes
    first."""

    def make(backend: Any, inside: bool, **settings: Any) -> Any:
        if order == "toma first":
            return compiled(attach(model, **settings), backend, inside)
        return attach(compiled(model, backend, inside), **settings)

    return make


@pytest.mark.parametrize(
    ("order", "granularity", "inside"),
    [
        ("toma first", "stack", True),
        ("compile first", "block", True),
        ("compile first", "stack", False),
        ("toma first", "module", False),
    ],
)
def test_compiled_run_is_the_uncompiled_one(
    model: Any, attach: Any, stats_of: Any, both: Any, granularity: str, inside: bool
) -> None:
    """End merging in the middle of the run. A graph that contained the decision to merge would continue merging."""
    settings = {"end_percent": 0.5, "granularity": granularity, "selection_interval": 2, "weight_interval": 1}
    plain_model = attach(model, **settings)
    plain = models.sample(plain_model, SIDE, SIDE, steps=4)
    backend = Counting()
    compiled_model = both(backend, inside, **settings)
    assert torch.equal(models.sample(compiled_model, SIDE, SIDE, steps=4), plain)
    stats, expected = stats_of(compiled_model), stats_of(plain_model)
    assert 0 < len(stats.merged_steps) < 4
    assert stats.selections == expected.selections
    assert stats.merged_steps == expected.merged_steps
    assert stats.merged_blocks == expected.merged_blocks

    warm = backend.graphs
    # If merging is inside the graph, all merged steps use one graph, and all full steps use a second graph.
    assert warm == 2 if inside else warm > 2
    assert torch.equal(models.sample(compiled_model, SIDE, SIDE, steps=4), plain)
    longer = models.sample(compiled_model, SIDE, SIDE, steps=7, seed=6)
    assert torch.equal(longer, models.sample(plain_model, SIDE, SIDE, steps=7, seed=6))
    if granularity == "module":
        # ComfyUI passes the number of steps to the model, so a run of 7 steps compiled new graphs. A second run reuses
        # them.
        warm = backend.graphs
        models.sample(compiled_model, SIDE, SIDE, steps=7, seed=7)
    assert backend.graphs == warm


def test_a_profile_takes_a_graph_for_each_sigma_range(model: Any) -> None:
    run, core = pack_module("nodes.adapters.patch_model"), pack_module("toma_core")
    names = [block.name for block in pack_module("nodes.adapters.registry").blocks_of(model)]
    high = {name: (0.25, 0.5, 0.75)[n % 3] for n, name in enumerate(names)}
    flow = model.get_model_object("model_sampling").sigma_max <= 1
    first, second = (0.85, 0.5) if flow else (2.0, 0.5)  # each of the three ranges gets at least one of six steps
    ratio_schedule = ((first, high), (second, dict.fromkeys(names[:2], 0.5)), (0.0, {}))
    backend = Counting()
    config = core.ToMAConfig(min_tokens=4, selection_interval=1, weight_interval=1)
    plain_model = run.apply_toma(model, config, None, ratio_schedule)
    compiled_model = compiled(plain_model, backend, inside=True)
    for steps in (6, 9):
        plain = models.sample(plain_model, SIDE, SIDE, steps=steps)
        assert torch.equal(models.sample(compiled_model, SIDE, SIDE, steps=steps), plain)
        assert backend.graphs == 3


def check_graphs(merged: Any, inside: bool, graphs: int, steps: int) -> Any:
    """Check that the compiled model gives equal latents and compiles nothing in a second run. Return this model."""
    plain, backend = models.sample(merged, SIDE, SIDE, steps=steps), Counting()
    model = compiled(merged, backend, inside)
    assert torch.equal(models.sample(model, SIDE, SIDE, steps=steps), plain)
    warm = backend.graphs
    assert warm == graphs if inside else warm > graphs
    assert torch.equal(models.sample(model, SIDE, SIDE, steps=steps), plain)
    assert backend.graphs == warm
    return model


@pytest.mark.parametrize("inside", [True, False])
def test_the_residual_cache_is_used_in_a_compiled_run(model: Any, attach: Any, stats_of: Any, inside: bool) -> None:
    """A run has graphs of a refresh, of merged steps, and of the full step at the end."""
    plain, merged = (attach(model, full_step_interval=2) for _ in range(2))
    models.sample(plain, SIDE, SIDE, steps=5)
    compiled_model = check_graphs(merged, inside, 3, steps=5)
    assert stats_of(compiled_model).cache_bytes == stats_of(plain).cache_bytes > 0


def test_a_grid_too_small_to_merge_breaks_no_graph(model: Any, attach: Any, stats_of: Any) -> None:
    """`min_tokens` 0 (Auto) does not merge this grid, so ToMA puts no hooks into the model."""
    plain_model, merged = (attach(model, min_tokens=0) for _ in range(2))
    models.sample(plain_model, SIDE, SIDE, steps=2)
    compiled_model = check_graphs(merged, True, 1, steps=2)
    assert stats_of(compiled_model).unmerged == stats_of(plain_model).unmerged


def test_tokens_of_another_node_stop_merging_in_a_graph_too(attach: Any, stats_of: Any) -> None:
    model = small_unet()
    for module in model.model.diffusion_model.modules():
        if hasattr(module, "transformer_blocks"):
            module.proj_in.register_forward_hook(lambda _, __, out: torch.cat([out, out[:, :1]], 1))
            module.proj_out.register_forward_pre_hook(lambda _, given: (given[0][:, :-1],))
    plain_model = attach(model)
    compiled_model = compiled(attach(model), Counting(), inside=True)
    plain = models.sample(plain_model, SIDE, SIDE, steps=2)
    assert torch.equal(models.sample(compiled_model, SIDE, SIDE, steps=2), plain)
    assert stats_of(compiled_model).unmerged == stats_of(plain_model).unmerged
    assert not stats_of(compiled_model).merged_blocks


def test_other_sizes_and_batches_run(model: Any, attach: Any) -> None:
    toma, backend = attach(model), Counting()
    compiled_model = compiled(attach(model), backend, inside=True)
    for height, width, batch in ((16, 16, 1), (16, 24, 1), (20, 16, 2), (16, 16, 1)):
        plain = models.sample(toma, height, width, steps=2, batch=batch)
        assert torch.equal(models.sample(compiled_model, height, width, steps=2, batch=batch), plain)


@pytest.mark.parametrize("each", [False, True], ids=["model", "each block"])
def test_prompts_of_other_lengths(attach: Any, each: bool) -> None:
    """A second length compiles every graph again, with a variable text length. Later lengths reuse these graphs."""
    model, backend = models.flux(double=2, single=3), Counting()
    blocks = [f"diffusion_model.{kind}_blocks.{n}" for kind, n in (("double", 2), ("single", 3)) for n in range(n)]
    toma, compiled_model = attach(model), compiled(attach(model), backend, inside=True, keys=blocks if each else None)
    graphs = []
    for positive, negative in ((7, 7), (9, 5), (12, 20), (33, 9), (7, 7)):
        lengths = {"positive": positive, "negative": negative}
        conds = {name: models.conditioning(model, tokens) for name, tokens in lengths.items()}
        plain = models.sample(toma, SIDE, SIDE, steps=2, **conds)
        assert torch.equal(models.sample(compiled_model, SIDE, SIDE, steps=2, **conds), plain)
        graphs.append(backend.graphs)
    assert graphs == [graphs[0]] + 4 * [2 * graphs[0]]


@pytest.mark.parametrize("kind", ["krea2", "flux"])
def test_another_size_before_another_prompt(attach: Any, kind: str) -> None:
    """A second image size compiles graphs with the number of all tokens as a variable, but with the first prompt's
    number of text tokens as a constant. The constant comes from the options, on which ComfyUI's filter drops the guard.
    Nevertheless a longer prompt must not reuse these graphs."""
    model = models.krea2(layers=2) if kind == "krea2" else models.flux(double=1, single=2)
    name = "blocks" if kind == "krea2" else "single_blocks"
    keys = [f"diffusion_model.{name}.{n}" for n in range(2)]
    toma, compiled_model = attach(model), compiled(attach(model), Counting(), inside=True, keys=keys)
    for side, tokens in ((SIDE, 7), (SIDE + 4, 7), (SIDE, 9), (SIDE + 8, 12)):
        sampled = {"steps": 2, "cfg": 1.0, "positive": models.conditioning(model, tokens)}
        plain = models.sample(toma, side, side, **sampled)
        assert torch.equal(models.sample(compiled_model, side, side, **sampled), plain), (side, tokens)


@pytest.mark.parametrize("inside", [True, False])
def test_single_blocks_compiled(flux: Any, attach: Any, inside: bool) -> None:
    """A chain of merged blocks may begin in the graph of one block and end outside of it."""
    plain = models.sample(attach(flux), SIDE, SIDE, steps=3)
    for blocks in (("double_blocks.0", "single_blocks.2"), ("single_blocks.0",)):
        toma = compiled(attach(flux), Counting(), inside, [f"diffusion_model.{block}" for block in blocks])
        assert torch.equal(models.sample(toma, SIDE, SIDE, steps=3), plain)


@pytest.mark.parametrize("family", sorted(set(models.TRANSFORMERS) - {"flux"}))
def test_every_family_is_one_graph_a_merged_step(family: str, attach: Any, stats_of: Any) -> None:
    model, settings = models.TRANSFORMERS[family](), {"end_percent": 0.6}
    run = {"steps": 4, "cfg": 1.0}
    plain = models.sample(attach(model, **settings), SIDE, SIDE, **run)
    backend = Counting()
    toma = compiled(attach(model, **settings), backend, inside=True)
    assert torch.equal(models.sample(toma, SIDE, SIDE, **run), plain)
    assert stats_of(toma).unmerged == {}
    assert len(stats_of(toma).merged_steps) > 1
    own = of_the_model_itself(model, run)
    # Most families need every graph twice, for merged and for full steps. LTX-2 and Qwen-Image 2.1 break the graph
    # before the blocks, and need only the blocks' graph twice. MiniMax H3 reads its sigma, so every step compiles a
    # graph.
    assert backend.graphs == own + {"ltx_av": 1, "qwen_image21": 1, "h3": 0}.get(family, own)


def of_the_model_itself(model: Any, run: dict[str, Any]) -> int:
    """Count the graphs of the model without ToMA. There are several graphs if the model's own code breaks the graph."""
    torch._dynamo.reset()
    backend = Counting()
    models.sample(compiled(model, backend), SIDE, SIDE, **run)
    return backend.graphs


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on the CPU")
def test_inductor(model: Any, attach: Any) -> None:
    """Destinations lie on a fixed grid. If they were selected, Inductor's rounding could decide between nearly equal
    gains."""
    settings = {"full_step_interval": 3, "selector": "grid"}
    plain = models.sample(attach(model, **settings), SIDE, SIDE, steps=4)
    compiled_model = compiled(attach(model, **settings), "inductor")
    out = models.sample(compiled_model, SIDE, SIDE, steps=4)
    torch.testing.assert_close(out, plain, rtol=1e-3, atol=1e-2)
    assert torch.equal(models.sample(compiled_model, SIDE, SIDE, steps=4), out)


def test_later_runs_without_toma(model: Any, attach: Any) -> None:
    plain, merged = models.sample(model, SIDE, SIDE, steps=3), attach(model, full_step_interval=2)
    toma = models.sample(merged, SIDE, SIDE, steps=3)
    for inside in (True, False, True):
        backend = Counting()
        assert torch.equal(models.sample(compiled(merged, backend, inside), SIDE, SIDE, steps=3), toma)
        assert torch.equal(models.sample(compiled(model, backend), SIDE, SIDE, steps=3), plain)


def test_the_model_is_not_shown_what_rides_in_its_options(model: Any, attach: Any) -> None:
    seen = set()

    def look(executor: Any, *args: Any, **kwargs: Any) -> Any:
        seen.update(key for given in args if isinstance(given, dict) for key in given)
        return executor(*args, **kwargs)

    toma = attach(model, end_percent=0.5)
    toma.add_wrapper(WrappersMP.DIFFUSION_MODEL, look)
    models.sample(toma, SIDE, SIDE, steps=4)
    assert "sigmas" in seen
    assert not [key for key in seen if "toma" in key]
