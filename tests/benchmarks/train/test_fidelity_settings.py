"""Every row of the fidelity benchmark runs, and experiments and rivals do what their names say."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import models, variants
from benchmarks.fidelity import experiments
from benchmarks.fidelity.judge import counting
from benchmarks.fidelity.settings import Setting, averaging, settings, toma
from scripts.comfy_pack import pack_module

SIDE, STEPS = 32, 4


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def small(pack: ModuleType) -> dict[str, Any]:
    return {"dit": models.flux(double=2, single=3), "unet": models.unet(depths=(0, 1, 1), middle=1)}


@pytest.fixture(params=["dit", "unet"])
def model(request: pytest.FixtureRequest, small: dict[str, Any]) -> Any:
    return small[request.param]


def sample(model: Any, **options: Any) -> Tensor:
    return models.sample(model, SIDE, SIDE, steps=STEPS, **options)


@pytest.fixture
def decisions(pack: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every decision that evaluations are made by."""
    sampling = pack_module("nodes.adapters.patch_model").SamplingRun
    original, made = sampling.observe, []

    def spy(self: Any, *args: Any) -> None:
        original(self, *args)
        made.append(self.step_plan)

    monkeypatch.setattr(sampling, "observe", spy)
    return made


@pytest.fixture
def plans(pack: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every new plan."""
    state = pack_module("toma_core.run").RunState
    original, made = state._remember, []

    def spy(self: Any, key: Any, plan: Any, step: Any) -> None:
        made.append(plan)
        original(self, key, plan, step)

    monkeypatch.setattr(state, "_remember", spy)
    return made


@pytest.mark.parametrize("kind", ["dit", "unet"])
def test_every_setting_runs(small: dict[str, Any], kind: str) -> None:
    """Rows that merge differ from the unmerged model."""
    plain = sample(small[kind])
    table = settings(kind, STEPS, "simple")
    for name, setting in table.items():
        assert isinstance(setting, Setting)
        out = sample(setting.patch(small[kind]))
        assert out.isfinite().all(), name
        if not name.startswith(("rival", "stacked")):
            assert not torch.equal(out, plain), name
    assert torch.equal(sample(small[kind]), plain), "something of them is left"


def test_names_say_a_group_and_a_value(pack: ModuleType) -> None:
    for kind in ("dit", "unet"):
        table = settings(kind, 20, "simple")
        assert all(name.count(": ") == 1 for name in table)
        assert {setting.tier for setting in table.values()} == {1, 2, 3, 4}
        assert "preset: balanced" in table
    assert {n for n in settings("unet", 20, "simple") if "HyperTile" in n}
    assert not {n for n in settings("dit", 20, "simple") if "HyperTile" in n}


@pytest.mark.parametrize("when", [{"end_percent": 0.7}, {"start_percent": 0.3}])
def test_mean_ratio(model: Any, decisions: Any, when: dict[str, float]) -> None:
    models.sample(averaging(0.5, 20, "simple", **when)(model), 16, 16, steps=20, cfg=1.0)
    assert sum(d.merged_ratio for d in decisions) / 20 == pytest.approx(0.5, abs=0.02)
    assert len({d.merged_ratio for d in decisions}) > 1


def test_variate_that_is_refreshed_at_every_step_is_the_unmerged_model(model: Any) -> None:
    patched = experiments.control_variate(0.5, 1, toma)(model)
    unmerged, out = sample(model), sample(patched)
    torch.testing.assert_close(out / unmerged.abs().max(), unmerged / unmerged.abs().max(), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(sample(experiments.control_variate(0.5, 2, toma)(model)), unmerged)


def test_variate_has_full_steps_at_its_interval(model: Any, decisions: Any) -> None:
    """All four steps run merged, and two of them also full, which the pack does not see."""
    calls = []

    def count(apply: Any, args: Any) -> Any:
        calls.append(1)
        return apply(args["input"], args["timestep"], **args["c"])

    watched = model.clone()
    watched.set_model_unet_function_wrapper(count)
    sample(experiments.control_variate(0.5, 2, toma)(watched))
    assert (len(decisions), len(calls)) == (4, 6)


def test_half_the_evaluations(model: Any) -> None:
    with counting() as unmerged:
        sample(model)
    with counting() as half:
        sample(variants.half_the_evaluations(model))
    assert half.get_total_flops() == unmerged.get_total_flops() // 2


def test_attention_is_counted(model: Any) -> None:
    with counting() as counter:
        sample(model)
    assert any("scaled_dot_product" in str(op) for op in counter.get_flop_counts()["Global"])


def test_todo(model: Any) -> None:
    """With every key the result is the model's own; with a quarter of them the work is less and the picture differs."""
    plain = sample(model)
    assert torch.equal(sample(variants.todo(1, 1).patch(model)), plain)
    flops = []
    for patched in (model, variants.todo(2, 2).patch(model)):
        with counting() as counter:
            out = sample(patched)
        flops.append(counter.get_total_flops())
    assert flops[1] < flops[0]
    assert not torch.equal(out, plain)


def test_todo_takes_every_second_row_and_column() -> None:
    tokens = torch.arange(4 * 6.0).view(1, 24, 1)
    assert variants._thinned(tokens, (4, 6), 2, 3).flatten().tolist() == [0, 3, 12, 15]


def test_own_destinations(model: Any, plans: Any) -> None:
    sample(toma()(model))
    shared = len(plans)
    plans.clear()
    sample(experiments.own_destinations(toma())(model))
    assert len(plans) == 2 * shared
    assert not torch.equal(plans[0].dest_slots, plans[1].dest_slots)


def test_centred_tokens_do_not_know_a_common_direction(pack: ModuleType) -> None:
    """Adding one vector to all tokens changes plain cosines, but not those of centred tokens."""
    state = pack_module("toma_core.run")
    x = torch.randn(1, 4, 16, 8, generator=torch.Generator().manual_seed(0))
    seen = []

    def run(model: Any) -> Any:
        seen.extend(state.cosine_similarity(t) for t in (x, x + 5.0))
        return model

    patched = experiments.centred(lambda model: model)(models.unet(depths=(0, 1, 1), middle=1))
    wrapper = patched.wrappers["outer_sample"]["experiment"][0]
    wrapper(run, None)
    torch.testing.assert_close(seen[0], seen[1], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(state.cosine_similarity(x), state.cosine_similarity(x + 5.0), atol=0.1)


def test_pseudo_inverse(model: Any, plans: Any) -> None:
    """The merge is the same, and merging after unmerging is the identity, unlike with the transpose."""
    transposed = sample(toma()(model))
    there = plans[0]
    plans.clear()
    out = sample(experiments.pseudo_inverse(toma())(model))
    plan = plans[0]
    assert not torch.equal(out, transposed)
    assert torch.equal(plan.dest_slots, there.dest_slots)
    assert torch.equal(plan.merge_weights, there.merge_weights)
    M, back = plan.merge_weights, plan.unmerge_weights
    torch.testing.assert_close(M @ back @ M, M, rtol=0, atol=2e-3)
    assert (M @ there.unmerge_weights @ M - M).abs().max() > 1e-2


@pytest.mark.parametrize("used", [6, 4])
def test_least_squares_inverse(used: int) -> None:
    """The inverse is that of linear algebra up to the ridge; unused slots have zero weights."""
    M = torch.rand(2, 3, 6, 16, generator=torch.Generator().manual_seed(0)).pow(8)
    M = M / M.sum(-1, keepdim=True)
    M[..., used:, :] = 0.0
    back = experiments.least_squares_inverse(M, torch.arange(6).expand(3, 6) < used)
    torch.testing.assert_close(back, torch.linalg.pinv(M.double()).float(), rtol=0, atol=1e-2)
    assert (back[..., used:] == 0.0).all()
    if used == 6:
        assert torch.equal(experiments.least_squares_inverse(M, None), back)


def test_least_squares_inverse_of_equal_destinations_stays_small() -> None:
    """Two equal rows have no inverse; the ridge halves the result between them."""
    back = experiments.least_squares_inverse(torch.full((1, 1, 2, 4), 0.25), None)
    torch.testing.assert_close(back, torch.full((1, 1, 4, 2), 0.5), rtol=1e-3, atol=0)


def test_moved_budget(model: Any, plans: Any) -> None:
    """The total number of destinations is unchanged, that of each window varies; merge and unmerge still preserve a
    constant."""
    pack = pack_module("toma_core.merge")
    sample(experiments.moved_budget(toma(window_size=4))(model), batch=2)
    plan = plans[0]
    counts = plan.budget.valid.sum(-1)
    assert counts.sum(-1).tolist() == [plan.num_destinations, plan.num_destinations] == [plan.tokens // 2] * 2
    assert len(counts.unique()) > 1
    assert not torch.equal(*counts)
    assert counts.min() >= 1
    assert plan.destinations.shape == (2, plan.num_destinations)
    for each in (plan, pack.stacked([plan, plan])):
        ones = torch.ones(each.dest_slots.shape[0], plan.tokens, 3)
        reduced = pack.merge(ones, each)
        assert reduced.shape[1] == plan.num_destinations
        torch.testing.assert_close(reduced, torch.ones_like(reduced))
        torch.testing.assert_close(pack.unmerge(reduced, each), ones)


@pytest.mark.parametrize("kind", ["dit", "unet"])
def test_plans_from_predictions(small: dict[str, Any], decisions: Any, kind: str) -> None:
    """All compared rows have a full first step and new plans in every merged step."""
    plain, table = sample(small[kind]), settings(kind, STEPS, "simple")
    names = [name for name in table if name.startswith(("plan from: ", "preset: balanced, plan from "))]
    assert len(names) == 7
    for name in names:
        decisions.clear()
        out = sample(table[name].patch(small[kind]))
        assert out.isfinite().all(), name
        assert not torch.equal(out, plain), name
        merged = [d for d in decisions if d.merged_ratio]
        assert merged[0].step == 1, name
        assert len({d.selection for d in merged}) == len({d.weighing for d in merged}) == len(merged) >= 2, name


@pytest.fixture
def reduced(model: Any, plans: Any) -> Any:
    """Return the inputs of an experiment's blocks: random tokens, the first plan of a run, and its reduce function."""

    def by(change: Any) -> tuple[Tensor, Any, Tensor]:
        sample(toma()(model))
        plan, seen = plans[0], []
        x = torch.randn(len(plan.dest_slots), plan.tokens, 8, generator=torch.Generator().manual_seed(0))

        def run(model: Any) -> Any:
            seen.append(pack_module("nodes.adapters.active_chain").reduce(x, plan))
            return model

        wrapper = change(lambda model: model)(model).wrappers["outer_sample"]["experiment"][0]
        wrapper(run, None)
        return x, plan, seen[0]

    return by


def test_destinations_themselves(reduced: Any) -> None:
    x, plan, out = reduced(experiments.picked)
    assert torch.equal(out, torch.stack([own[at] for own, at in zip(x, plan.destinations, strict=True)]))


def test_means_as_long_as_tokens(reduced: Any) -> None:
    """Means have their direction, and the mean norm of their tokens."""
    x, plan, out = reduced(experiments.norm_kept)
    merge = pack_module("toma_core.merge").merge
    torch.testing.assert_close(torch.cosine_similarity(out, merge(x, plan), dim=-1), torch.ones(out.shape[:2]))
    torch.testing.assert_close(out.norm(dim=-1), merge(x.norm(dim=-1, keepdim=True), plan)[..., 0])


def test_exact_destinations_attend_to_every_token(small: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from comfy.ldm.flux import math

    original, seen = math.optimized_attention, set[tuple[int, int]]()

    def spy(q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.add((q.shape[2], k.shape[2]))
        out: Tensor = original(q, k, *args, **kwargs)
        return out

    monkeypatch.setattr(math, "optimized_attention", spy)
    out = sample(experiments.exact(toma(skip_first_blocks=0, granularity="block"))(small["dit"]))
    assert out.isfinite().all()
    (every, _), (few, keys) = sorted(seen, reverse=True)
    assert keys == every == few + (SIDE // 2) ** 2 // 2
    before = sample(small["dit"])
    assert torch.equal(before, sample(small["dit"]))
    assert not torch.equal(before, out)


def test_guidance_is_all_that_is_merged(model: Any) -> None:
    unmerged = sample(model, cfg=3.0)
    as_it_was = sample(experiments.guided(toma(min_tokens=10_000))(model), cfg=3.0)
    # Conditions that are evaluated apart round in another way.
    assert float((as_it_was - unmerged).norm() / unmerged.norm()) < 1e-4
    merged, guided = (sample(patch(toma())(model), cfg=3.0) for patch in (lambda patch: patch, experiments.guided))
    assert 0 < float((guided - unmerged).norm()) < float((merged - unmerged).norm())


def test_refresh_early_or_late(model: Any, decisions: Any) -> None:
    sample(experiments.refreshed(toma(), (1, 1), (10, 5))(model))
    assert [d.selection for d in decisions] == [0, 1, 1000, 1000]
    decisions.clear()
    sample(experiments.refreshed(toma(), (10, 5), (1, 1))(model))
    assert [d.selection for d in decisions] == [0, 0, 1000, 1001]


def test_the_pack_is_as_before(model: Any) -> None:
    state, run = pack_module("toma_core.run"), pack_module("nodes.adapters.sampling_run")
    chain = pack_module("nodes.adapters.active_chain")
    before = (
        state.weigh,
        state.cosine_similarity,
        state.RunState._selected,
        run.Schedule,
        run.SamplingRun.evaluation,
        chain.reduce,
    )
    for change in (
        experiments.centred,
        experiments.pseudo_inverse,
        experiments.moved_budget,
        experiments.own_destinations,
        experiments.picked,
        experiments.norm_kept,
    ):
        sample(change(toma())(model))
    assert before == (
        state.weigh,
        state.cosine_similarity,
        state.RunState._selected,
        run.Schedule,
        run.SamplingRun.evaluation,
        chain.reduce,
    )
