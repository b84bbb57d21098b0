"""Test the custom operators that merge inside of compiled graphs. Their results equal those of eager merging, and torch
infers the shapes of the results."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

from scripts.comfy_pack import pack_module
from testbed import models
from tests.loop import loop

Reason = pack_module("toma_core.reasons").Reason
report_text = pack_module("nodes.adapters.report_text")

GRID = (6, 10)
TOKENS, BEFORE = 60, 7


@pytest.fixture
def graphs(pack: ModuleType) -> Any:
    return pack_module("nodes.adapters.compile_ops")


class Rows(pack_module("nodes.adapters.signature").BlockSignature):  # type: ignore[misc]
    """The signature of a block that changes its input in place and has positions."""

    mutates_input, rope_arg = True, "pe"


def new_site(port: Any = None) -> Any:
    chain = pack_module("nodes.adapters.chain")
    return chain.ChainSite(port or pack_module("nodes.adapters.signature").BlockSignature(), chain.RopeCache())


def begun(evaluation: Any, names: list[str], site: Any = None) -> Any:
    site = site or new_site()
    work = pack_module("nodes.adapters.families.unet").COST, pack_module("toma_core.config").Granularity.STACK
    chain = pack_module("nodes.adapters.active_chain").ActiveChain(
        site.signature, (GRID,), "here", names, work, evaluation
    )
    site.begin(chain)
    return site


@pytest.fixture
def evaluate(pack: ModuleType) -> Any:
    """evaluate(sigma, copies, **settings): return the evaluation at `sigma` in a run with the sigmas 3, 2 and 1."""
    core = pack_module("toma_core")

    def make(sigma: float = 3.0, copies: tuple[object, ...] = (None,), **settings: Any) -> Any:
        config = core.ToMAConfig(**{"min_tokens": 4, "window_size": 4, **settings})
        run = core.RunState(core.Schedule(config, (3.0, 2.0, 1.0)))
        for each in (3.0, 2.0, 1.0):
            decision = run.schedule.decide(each)
            if each == sigma:
                break
        return core.Evaluation(run, decision, copies, copies)

    return make


def prepared(evaluation: Any, site: Any = None, latent: Any = None) -> Any:
    site = begun(evaluation, ["first", "last"], site)
    assert site.prepare(torch.randn(2, 4, 12, 20) if latent is None else latent, torch.nn.Linear(8, 8), 8)
    return site


def test_a_full_step_caches_its_residual_in_new_tensors(graphs: Any, evaluate: Any) -> None:
    evaluation = evaluate(full_step_interval=2)
    assert evaluation.refreshes
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


def test_operators_pass_torchs_own_checks(graphs: Any, evaluate: Any) -> None:
    site, x = prepared(evaluate()), torch.randn(2, TOKENS, 8)
    reduced = graphs.operators.enter(x, site.number, 30)
    torch.library.opcheck(graphs.operators.enter.default, (x, site.number, 30))
    torch.library.opcheck(graphs.operators.leave.default, (reduced + 1, reduced, x, site.number))


def test_positions_follow_the_destinations(pack: ModuleType, graphs: Any, evaluate: Any) -> None:
    chain = pack_module("nodes.adapters.active_chain")
    site = prepared(evaluate(), new_site(Rows()))
    x, pe = torch.randn(2, TOKENS, 8), torch.randn(1, 1, BEFORE + TOKENS, 3, 2, 2)
    site.enter(x)
    site.merge_rows({"pe": pe}, BEFORE)
    assert torch.equal(site.rows["pe"], chain.merged_rope(pe, site.reduction.plans[0].destinations, BEFORE, TOKENS, 2))
    numbers = (site.number, BEFORE, TOKENS, 30, 2)
    torch.library.opcheck(graphs.operators.rope.default, (pe, site.pair[0], *numbers))
    site.leave(torch.randn(2, 30, 8))
    assert site.rows == {}


def test_a_batch_of_unequal_parts_is_left_to_the_hook(graphs: Any, evaluate: Any) -> None:
    site = prepared(evaluate(copies=(None, None)), latent=torch.randn(3, 4, 12, 20))
    assert site.destinations == 0


def test_blocks_of_unknown_width_are_left_to_the_hook(graphs: Any, evaluate: Any) -> None:
    site = begun(evaluate(), ["a"])
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
def test_only_graphs_that_are_not_recorded_take_the_operators(graphs: Any, kwargs: Any, inside: bool) -> None:
    options = {} if kwargs is None else {"torch_compile_kwargs": kwargs}
    assert graphs.compiled(options) is inside


def test_two_copies_of_the_pack_do_not_share_operators() -> None:
    free = pack_module("toma_core.kernels.layout").free_namespace
    name = "toma_tried"
    libraries = []
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
def test_a_compiled_run_may_have_more_graphs_than_eight(graphs: Any, before: int, after: int) -> None:
    from torch._dynamo import config

    with config.patch(recompile_limit=before):
        graphs.allow_more_graphs()
        assert config.recompile_limit == after
