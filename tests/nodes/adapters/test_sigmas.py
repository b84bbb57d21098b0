"""Test that ToMA takes each evaluation's sigma from the schedule, without host syncs."""

import functools
import itertools
import math
from collections.abc import Sequence
from inspect import signature
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from comfy.k_diffusion import sampling
from comfy.patcher_extension import WrappersMP
from comfy.samplers import KSAMPLER, CFGGuider, calculate_sigmas, ksampler
from torch.utils._python_dispatch import TorchDispatchMode

from scripts.comfy_pack import pack_module
from testbed import models
from tests.loop import loop
from tests.nodes.adapters.families.layouts import HEIGHT, WIDTH
from tests.nodes.adapters.helpers import balanced, custom_sampled, every_kind

levels = pack_module("nodes.adapters.sigmas")
SIDE = 16


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, float]]:
    """Record (sigma that ToMA uses, sigma that the model receives) of every evaluation."""
    seen, original = [], levels.SigmaTracker.of

    def spy(self: Any, timestep: torch.Tensor) -> Any:
        found = original(self, timestep)
        seen.append((found[0], float(timestep[0])))
        return found

    monkeypatch.setattr(levels.SigmaTracker, "of", spy)
    return seen


class Reads(TorchDispatchMode):
    """Counts reads of tensor values by the host."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "_local_scalar_dense" in str(func)
        return func(*args, **(kwargs or {}))


def reads_inside(model: Any, **options: Any) -> int:
    """Return the number of tensor reads between the first evaluation of a run and the last."""
    model, trace, calls = model.clone(), Reads(), []

    def evaluation(executor: Any, *args: Any, **kwargs: Any) -> Any:
        if not calls:
            trace.__enter__()
        calls.append(trace.count)
        return executor(*args, **kwargs)

    def outer(executor: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return executor(*args, **kwargs)
        finally:
            trace.__exit__(None, None, None)

    # Let the wrapper look like one of ComfyUI. With a wrapper of another pack, ToMA would also read the noise of each
    # latent.
    evaluation.__module__ = "comfy.samplers"
    model.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, "test", evaluation)
    model.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, "test", outer)
    models.sample(model, SIDE, SIDE, steps=4, **options)
    assert len(calls) >= 4
    return calls[-1] - calls[0]


# Each sampler with one kind of model and one scheduler. thorough/test_others.py has the other combinations.
KNOWN = [
    (sampler, ("unet", "flux")[n % 2], ("simple", "karras")[n // 2 % 2]) for n, sampler in enumerate(levels.ONCE_A_STEP)
]


@pytest.mark.compat
@loop(("sampler", "kind", "scheduler"), KNOWN)
def test_known_samplers_keep_schedule(model: Any, attach: Any, received: Any, sampler: str, scheduler: str) -> None:
    if not hasattr(sampling, f"sample_{sampler}"):
        pytest.skip("this ComfyUI has no such sampler")
    models.sample(attach(model), 8, 8, steps=4, sampler=sampler, scheduler=scheduler)
    taken, truth = map(torch.tensor, zip(*received, strict=True))
    assert len(taken) == 4
    torch.testing.assert_close(taken, truth, rtol=1e-3, atol=0.0)


@pytest.fixture(scope="module")
def own_reads(pack: Any) -> dict[tuple[str, str], int]:
    """Return an empty dict, in which tests store the number of reads without ToMA by kind of model and sampler."""
    return {}


PRESETS = [("balanced", "euler"), ("quality", "dpmpp_2m"), ("paper", "lcm")]


@every_kind
@loop(("preset", "sampler"), PRESETS)
def test_nothing_is_read_inside_the_steps(model: Any, kind: str, own_reads: Any, sampler: str, preset: str) -> None:
    """Count the reads of tensor values that ToMA adds to the sampler's own reads. With `heun`, ToMA reads the sigma of
    each evaluation.

    In runs with a KV cache whose sampler waits for the device anyway, ToMA also reads the amount of new noise, once per
    step.
    """
    merged = balanced(model, preset)
    models.sample(merged, SIDE, SIDE, steps=4)  # a first run, because layouts are made on the host once per process
    for name in {sampler, "euler", "heun"}:
        if (kind, name) not in own_reads:
            own_reads[kind, name] = reads_inside(model, sampler=name)
    reads = reads_inside(merged, sampler=sampler) - own_reads[kind, sampler]
    measures_noise = kind == "flux" and preset != "paper" and sampler in levels._DRAWS_NOISE
    assert 0 < reads <= own_reads[kind, sampler] if measures_noise else reads == 0
    assert own_reads[kind, "euler"] == 0
    if sampler == "euler":
        assert reads_inside(merged, sampler="heun") > own_reads[kind, "heun"]


@loop("sampler", levels._DRAWS_NOISE)
def test_samplers_that_draw_noise_wait_for_the_device_themselves(unet: Any, sampler: str) -> None:
    assert reads_inside(unet, sampler=sampler) >= 3


def test_samplers_that_enlarge_errors_are_known_inside_of_others() -> None:
    assert levels.enlarges(ksampler("lms"))
    assert levels.enlarges(KSAMPLER(print, {"inner": ksampler("dpmpp_2m_cfg_pp")}))
    assert levels.enlarges(ksampler("gradient_estimation", {"cfg_pp": True}))
    assert not any(map(levels.enlarges, (ksampler("gradient_estimation"), ksampler("euler"), None)))


def guider() -> Any:
    return CFGGuider(SimpleNamespace(model_options={"transformer_options": {}}))


def sigmas_of(sampler: Any, guided: Any = None, schedule: Sequence[float] = (2.0, 1.0, 0.0)) -> Any:
    return levels.SigmaTracker(schedule, sampler, guider() if guided is None else guided)


def trusted(sampler: Any, guided: Any = None) -> bool:
    """Return whether ToMA takes the first sigma from the schedule."""
    run, received = sigmas_of(sampler, guided), torch.tensor([1.5])
    run.next(received)
    assert run.of(received)[:2] in ((2.0, 0), (1.5, 0))
    return bool(run.of(received).sigma == 2.0)


def test_only_known_samplers_with_known_options_and_guiders_are_trusted(pack: Any, monkeypatch: Any) -> None:
    original, plain, wrapped = sampling.sample_euler, guider(), guider()
    wrapped.model_options = {"transformer_options": {"wrappers": {WrappersMP.SAMPLER_SAMPLE: {"test": [None]}}}}

    @functools.wraps(original)
    def twice(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    def sample_euler() -> None:
        """A sampler function that is not ComfyUI's."""

    class Other(KSAMPLER):
        """Another sampler class around ComfyUI's function."""

    class Skips(CFGGuider):
        def outer_predict_noise(self, *args: Any, **kwargs: Any) -> Any: ...

    class Mixes(CFGGuider):
        def predict_noise(self, *args: Any, **kwargs: Any) -> Any: ...

    euler = ksampler("euler")
    for sampler in (euler, ksampler("euler", {"s_churn": 0.0, "s_noise": 1.01}), ksampler("dpmpp_2m")):
        assert trusted(sampler)
    for options in ({"s_churn": 1.0}, {"invented": False}, {"s_tmin": torch.zeros(2)}):
        assert not trusted(ksampler("euler", options)), options
    for unknown in (KSAMPLER(sample_euler), Other(original), None):
        assert not trusted(unknown)
    assert trusted(euler, Mixes(plain.model_patcher))
    for other in (Skips(plain.model_patcher), object(), wrapped):
        assert not trusted(euler, other)
    monkeypatch.setattr(sampling, "sample_euler", twice)
    assert not trusted(ksampler("euler"))
    assert trusted(ksampler("dpmpp_2m"))


def flipped(name: str) -> list[str]:
    """Return the options of a sampler that can be on or off."""
    function = getattr(sampling, f"sample_{name}", None)
    parameters = () if function is None else signature(function).parameters.values()
    return [p.name for p in parameters if isinstance(p.default, bool) and p.name != "disable"]


OPTIONS = [("heun", ""), *((n, o) for n in levels.ONCE_A_STEP for o in flipped(n))]


@loop(("sampler", "option"), OPTIONS)
def test_options_do_not_lead_astray(flux: Any, attach: Any, received: Any, sampler: str, option: str) -> None:
    """Some samplers evaluate twice per step with an option, such as `sa_solver` with `use_pece`. `heun` always
    evaluates twice."""
    parameters = signature(getattr(sampling, f"sample_{sampler}")).parameters
    sigmas = calculate_sigmas(flux.get_model_object("model_sampling"), "simple", 5)
    custom_sampled(attach(flux), ksampler(sampler, {option: not parameters[option].default} if option else {}), sigmas)
    assert len(received) == 9 or option
    assert all(taken == pytest.approx(truth, rel=1e-3 if option else 0) for taken, truth in received)


def test_evaluations_past_the_schedule_and_at_other_sigmas_are_read(pack: Any) -> None:
    run, received = sigmas_of(ksampler("euler")), torch.tensor([1.7])
    assert run.of(received)[:2] == (pytest.approx(1.7), None), "before the sampler has said anything"
    run.next(received)
    assert run.of(received)[:2] == (2.0, 0)
    assert run.of(torch.tensor([0.7]))[:2] == (pytest.approx(0.7), None), "guidance at a level of its own"
    for _ in range(2):
        run.next(received)
    assert run.of(received)[:2] == (pytest.approx(1.7), None)


@every_kind
@loop("first", [False, True])
def test_evaluations_that_another_wrapper_skips(model: Any, attach: Any, received: Any, first: bool) -> None:
    """LazyCache skips evaluations. Its node may come before or after ToMA's."""
    calls = itertools.count()

    def skip(executor: Any, x: torch.Tensor, *args: Any) -> Any:
        return x * 0.9 if next(calls) in (1, 3) else executor(x, *args)

    patched = (model if first else attach(model)).clone()
    patched.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, "test", skip)
    models.sample(attach(patched) if first else patched, SIDE, SIDE, steps=6)
    assert len(received) == 4
    assert all(taken == pytest.approx(truth, rel=1e-3) for taken, truth in received)


def test_a_repeated_sigma_is_two_steps(flux: Any, attach: Any, decisions: Any) -> None:
    """Restarts repeat a sigma. In very long or strongly shifted schedules, neighbouring sigmas are nearly equal."""
    for sigmas in ([1.0, 1.0, 0.8, 0.8, 0.3, 0.0], [1.0, 0.6, 0.3, 0.8, 0.4, 0.0], [1.0, 0.99995, 0.9999, 0.9, 0.0]):
        decisions.clear()
        custom_sampled(attach(flux, full_step_interval=3), ksampler("euler"), torch.tensor(sigmas), 8, 8)
        steps = list(range(len(sigmas) - 1))
        assert [d.step for d in decisions] == steps
        assert [d.mode.merges for d in decisions] == [n % 3 != 0 and n != steps[-1] for n in steps]


def reporting(
    *evaluations: float | int, schedule: Sequence[float] = (4.0, 3.0, 2.0, 1.0, 0.0), sampler: Any = None
) -> list[Any]:
    """Return the step of each evaluation. evaluations: sigmas of evaluations (floats) and reported steps (integers)."""
    run, steps = sigmas_of(sampler, schedule=schedule), []
    for each in evaluations:
        if isinstance(each, int):
            run.reported(each)
            continue
        given = torch.tensor([each])
        run.next(given)
        steps.append(run.of(given).step)
        assert run.of(given) is run.of(given), "asked twice, answered once"
    return steps


def test_steps_come_from_what_the_sampler_reports(pack: Any) -> None:
    """The sigma decides the step only if the sampler reports no steps. Steps never decrease."""
    assert reporting(4.0, 0, 2.5, 1, 1.6, 2, 0.5, 3) == [0, 1, 2, 3], "reports are ahead of sigma"
    assert reporting(4.0, 0, 3.0, 1, 2.2, 2, 1.3, 3) == [0, 1, 2, 3], "reports are behind sigma"
    assert reporting(4.0, 0, 3.0, 3.0, 1, 2.0, 2.0, 2, 1.0, 1.0, 3) == [0, 1, 1, 2, 2, 3, 3], "Heun's method"
    assert reporting(4.0, 0, 3.5, 3.0, 1, 2.5, 2.0, 2, 1.5, 1.0, 3) == [0, 0, 1, 1, 2, 2, 3], "a level between two"
    assert reporting(4.0, 0, 3.0, 1, 3.0, 2.0, 2, 2.0, 1.0, 3, 1.0) == [0, 1, 1, 2, 2, 3, 3], "steps that are corrected"
    assert reporting(4.0, 0, 2.5, 1, 2.5, 1.5, 2, 1.5, 0.5, 3, 0.5) == [0, 1, 1, 2, 2, 3, 3], "corrected, and ahead"
    twice = (4.0, 3.0, 3.0, 1.0, 0.0)
    assert reporting(4.0, 0, 3.0, 1, 3.0, 2, 1.0, 3, schedule=twice) == [0, 1, 2, 3], "two steps at one level"
    assert reporting(4.0, 3.0, 2.0, 1.0) == [0, 1, 2, 3], "nothing is reported"
    assert reporting(4.0, 2.0, 3.5, 1.0) == [0, 2, 2, 3], "nothing is reported, and levels go back"
    assert reporting(4.0, 0, 3.0, 1, 4.0, 0, 2.0, 1, 1.0) == [0, 1, 2, 2, 3], "repeated reports are ignored"
    falling = [14.6 * 0.75**step for step in range(5)]
    lowered = [0.9 * sigma for sigma in falling for _ in range(2)]
    assert reporting(*lowered, schedule=(*falling, 0.0)) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4], (
        "lowered, and each level twice"
    )
    # All evaluations have the same sigma, so the step cannot be found by the sigma.
    too_many = [each for step in range(7) for each in (2.0, step)]
    assert reporting(*too_many, schedule=(3.0, 2.0, 0.0))[-4:] == [1, 1, 1, 1], "more steps than in the schedule"
    wrapping = KSAMPLER(print, {"inner": ksampler("euler")})
    assert reporting(4.0, 0, 3.8, 1, 2.9, 2, 1.9, 3, sampler=wrapping) == [0, 1, 2, 3], "a known sampler inside"


STEPS = 20


@loop(("change", "evaluations"), [("0.9", 1), ("0.9", 2), ("0.6", 1), ("wave", 1), ("wave", 2)])
def test_steps_that_a_sampler_does_not_report(change: str, evaluations: int, flux: Any, stats_of: Any) -> None:
    """The sampler reports no steps, and the model gets other sigmas than those of the schedule."""
    merged = balanced(flux)

    def run(reports: bool) -> Any:
        def function(model: Any, x: Any, sigmas: Any, extra_args: Any, callback: Any = None, **_: Any) -> Any:
            for step in range(STEPS):
                wave = 1 - 0.1 * math.sin(math.pi * step / STEPS)
                factor = wave if change == "wave" else float(change) if 0 < step < STEPS - 1 else 1.0
                for n in range(evaluations):
                    sigma = sigmas[step + n] if step + n < STEPS else sigmas[step]
                    denoised = model(x, (factor * sigma).expand(len(x)), **extra_args)
                if reports:
                    callback({"i": step, "x": x, "denoised": denoised})
                x = denoised + (x - denoised) * sigmas[step + 1] / sigmas[step]
            return x

        custom_sampled(merged, KSAMPLER(function), torch.linspace(1, 0, STEPS + 1), HEIGHT, WIDTH)
        return stats_of(merged)

    told, untold = run(True), run(False)
    assert len(told.merged_steps) >= 12
    assert len(untold.merged_steps) >= len(told.merged_steps) - 1
    assert untold.merged_in.total() >= 0.75 * told.merged_in.total()
