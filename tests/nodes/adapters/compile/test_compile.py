"""Test ComfyUI's torch.compile node before or after ToMA: images do not change, and a second run compiles nothing.

With Inductor, merging is part of the compiled graph (`inside`). With any other backend, merging breaks the graph. Most
tests use the backend `Counting`, which runs graphs unchanged, so compiled and uncompiled images must be bit-identical.
"""

import logging
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from comfy.patcher_extension import WrappersMP
from torch import Tensor

from scripts.comfy_pack import pack_module
from testbed import models
from tests.nodes.adapters import test_kv_cache as kv_cache
from tests.nodes.adapters.cards import a_card, compared, sampled
from tests.nodes.adapters.compiling import Counting, compiled
from tests.nodes.adapters.families.layouts import HEIGHT, WIDTH
from tests.nodes.adapters.helpers import balanced
from tests.nodes.adapters.kv_helpers import KEYS, overridden

SIDE = 16
without_overrides = kv_cache.without_overrides


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


def small_unet(middle: int = 1) -> Any:
    shape = {"num_res_blocks": [1, 1], "transformer_depth": [0, 1], "transformer_depth_output": [0, 0, 2, 1]}
    return models.unet(depths=(0, 1), middle=middle, **shape)


def check_same(model: Any, reference: Any, height: int = SIDE, width: int = SIDE, **options: Any) -> None:
    """Check that two models sample bit-identical latents."""
    outs = [models.sample(each, height, width, **options) for each in (model, reference)]
    assert torch.equal(*outs), options


@pytest.mark.parametrize(
    ("order", "granularity", "inside"),
    [
        ("toma first", "stack", True),
        ("compile first", "block", True),
        ("compile first", "stack", False),
        ("toma first", "module", False),
    ],
)
def test_compiled_is_equal(model: Any, attach: Any, stats_of: Any, order: str, granularity: str, inside: bool) -> None:
    """Merging ends in the middle of the run. If a graph contained the decision to merge, later steps would be merged
    too."""
    settings = {"end_percent": 0.5, "granularity": granularity, "selection_interval": 2, "weight_interval": 1}
    plain_model, backend = attach(model, **settings), Counting()
    if order == "toma first":
        compiled_model = compiled(attach(model, **settings), backend, inside)
    else:
        compiled_model = attach(compiled(model, backend, inside), **settings)
    check_same(compiled_model, plain_model, steps=4)
    stats, expected = stats_of(compiled_model), stats_of(plain_model)
    assert 0 < len(stats.merged_steps) < 4
    assert stats.selections == expected.selections
    assert stats.merged_steps == expected.merged_steps
    assert stats.merged_blocks == expected.merged_blocks

    warm = backend.graphs
    # If merging is inside the graph, all merged steps use one graph, and all full steps use a second graph.
    assert warm == 2 if inside else warm > 2
    check_same(compiled_model, plain_model, steps=4)
    check_same(compiled_model, plain_model, steps=7, seed=6)
    if granularity == "module":
        # ComfyUI passes the number of steps to the model, so the first run of 7 steps compiled new graphs. A second run
        # of 7 steps reuses them.
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
        check_same(compiled_model, plain_model, steps=steps)
        assert backend.graphs == 3


def check_graphs(merged: Any, inside: bool, graphs: int, steps: int) -> Any:
    """Compile a model. Check that its latent does not change and that a second run compiles nothing. Return the
    compiled model."""
    backend = Counting()
    model = compiled(merged, backend, inside)
    check_same(model, merged, steps=steps)
    warm = backend.graphs
    assert warm == graphs if inside else warm > graphs
    check_same(model, merged, steps=steps)
    assert backend.graphs == warm
    return model


def test_a_grid_too_small_to_merge_breaks_no_graph(model: Any, attach: Any, stats_of: Any) -> None:
    """With `min_tokens` 0 (Auto) this grid is too small to merge, so ToMA puts no hooks into the model."""
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
    plain_model, compiled_model = attach(model), compiled(attach(model), Counting(), inside=True)
    check_same(compiled_model, plain_model, steps=2)
    assert stats_of(compiled_model).unmerged == stats_of(plain_model).unmerged
    assert not stats_of(compiled_model).merged_blocks


def test_other_sizes_and_batches_run(model: Any, attach: Any) -> None:
    toma, compiled_model = attach(model), compiled(attach(model), Counting(), inside=True)
    for height, width, batch in ((16, 16, 1), (16, 24, 1), (20, 16, 2), (16, 16, 1)):
        check_same(compiled_model, toma, height, width, steps=2, batch=batch)


@pytest.mark.parametrize("each", [False, True], ids=["model", "each block"])
def test_prompts_of_other_lengths(attach: Any, each: bool) -> None:
    """At the second text length every graph is compiled again, now for any length. Later lengths reuse these graphs."""
    model, backend = models.flux(double=2, single=3), Counting()
    blocks = [f"diffusion_model.{kind}_blocks.{n}" for kind, n in (("double", 2), ("single", 3)) for n in range(n)]
    toma, compiled_model = attach(model), compiled(attach(model), backend, inside=True, keys=blocks if each else None)
    graphs = []
    for positive, negative in ((7, 7), (9, 5), (12, 20), (33, 9), (7, 7)):
        conds = [models.conditioning(model, tokens) for tokens in (positive, negative)]
        check_same(compiled_model, toma, steps=2, positive=conds[0], negative=conds[1])
        graphs.append(backend.graphs)
    assert graphs == [graphs[0]] + 4 * [2 * graphs[0]]


@pytest.mark.parametrize("kind", ["krea2", "flux"])
def test_another_size_before_another_prompt(attach: Any, kind: str) -> None:
    """At the second image size graphs are compiled for any number of tokens, but their number of text tokens is
    constant: it comes from `transformer_options`, and ComfyUI's filter drops guards on these options. Still, a longer
    prompt must not reuse these graphs."""
    model = models.krea2(layers=2) if kind == "krea2" else models.flux(double=1, single=2)
    name = "blocks" if kind == "krea2" else "single_blocks"
    keys = [f"diffusion_model.{name}.{n}" for n in range(2)]
    toma, compiled_model = attach(model), compiled(attach(model), Counting(), inside=True, keys=keys)
    for side, tokens in ((SIDE, 7), (SIDE + 4, 7), (SIDE, 9), (SIDE + 8, 12)):
        check_same(compiled_model, toma, side, side, steps=2, cfg=1.0, positive=models.conditioning(model, tokens))


@pytest.mark.parametrize("inside", [True, False])
def test_single_blocks_compiled(flux: Any, attach: Any, inside: bool) -> None:
    """If only some blocks are compiled, a chain of merged blocks may begin inside a graph and end outside of it."""
    for blocks in (("double_blocks.0", "single_blocks.2"), ("single_blocks.0",)):
        keys = [f"diffusion_model.{block}" for block in blocks]
        check_same(compiled(attach(flux), Counting(), inside, keys), attach(flux), steps=3)


@pytest.mark.parametrize("family", sorted(set(models.TRANSFORMERS) - {"flux"}))
def test_every_family_is_one_graph_a_merged_step(family: str, attach: Any, stats_of: Any) -> None:
    model, settings = models.TRANSFORMERS[family](), {"end_percent": 0.6}
    run = {"steps": 4, "cfg": 1.0}
    backend, own = Counting(), Counting()
    toma = compiled(attach(model, **settings), backend, inside=True)
    check_same(toma, attach(model, **settings), **run)
    assert stats_of(toma).unmerged == {}
    assert len(stats_of(toma).merged_steps) > 1
    torch._dynamo.reset()
    models.sample(compiled(model, own), SIDE, SIDE, **run)  # several graphs if the model's own code breaks the graph
    # Most families need each graph of the unmerged model twice: for merged steps and for full steps. LTX-2 and
    # Qwen-Image 2.1 break the graph before the blocks, so only the blocks' graph exists twice. MiniMax H3's code reads
    # the sigma, so every step compiles a graph even without ToMA.
    more = {"ltx_av": 1, "qwen_image21": 1, "h3": 0}.get(family, own.graphs)
    # LTX-2's graph may be traced again for an option of guidance, depending on what was compiled before in the process.
    assert own.graphs + more <= backend.graphs <= own.graphs + more + 2 * (family == "ltx_av")


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on the CPU")
def test_inductor(model: Any, attach: Any) -> None:
    """The selector `grid` gives fixed destinations. With the usual search, Inductor's rounding could change which
    tokens are selected."""
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


@pytest.mark.parametrize("kind", ["unet", "flux"])
@pytest.mark.parametrize("inside", [True, False])
def test_layout_for_other_attention(attach: Any, kind: str, inside: bool) -> None:
    """Another node's attention override scales its output by the token layout, so a wrong layout changes the image."""
    model = small_unet(middle=3) if kind == "unet" else models.flux(single=3, double=2)

    def override(func: Any, *args: Any, transformer_options: Any, **kwargs: Any) -> Tensor:
        place = transformer_options["activations_shape"][2:] if kind == "unet" else transformer_options.get("img_slice")
        out: Tensor = func(*args, transformer_options=transformer_options, **kwargs)
        return out if place is None else out * (1 + place[0] / 100 + place[1] / 1000)

    toma = attach(overridden(model, override), end_percent=0.6, full_step_interval=3)
    check_graphs(toma, inside, 2, steps=4)


@pytest.mark.parametrize(
    ("kind", "packed"), [*((kind, False) for kind in kv_cache.SHOWN), ("flux", True), ("wan", True)]
)
def test_the_same_inside_the_graphs_of_a_compiled_model(
    kind: str, packed: bool, model_of: Any, attach: Any, stats_of: Any, monkeypatch: Any
) -> None:
    """The KV cache is in full precision or in 4 bits (`packed`). Most families need at most three graphs."""
    model_of(kind)  # skips models that this ComfyUI lacks
    if packed:
        monkeypatch.setattr(pack_module("nodes.adapters.kv_memory"), "memory_left", lambda *_: 0)
    model, backend = getattr(models, kind)(), Counting()
    plain, merged = attach(model, **KEYS), compiled(attach(model, **KEYS), backend, inside=True)
    wanted = models.sample(plain, HEIGHT, WIDTH, steps=6)
    assert torch.equal(models.sample(merged, HEIGHT, WIDTH, steps=6), wanted)
    assert stats_of(merged).cache_bytes == stats_of(plain).cache_bytes
    assert stats_of(merged).unmerged == {}
    warm = backend.graphs
    models.sample(merged, HEIGHT, WIDTH, steps=9)
    if kind not in ("ltx_av", "h3", "qwen_image21"):  # these models break their graph before the blocks
        assert backend.graphs == warm <= 3


def test_the_same_beside_the_prefix_cache_of_qwen_image_21(attach: Any, stats_of: Any) -> None:
    model, run = models.qwen_image21(layers=2), {"steps": 4, "cfg": 1.0}
    del model.model_options["transformer_options"]["qwen_image21_cache"]  # this option switches off the prefix cache
    plain, merged = attach(model, **KEYS), compiled(attach(model, **KEYS), Counting(), inside=True)
    wanted = models.sample(plain, HEIGHT, WIDTH, **run)
    for _ in range(2):
        assert torch.equal(models.sample(merged, HEIGHT, WIDTH, **run), wanted)
    assert stats_of(merged).cache_bytes == stats_of(plain).cache_bytes > 0
    assert stats_of(merged).unmerged == {}
    assert stats_of(merged).merged_steps == stats_of(plain).merged_steps != {}


def test_attention_without_overrides_is_noticed(stats_of: Any, without_overrides: None) -> None:
    model, asked = models.wan(layers=2), {"frames": 3, "steps": 6, "cfg": 1.0}
    plain, merged = balanced(model), compiled(balanced(model), Counting(), inside=True)
    assert torch.equal(*(models.sample(m, HEIGHT, WIDTH, **asked) for m in (merged, plain)))
    assert list(stats_of(merged).unmerged_calls) == list(stats_of(plain).unmerged_calls) == [kv_cache.NOT_ASKED]


def test_keys_and_values_in_main_memory() -> None:
    """Custom operators copy keys and values to main memory and back, so that these copies need no additional graph."""
    model, backend = models.z_image(layers=2), Counting()
    card = compared("z_image", compiled(balanced(model), backend, inside=True), quantized=True, cfg=1.0)
    assert card.peak[1] > 0
    assert backend.graphs == 3, "those of a refresh, of merged and of full steps"
    with a_card(0.0, quantized=True):
        wanted = sampled("z_image", balanced(model), cfg=1.0)
    with a_card(0.0, quantized=True):
        found = sampled("z_image", compiled(balanced(model), backend, inside=True), cfg=1.0)
    assert all(map(torch.equal, found, wanted))


def test_other_compilers_receive_no_hints(attach: Any, stats_of: Any) -> None:
    model = models.flux(double=2, single=2)
    merged = compiled(attach(model, **KEYS), Counting())
    assert torch.equal(*(models.sample(m, HEIGHT, WIDTH, steps=5) for m in (merged, model)))
    assert list(stats_of(merged).unmerged_calls) == [kv_cache.Reason.KV_COMPILE_BACKEND()]
