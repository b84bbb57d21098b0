"""Test tiled sampling: a tile of the latent is merged by its own content, independently of other tiles."""

import itertools
from typing import Any

import pytest
import torch

from compatibility.tiles import corners, tiled
from scripts.comfy_pack import pack_module
from testbed import models
from tests.loop import loop
from tests.nodes.adapters.helpers import balanced, split_calls

report_text = pack_module("nodes.adapters.report_text")

SIDE = 24
CORNERS = corners(SIDE)
PRESETS = ("balanced", "quality", "paper")
# The tolerance is large: values of latents reach 500, and the order of the tiles decides the order of sums.
NEARLY = {"rtol": 1e-4, "atol": 2e-3}


KINDS = ("unet", "flux", "qwen")
every_kind = loop("kind", KINDS)


def merged_with(model: Any, name: str) -> Any:
    # The sharper weights of `paper` would amplify rounding, because tokens of models with random weights are similar.
    return balanced(model, name, skip_first_blocks=1, sharpness=300.0)


def sampled(model: Any, **options: Any) -> torch.Tensor:
    return models.sample(model, SIDE, SIDE, **{"steps": 4, **options})


def check_error(result: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    """Check that the difference is not larger than the effect of rounding.

    On some CPUs rounding depends on the batch size, and the search may select another of two nearly equal destinations:
    the relative difference is 3e-4 on an AMD EPYC. The error of merging is 0.02 to 0.1.
    """
    assert (result - expected).norm() < (0.01 if name == "paper" else 0.001) * expected.norm()


# One preset for each kind of model. thorough/test_others.py has the other presets.
IN_ANY_ORDER = [("unet", "balanced"), ("flux", "paper"), ("qwen", "paper")]
SPLIT = [("unet", "quality"), ("flux", "paper"), ("qwen", "paper")]


@pytest.mark.compat
@loop(("kind", "name"), IN_ANY_ORDER)
def test_a_tile_does_not_depend_on_the_others(model: Any, stats_of: Any, name: str) -> None:
    """Compare a run with one tile per call with runs in the reverse order and with several tiles per call."""
    patched = merged_with(model, name)
    expected = sampled(tiled(patched, CORNERS))
    assert stats_of(patched).merged_blocks
    for tiles, at_once in ((CORNERS[::-1], 1), (CORNERS, 2), (CORNERS[::-1], 4)):
        check_error(sampled(tiled(patched, tiles, at_once)), expected, name)


@loop("kind", ["flux", "qwen"])
def test_transformers_with_a_kv_cache_merge_no_tiles(model: Any, stats_of: Any) -> None:
    merged = balanced(model)
    assert torch.equal(*(sampled(tiled(each, CORNERS)) for each in (merged, model)))
    assert "tiles" in str(report_text.headline(stats_of(merged)))


@loop(("kind", "name"), SPLIT)
def test_joined_and_split_calls_agree_on_tiles(model: Any, monkeypatch: Any, name: str) -> None:
    patched = tiled(merged_with(model, name), CORNERS, at_once=2)
    joined = sampled(patched)
    split_calls(monkeypatch, model)
    check_error(sampled(patched), joined, name)


@every_kind
def test_tile_plans_are_shared(model: Any, attach: Any, apart: Any, plan_calls: Any, monkeypatch: Any) -> None:
    """A call has two tiles with both conditions, so it has four images. The two images of a tile have equal plans."""
    apart(model)
    patched = tiled(attach(model, granularity="block"), CORNERS, at_once=2)
    sampled(patched, steps=1)
    joined = list(plan_calls)
    for call in joined:
        first, again, second, once_more = call.plan.dest_slots
        assert torch.equal(first, again)
        assert torch.equal(second, once_more)
        assert not torch.equal(first, second)
    plan_calls.clear()
    split_calls(monkeypatch, model)
    sampled(patched, steps=1)
    pairs = list(zip(plan_calls[: len(joined)], plan_calls[len(joined) :], strict=True))
    for one, other in pairs:
        assert torch.equal(one.plan.dest_slots, other.plan.dest_slots)
        assert torch.equal(one.plan.merge_weights, other.plan.merge_weights)
    assert not all(torch.equal(one.x, other.x) for one, other in pairs), "the conditions' tokens differ"


@every_kind
def test_tiles_may_come_in_another_order_for_each_condition(model: Any, monkeypatch: Any) -> None:
    """If conditions have separate calls, every second call takes the tiles in reverse order."""
    merged, orders = merged_with(model, "paper"), itertools.cycle((CORNERS[::-1], CORNERS))

    def evaluate(apply: Any, args: dict[str, Any]) -> torch.Tensor:
        return tiled(merged, next(orders)).model_options["model_function_wrapper"](apply, args)

    patched = merged.clone()
    patched.set_model_unet_function_wrapper(evaluate)
    joined = sampled(patched, steps=2)
    split_calls(monkeypatch, model)
    torch.testing.assert_close(sampled(patched, steps=2), joined, **NEARLY)


@every_kind
def test_nothing_of_a_tile_is_left_for_the_next_evaluation(model: Any, attach: Any, plan_calls: Any) -> None:
    """Every evaluation selects again from its own content, whether tiles move between steps or not."""
    patched = attach(model, selection_interval=10, full_step_interval=3, skip_first_blocks=1)
    for move in (lambda _: 0, lambda step: 3 * step):
        plan_calls.clear()
        out = sampled(tiled(patched, CORNERS, move=move), cfg=1.0, steps=3, last_step=2)
        assert out.isfinite().all()
        assert {call.step_plan.step for call in plan_calls} == {1}, "the first step is full"
        assert {call.step_plan.mode.value for call in plan_calls} == {"merged"}
        plan_calls.clear()
        sampled(tiled(attach(model), CORNERS, at_once=4, move=move), cfg=1.0, steps=3)
        assert len({id(call.plan) for call in plan_calls}) == len(
            {(c.step_plan.step, c.scope, c.grid) for c in plan_calls}
        )


@every_kind
def test_plans_of_tiles_do_not_pile_up(model: Any, attach: Any, monkeypatch: Any) -> None:
    """Plans of an evaluation are dropped when the next evaluation begins."""
    sampling = pack_module("nodes.adapters.sampling_run").SamplingRun
    held, begin = [], sampling.next

    def counted(self: Any, timestep: Any) -> None:
        begin(self, timestep)
        held.append((len(self.tiles), len(self.run._plans)))

    monkeypatch.setattr(sampling, "next", counted)
    sampled(tiled(attach(model), CORNERS))
    assert held[0] == (0, 0)
    assert held[1] == held[2] == held[3]
    assert held[1][0] == 0


@every_kind
def test_areas_are_no_pieces(model: Any, attach: Any, plan_calls: Any) -> None:
    """ComfyUI crops an area that extends beyond the latent. The cropped area must not be treated as a tile."""
    positive = [
        *models.conditioning(model, seed=1, area=(SIDE, SIDE, 0, SIDE // 2)),
        *models.conditioning(model, seed=3),
    ]
    sampled(attach(model), positive=positive, steps=2)
    assert {call.step_plan.mode.value for call in plan_calls} == {"merged"}
    assert {(None, None), ((SIDE, SIDE, 0, SIDE // 2), None)} == {key for call in plan_calls for key in call.copies}
