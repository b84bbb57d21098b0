"""Test plans that are made from the picture that the model predicted in the previous step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comfy.patcher_extension import WrappersMP

from scripts.comfy_pack import pack_module
from testbed import models
from tests.loop import loop
from tests.nodes.adapters.helpers import every_kind

SETTINGS: dict[str, Any] = {"similarity_from": "prediction", "selection_interval": 1, "weight_interval": 1}


@pytest.fixture
def planned(pack: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Tensor, ...]]:
    """Record the pictures that each call of `RunState.plan` gets, in order."""
    state, seen = pack_module("toma_core.run").RunState, []
    own = state.plan

    def plan(self: Any, x: Any, grid: Any, scope: Any, decision: Any, copies: Any, *rest: Any) -> Any:
        seen.append(tuple(part.clone() for part in rest[1]))
        return own(self, x, grid, scope, decision, copies, *rest)

    monkeypatch.setattr(state, "plan", plan)
    return seen


def watched(model: Any) -> tuple[Any, list[torch.Tensor]]:
    """Return a clone of the model, and a list that gets one denoised picture per evaluation, as the sampler receives
    it."""
    model, pictures = model.clone(), list[torch.Tensor]()

    def record(executor: Any, *args: Any, **kwargs: Any) -> Any:
        pictures.append(executor(*args, **kwargs))
        return pictures[-1]

    model.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, "test", record)
    return model, pictures


@every_kind
@pytest.mark.compat
def test_plans_are_of_the_step_before(model: Any, attach: Any, stats_of: Any, planned: Any) -> None:
    model, predicted = watched(model)
    patched = attach(model, **SETTINGS)
    models.sample(patched, steps=3, cfg=4.0)
    stats = stats_of(patched)
    assert sorted(stats.merged_steps) == [1, 2]
    shown = {tuple(map(id, pictures)): pictures for pictures in planned}.values()
    assert all(any(torch.equal(picture, p) for p in predicted[:2]) for pictures in shown for picture in pictures)
    assert stats.selections == 2 * len(stats.grids)


@every_kind
def test_every_evaluation_after_the_first_merges_whatever_the_sampler(model: Any, attach: Any, stats_of: Any) -> None:
    patched = attach(model, **SETTINGS)
    models.sample(patched, steps=3, sampler="heun")
    stats = stats_of(patched)
    assert (stats.evaluations, stats.merged_in.total()) == (5, 4)


@every_kind
@loop("every", [2, 3])
def test_the_full_steps_prediction_plans_the_next_step(
    every: int, model: Any, attach: Any, stats_of: Any, planned: Any, monkeypatch: Any
) -> None:
    """A full step makes no plan."""
    model, predicted = watched(model)
    monkeypatch.setattr(pack_module("toma_core.prediction"), "_MAX_NOISE", 0.999)
    settings = {"similarity_from": "prediction", "selection_interval": every, "weight_interval": every}
    patched = attach(model, **settings, full_step_interval=every)
    models.sample(patched, steps=2 * every + 1, cfg=1.0)
    shown = [next(n for n, p in enumerate(predicted) if torch.equal(p, pictures[0])) for pictures in planned]
    assert {0, every} <= set(shown)
    assert stats_of(patched).selections == 2 * len(stats_of(patched).grids)


def test_a_picture_of_mostly_noise_is_not_trusted(flux: Any, attach: Any, planned: Any, monkeypatch: Any) -> None:
    """Early steps select by tokens, with equal budgets in all windows. Later steps select by the predicted picture."""
    state, budgets = pack_module("toma_core.run").RunState, list[bool]()
    own = state._laid_out

    def laid_out(self: Any, *args: Any) -> Any:
        windows, budget = own(self, *args)
        budgets.append(budget.adaptive)
        return windows, budget

    monkeypatch.setattr(state, "_laid_out", laid_out)
    patched = attach(flux, **SETTINGS)
    models.sample(patched, steps=20, cfg=1.0)
    for switches in ([bool(pictures) for pictures in planned], budgets):
        assert switches == sorted(switches), "never back"
        assert set(switches) == {False, True}


@loop("model_sampling", [None, object()], ids=["nothing", "something else"])
def test_sigmas_of_an_unknown_kind_are_no_error(model_sampling: Any, pack: Any) -> None:
    sampling, config = pack_module("nodes.adapters.sampling_run").SamplingRun, pack_module("toma_core").ToMAConfig
    assert sampling.start(config(ratio=0.5), model_sampling, [1.0, 0.0]).max_prediction_sigma > 1


@every_kind
def test_nothing_is_held_after_a_run_that_broke_off(model: Any, attach: Any, monkeypatch: Any) -> None:
    held: list[Any] = []
    sampling = pack_module("nodes.adapters.sampling_run").SamplingRun
    own = sampling.predicted

    def broken(self: Any, picture: Any) -> None:
        own(self, picture)
        held.append(self)
        if len(held) == 2:
            raise RuntimeError("broken off")

    monkeypatch.setattr(sampling, "predicted", broken)
    patched = attach(model, **SETTINGS)
    with pytest.raises(RuntimeError, match="broken off"):
        models.sample(patched, steps=3)
    assert not held[0].trajectory._histories
    assert held[0].trajectory.latent is None


def test_areas_are_cut_out_of_the_picture(pack: Any) -> None:
    cut = pack_module("nodes.adapters.conditions").crop
    picture = torch.arange(2 * 3 * 6 * 8.0).view(2, 3, 6, 8)
    assert cut(picture, None) is picture
    assert torch.equal(cut(picture, (2, 4, 1, 3)), picture[:, :, 1:3, 3:7])
    assert torch.equal(cut(picture, (4, 8, 4, 0)), picture[:, :, 4:6])  # the part of the area that is inside the latent
    deep = picture[:, :, None]
    assert torch.equal(cut(deep, (2, 4, 1, 3)), deep[..., 1:3, 3:7])
    assert torch.equal(cut(deep, (1, 2, 4, 0, 1, 3)), deep[..., 1:3, 3:7])
