"""Test the custom operators that merge inside of compiled graphs."""

from typing import Any

import torch

from scripts.comfy_pack import pack_module
from testbed import models
from tests.loop import loop

report_text, graphs = pack_module("nodes.adapters.report_text"), pack_module("nodes.adapters.compile_ops")
core = pack_module("toma_core")

GRID = (6, 10)
TOKENS, BEFORE = 60, 7


def begun(evaluation: Any, **signature: Any) -> Any:
    """Begin a chain of two blocks, and return its `ChainSite`. signature: attributes to set in the blocks'
    signature."""
    chain, active = pack_module("nodes.adapters.chain"), pack_module("nodes.adapters.active_chain")
    site = chain.ChainSite(pack_module("nodes.adapters.signature").BlockSignature(), chain.RopeCache())
    vars(site.signature).update(signature)
    work = pack_module("nodes.adapters.families.unet").COST, pack_module("toma_core.config").Granularity.STACK
    site.begin(active.ActiveChain(site.signature, (GRID,), "here", ["first", "last"], work, evaluation))
    return site


def evaluate(copies: tuple[object, ...] = (None,), **settings: Any) -> Any:
    """Return the first evaluation in a run with the sigmas 3, 2 and 1."""
    config = core.ToMAConfig(**{"min_tokens": 4, "window_size": 4, **settings})
    run = core.RunState(core.Schedule(config, (3.0, 2.0, 1.0)))
    facts = pack_module("toma_core.decision").Facts(3.0, conditions=dict.fromkeys(copies))
    return core.Evaluation(run, core.decide(run, facts), copies, copies)


def prepared(evaluation: Any, batch: int = 2, **signature: Any) -> Any:
    site = begun(evaluation, **signature)
    assert site.prepare(torch.randn(batch, 4, 12, 20), torch.nn.Linear(8, 8), 8)
    return site


def test_a_full_step_caches_its_residual_in_new_tensors() -> None:
    evaluation = evaluate(full_step_interval=2, kv_cache=True)
    assert evaluation.refreshes
    evaluation.run.coverage.begin({}, pack_module("toma_core.coverage").Origin(0, 3.0, None, (0,)), 2)
    evaluation.run.coverage.refresh()
    site, x = prepared(evaluation), torch.randn(2, TOKENS, 8)
    assert site.destinations == TOKENS
    reduced = site.enter(x)
    assert torch.equal(reduced, x)
    assert reduced.data_ptr() != x.data_ptr()
    out = reduced + 1
    left = site.leave(out)
    assert torch.equal(left, out)
    assert left.data_ptr() != out.data_ptr()
    assert evaluation.run.cache.peak_bytes == x.nbytes


def test_operators_pass_torchs_own_checks() -> None:
    site, x = prepared(evaluate()), torch.randn(2, TOKENS, 8)
    reduced = graphs.operators.enter(x, site.number, 30)
    torch.library.opcheck(graphs.operators.enter.default, (x, site.number, 30))
    torch.library.opcheck(graphs.operators.leave.default, (reduced + 1, reduced, x, site.number))


def test_positions_follow_the_destinations() -> None:
    site = prepared(evaluate(), mutates_input=True, rope_arg="pe")
    x, pe = torch.randn(2, TOKENS, 8), torch.randn(1, 1, BEFORE + TOKENS, 3, 2, 2)
    site.enter(x)
    site.merge_rows({"pe": pe}, BEFORE)
    assert torch.equal(site.rows["pe"], site.chain.rope(pe, BEFORE))
    numbers = (site.number, BEFORE, TOKENS, 30, 2)
    torch.library.opcheck(graphs.operators.rope.default, (pe, site.pair[0], *numbers))
    site.leave(torch.randn(2, 30, 8))
    assert site.rows == {}


def test_batches_of_unequal_parts_and_blocks_of_unknown_width_are_left_to_the_hook() -> None:
    assert prepared(evaluate(copies=(None, None)), batch=3).destinations == 0
    site = begun(evaluate())
    assert site.prepare(torch.randn(1, 4, 12, 20), torch.nn.Identity(), 0)
    assert site.destinations == 0


@loop(
    ("kwargs", "inside"),
    [
        (None, False),
        ({"backend": "inductor"}, True),
        ({"backend": "inductor", "mode": "default", "options": {"guard_filter_fn": None}}, True),
        ({"backend": "inductor", "mode": "max-autotune-no-cudagraphs", "options": None}, True),
        ({"backend": "inductor", "mode": "reduce-overhead"}, False),
        ({"backend": "inductor", "mode": "max-autotune"}, False),
        ({"backend": "inductor", "options": {"triton.cudagraphs": True}}, False),
        ({"backend": "cudagraphs"}, False),
        ({"backend": "eager"}, False),
        ({}, False),
    ],
)
def test_only_graphs_that_are_not_recorded_take_the_operators(kwargs: Any, inside: bool) -> None:
    options = {} if kwargs is None else {"torch_compile_kwargs": kwargs}
    assert graphs.compiled(options) is inside


def test_two_copies_of_the_pack_do_not_share_operators() -> None:
    free, name, libraries = pack_module("toma_core.kernels.layout").free_namespace, "toma_tried", []
    for expected in (name, f"{name}2", f"{name}3"):
        assert free(name, "enter") == expected
        libraries.append(torch.library.Library(expected, "FRAGMENT"))
        libraries[-1].define("enter(Tensor x) -> Tensor")


def test_a_model_that_must_be_one_graph_is_not_merged(flux: Any, attach: Any, stats_of: Any) -> None:
    """Merging can break the graph into parts, which is an error with `fullgraph`."""
    model = attach(flux)
    model.model_options["torch_compile_kwargs"] = {"backend": "inductor", "fullgraph": True}
    assert torch.equal(models.sample(model, steps=1), models.sample(flux, steps=1))
    assert "switch fullgraph off" in report_text.summary(stats_of(model))


@loop(("before", "after"), [(8, 64), (1000, 1000)])
def test_a_compiled_run_may_have_more_graphs_than_eight(before: int, after: int) -> None:
    from torch._dynamo import config

    with config.patch(recompile_limit=before):
        graphs.allow_more_graphs()
        assert config.recompile_limit == after
