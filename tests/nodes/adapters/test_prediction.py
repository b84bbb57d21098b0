"""Test plans that are made from the picture that the model predicted in the previous step."""

from typing import Any

import pytest
import torch
from comfy.patcher_extension import WrappersMP

from scripts.comfy_pack import pack_module
from testbed import models
from tests.loop import loop

SETTINGS: dict[str, Any] = {"selection_interval": 1, "weight_interval": 1, "kv_cache": True, "full_step_interval": 9}


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


@pytest.mark.compat
def test_plans_are_of_the_step_before(flux: Any, attach: Any, stats_of: Any, planned: Any) -> None:
    model, predicted = watched(flux)
    patched = attach(model, **SETTINGS)
    models.sample(patched, steps=4, cfg=4.0)
    stats = stats_of(patched)
    assert sorted(stats.merged_steps) == [1, 2]
    shown = {tuple(map(id, pictures)): pictures for pictures in planned}.values()
    assert all(any(torch.equal(picture, p) for p in predicted[:3]) for pictures in shown for picture in pictures)
    assert stats.selections == 2 * len(stats.grids)


def test_evaluations_between_full_steps_merge_whatever_the_sampler(flux: Any, attach: Any, stats_of: Any) -> None:
    patched = attach(flux, **SETTINGS)
    models.sample(patched, steps=3, sampler="heun")
    stats = stats_of(patched)
    assert (stats.evaluations, stats.merged_in.total()) == (5, 2)


@loop("every", [2, 3])
def test_full_step_plans(every: int, flux: Any, attach: Any, stats_of: Any, planned: Any) -> None:
    """A full step makes no plan."""
    model, predicted = watched(flux)
    settings = {"selection_interval": every, "weight_interval": every, "full_step_interval": every}
    patched = attach(model, **{**SETTINGS, **settings})
    models.sample(patched, steps=2 * every + 1, cfg=1.0)
    shown = [next(n for n, p in enumerate(predicted) if torch.equal(p, pictures[0])) for pictures in planned]
    assert {0, every} <= set(shown)
    assert stats_of(patched).selections == 2 * len(stats_of(patched).grids)


def test_nothing_is_held_after_a_run_that_broke_off(flux: Any, attach: Any) -> None:
    held: list[Any] = []

    def broken(args: dict[str, Any]) -> torch.Tensor:
        held.append(args["model_options"]["transformer_options"]["toma_sampling"])
        if len(held) == 2:
            assert held[0].trajectory.latent is not None
            raise RuntimeError("broken off")
        return args["denoised"]

    foreign = flux.clone()
    foreign.set_model_sampler_post_cfg_function(broken)
    with pytest.raises(RuntimeError, match="broken off"):
        models.sample(attach(foreign, **SETTINGS), steps=3)
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
