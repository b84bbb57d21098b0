"""Noise levels without waiting: those that are taken from the schedule are those that the model is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import models
from scripts.comfy_pack import pack_module

levels = pack_module("nodes.adapters.levels")
SIDE = 16


@pytest.fixture(params=["unet", "flux"])
def model(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, float]]:
    """(what was taken or read, what the model is told) of every evaluation."""
    seen, original = [], levels.Levels.of

    def spy(self: Any, timestep: torch.Tensor) -> float:
        seen.append((original(self, timestep), float(timestep[0])))
        return seen[-1][0]

    monkeypatch.setattr(levels.Levels, "of", spy)
    return seen


class Reads(TorchDispatchMode):
    """Counts reads of a tensor's value by the host."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "_local_scalar_dense" in str(func)
        return func(*args, **(kwargs or {}))


def reads_inside(model: Any, **options: Any) -> int:
    """Reads between the first evaluation of a run and its last."""
    model, trace, calls = model.clone(), Reads(), []

    def evaluation(executor: Any, *args: Any, **kwargs: Any) -> Any:
        if not calls:
            trace.__enter__()
        calls.append(trace.count)
        return executor(*args, **kwargs)

    def sampler(executor: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return executor(*args, **kwargs)
        finally:
            trace.__exit__(None, None, None)

    from comfy.patcher_extension import WrappersMP

    model.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, "test", evaluation)
    model.add_wrapper_with_key(WrappersMP.SAMPLER_SAMPLE, "test", sampler)
    models.sample(model, SIDE, SIDE, steps=4, **options)
    assert len(calls) >= 4
    return calls[-1] - calls[0]


@pytest.mark.compat
@pytest.mark.parametrize("scheduler", ["simple", "karras"])
@pytest.mark.parametrize("sampler", [name.removeprefix("sample_") for name in levels.ONCE_A_STEP])
def test_known_samplers_keep_to_their_schedule(
    model: Any, attach: Any, told: Any, sampler: str, scheduler: str
) -> None:
    from comfy.k_diffusion import sampling

    if not hasattr(sampling, f"sample_{sampler}"):
        pytest.skip("this ComfyUI has no such sampler")
    models.sample(attach(model), 8, 8, steps=4, sampler=sampler, scheduler=scheduler)
    taken, truth = map(torch.tensor, zip(*told, strict=True))
    assert len(taken) == 4
    torch.testing.assert_close(taken, truth, rtol=1e-3, atol=0.0)
    assert f"sample_{sampler}" not in levels._strayed


@pytest.mark.parametrize("preset", ["balanced", "quality", "fast", "faithful"])
@pytest.mark.parametrize("sampler", ["euler", "dpmpp_2m", "lcm"])
def test_nothing_is_read_inside_the_steps(model: Any, pack: Any, sampler: str, preset: str) -> None:
    """As without ToMA. `heun` shows that a read would be counted."""
    settings = pack_module("toma_core").Settings(preset, {"min_tokens": 4, "ratio_decay": 0.5})
    merged = pack_module("nodes.adapters.run").attach(model, settings)
    models.sample(merged, SIDE, SIDE, steps=4)  # layouts are made once in a process, on the host
    assert reads_inside(merged, sampler=sampler) == reads_inside(model, sampler=sampler)
    assert reads_inside(model, sampler="euler") == 0
    if sampler == "euler":
        assert reads_inside(merged, sampler="heun") > reads_inside(model, sampler="heun")


def test_other_samplers_are_read(model: Any, attach: Any, told: Any) -> None:
    models.sample(attach(model), 8, 8, steps=4, sampler="heun")
    assert len(told) == 7
    assert all(taken == truth for taken, truth in told)


def test_a_sampler_of_another_pack_by_a_known_name_is_read(pack: Any) -> None:
    from comfy.samplers import KSAMPLER, ksampler

    def sample_euler() -> None:
        """Not ComfyUI's."""

    schedule = [2.0, 1.0, 0.0]
    for sampler, known in (
        (ksampler("euler"), True),
        (KSAMPLER(sample_euler), False),
        (ksampler("euler", {"s_churn": 1.0}), False),
        (None, False),
    ):
        run = levels.Levels(schedule, sampler)
        run.next()
        assert run.of(torch.tensor([1.5])) == (2.0 if known else 1.5)


def test_evaluations_past_the_schedule_are_read(pack: Any) -> None:
    from comfy.samplers import ksampler

    run = levels.Levels([2.0, 1.0, 0.0], ksampler("euler"))
    assert run.of(torch.tensor([1.7])) == pytest.approx(1.7), "before the sampler has said anything"
    for _ in range(3):
        run.next()
    assert run.of(torch.tensor([0.3])) == pytest.approx(0.3)


def test_a_sampler_that_strays_is_told_and_read_from_then_on(pack: Any, monkeypatch: Any, warnings: Any) -> None:
    from comfy.samplers import ksampler

    monkeypatch.setattr(levels, "_strayed", set())
    for expected in (2.0, 1.25):
        run = levels.Levels([2.0, 1.0, 0.0], ksampler("euler"))
        run.next()
        assert run.of(torch.tensor([1.25])) == expected
        run.check()
    (warning,) = warnings()
    assert "the sampler euler left its schedule" in warning
