"""Test the node ToMA Benchmark: which runs are measured in which order, what their times include, and which ratio is
recommended."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scripts.comfy_pack import pack_module
from testbed import models
from tests.loop import loop

benchmark = pack_module("nodes.benchmark")
Node = benchmark.ToMABenchmark
Timing = benchmark.Timing
charts = pack_module("nodes.report_charts")
patching = pack_module("nodes.adapters.patch_model")
SETTINGS = pack_module("toma_core").UserSettings("balanced", {"min_tokens": 16, "skip_last_blocks": 0})
EMPTY = {"samples": torch.zeros(1, 4, 32, 32)}
TIMINGS = [
    Timing(0.0, [0.100, 0.101, 0.102]),
    Timing(0.25, [0.080, 0.081, 0.082], 0.02, "4096 -> 3072 tokens"),
    Timing(0.5, [0.060, 0.061, 0.062], 0.05, "4096 -> 2048 tokens"),
]


@pytest.fixture
def run(previews: None) -> Any:
    """run(model, **inputs): return the benchmark node's outputs (plot, table, fastest ratio, closest ratio) and its
    complete result."""

    def call(model: Any, **inputs: Any) -> tuple[torch.Tensor, str, float, float, Any]:
        given = {"ratio": 0.5, "preset": "balanced", "sweep": False, "steps": 4, "runs": 2, "latent": EMPTY, **inputs}
        answer = Node.execute(model, positive=models.conditioning(model), **given)
        return (*answer.args, answer)

    return call


@pytest.mark.compat
@loop(
    ("kind", "frames", "merged"),
    [
        ("unet", 0, "2 of 17 blocks, 4 of 4"),
        ("flux", 0, "6 of 6 blocks, 2 of 4"),
        ("ltx_av", 3, "4 of 4 blocks, 2 of 4"),
        ("h3", 9, "4 of 4 blocks, 2 of 4"),
    ],
)
def test_measures_a_real_model_and_says_where(kind: str, frames: int, merged: str, model_of: Any, run: Any) -> None:
    """Flux needs more channels than the latent `EMPTY` has. A video may have sound."""
    model = model_of(kind)
    inputs = {"latent": {"samples": models.empty(model, 12, 16, 1, frames)}} if frames else {}
    plot, table, best, nearest, answer = run(model, **inputs)
    assert plot.shape[0] == 1
    assert plot.shape[-1] == 3
    assert 0 <= plot.min() <= plot.max() <= 1
    if isinstance(best, float):  # otherwise the machine is too busy for a recommendation
        assert best in (0.0, 0.5)
        assert nearest in (0.0, best)
    verdict, _, rows = table.partition("\n\n")
    lines = rows.splitlines()
    assert lines[0].startswith("| setting ")
    assert len({len(line) for line in lines[:4]}) == 1, "the columns are aligned"
    assert lines[2].startswith("| without ToMA |")
    assert lines[3].startswith("| ratio 0.5 ")
    assert 0 < float(lines[3].split("|")[-2]) < 0.2
    assert f"latent {'16 x 12' if frames else '32 x 32'}, batch 1, conditions 1; 2 runs of 4 steps each" in table
    assert f"float32, torch {torch.__version__}, ComfyUI 0." in table
    assert f"ratio 0.5: On: 50 % of the tokens merged, {merged} steps." in table
    assert answer.ui["text"][0] == table
    (message,) = answer.ui["toma"]
    assert message["text"] == f"{verdict}\n\n{charts.Caption.TIME()}"
    assert message["details"] in table
    assert len(answer.ui["images"]) == 1


def test_sweep_measures_thirds_of_the_ratio(unet: Any, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def measure(model: Any, settings: Any, ratios: Any, task: Any, runs: int, on_run: Any) -> Any:
        asked.append((ratios, task.steps, task.negative, runs))
        return TIMINGS

    monkeypatch.setattr(benchmark, "measure", measure)
    negative = models.conditioning(unet, seed=2)
    run(unet, sweep=True, ratio=0.6, negative=negative, steps=7, runs=4)
    run(unet, sweep=False, ratio=0.6)
    run(unet, sweep=True, ratio=0.01)
    assert [ratios for ratios, *_ in asked] == [[0.2, 0.4, 0.6], [0.6], [0.01]], "no ratio is rounded away"
    assert asked[0][1:] == (7, negative, 4)


FASTEST = "Fastest worthwhile: ratio 0.5, {}x as fast, error 0.{}."
CLOSEST = "Closest that is still 1.2x as fast: ratio 0.25, 1.25x as fast, error 0.02."
TOO_NOISY = (
    "Too noisy to tell: runs of the same setting differ by {} %. Nothing is recommended, and nodes connected to the "
    "ratios do not run. Let nothing else use the machine, or raise runs."
)


@loop(
    ("seconds", "outputs", "verdict"),
    [
        ([], (0.5, 0.25), [FASTEST.format(1.66, "05"), CLOSEST]),
        ([0.2, 0.21], (0.0, 0.0), ["Leave ToMA off here: no ratio is faster."]),
        ([0.06, 0.09, 0.14], None, [TOO_NOISY.format(53)]),
        ([0.02, 0.03], None, [TOO_NOISY.format(24)]),  # far faster
        ([0.09, 0.092], (0.5, 0.0), [FASTEST.format(1.11, 10), "None is 1.2x as fast."]),
        ([0.05, 0.057], (0.5, 0.5), [FASTEST.format(1.89, 10)]),
    ],
)
def test_what_to_do_is_said_first(
    unet: Any, run: Any, monkeypatch: pytest.MonkeyPatch, seconds: list[float], outputs: Any, verdict: list[str]
) -> None:
    """seconds: the times of the runs at ratio 0.5, or an empty list for the times in `TIMINGS`."""
    timed = [Timing(0.5, seconds, 0.1)] if seconds else TIMINGS[1:]
    monkeypatch.setattr(benchmark, "measure", lambda *_: [TIMINGS[0], *timed])
    _, table, *recommended, answer = run(unet)
    if outputs is None:
        assert [type(output).__name__ for output in recommended] == ["ExecutionBlocker"] * 2
    else:
        assert tuple(recommended) == outputs
    assert table.partition("\n\n")[0].splitlines() == verdict
    assert answer.ui["toma"][0]["text"].splitlines()[: len(verdict)] == verdict
    assert ("| 1.25x | 0.020 |" in table) is (not seconds)


def test_ratio_zero_has_nothing_to_measure(unet: Any, run: Any) -> None:
    message = f"ToMA: {benchmark.Measured.RATIO_ZERO()}"
    assert Node.validate_inputs(ratio=0.0) == message
    with pytest.raises(ValueError, match="nothing to measure"):
        run(unet, ratio=0.0)
    assert Node.validate_inputs(ratio=0.5) is True
    assert "Allowed: a number from 0 to 0.95" in Node.validate_inputs(ratio=2.0)


def task(model: Any, *, steps: int = 3, guided: bool = False, size: int = 24) -> Any:
    channels = model.model.latent_format.latent_channels
    negative = models.conditioning(model, seed=2) if guided else None
    return benchmark.Task(models.conditioning(model), negative, torch.zeros(1, channels, size, size), steps)


def measure(model: Any, ratios: Any, asked: Any, runs: int, on_run: Any = lambda *_: None) -> Any:
    return benchmark.measure(model, SETTINGS, ratios, asked, runs, on_run)


def timed(ratio: float, *seconds: float) -> Any:
    return Timing(ratio, list(seconds), error=ratio)


@pytest.mark.compat
def test_each_setting_is_timed_and_compared(unet: Any) -> None:
    """The error equals that of the same merged run in ComfyUI's own sampler."""
    import comfy.sample

    asked = task(unet)
    unmerged, half, most = measure(unet, [0.5, 0.75], asked, runs=2)
    assert [t.ratio for t in (unmerged, half, most)] == [0.0, 0.5, 0.75]
    for each in (unmerged, half, most):
        assert len(each.seconds) == 2
        assert min(each.seconds) > 0
    assert unmerged.error == 0.0
    assert half.error < most.error
    assert unmerged.merged is None
    assert str(half.merged).startswith("On: 50 % of the tokens merged, 17 of 17 blocks, 3 of 3 steps")
    noise, conds = comfy.sample.prepare_noise(asked.latent, 0), (asked.positive, asked.positive)
    given = noise, 3, 1.0, "euler", "simple", *conds, torch.zeros_like(asked.latent)
    own, merged = (
        comfy.sample.sample(model, *given, disable_pbar=True, seed=0)
        for model in (unet, patching.apply_toma(unet, SETTINGS))
    )
    assert half.error == pytest.approx(float((merged - own).norm() / own.norm()), rel=1e-5)


def test_runs_take_turns_in_both_orders(unet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    original, ratios = benchmark._sample, []

    def spy(model: Any, asked: Any, tick: Any) -> Any:
        attachment = patching.attachment_of(model)
        ratios.append((asked.steps, attachment.settings.resolved().ratio if attachment else 0.0))
        return original(model, asked, tick)

    monkeypatch.setattr(benchmark, "_sample", spy)
    measure(unet, [0.5], task(unet, steps=4), runs=3)
    warm_up, runs = ratios[:2], ratios[2:]
    assert warm_up == [(3, 0.0), (3, 0.5)]
    assert runs == [(4, 0.0), (4, 0.5), (4, 0.5), (4, 0.0), (4, 0.0), (4, 0.5)]


def test_a_model_that_carries_toma_is_compared_with_itself_without(unet: Any, attach: Any) -> None:
    carrier = attach(unet, ratio=0.75)
    before = patching.attachment_of(carrier)
    unmerged, half = measure(carrier, [0.5], task(unet), runs=2)
    plain = measure(unet, [0.5], task(unet), runs=2)
    assert unmerged.merged is None
    assert half.error == pytest.approx(plain[1].error)
    assert patching.attachment_of(carrier) is before


def test_a_negative_is_evaluated_only_if_there_is_one(unet: Any, record: Any) -> None:
    calls = record(unet.model.diffusion_model)
    for guided in (False, True):
        calls.clear()
        measure(unet, [0.5], task(unet, guided=guided), runs=2)
        assert sum(call.args[0].shape[0] for call in calls) == (1 + guided) * 2 * (3 + 2 * 3)


def test_time_between_the_ends_counts_and_loading_does_not(unet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import comfy.sampler_helpers

    load, now = comfy.sampler_helpers.prepare_sampling, [0.0]

    def slow_load(*args: Any, **kwargs: Any) -> Any:
        now.append(now[-1] + 100.0)
        return load(*args, **kwargs)

    monkeypatch.setattr(comfy.sampler_helpers, "prepare_sampling", slow_load)
    monkeypatch.setattr(benchmark, "time", SimpleNamespace(perf_counter=lambda: now[-1]))
    with unet.model.diffusion_model.register_forward_pre_hook(lambda *_: now.append(now[-1] + 1.0)):
        seconds, _ = benchmark._sample(unet, task(unet, steps=3, size=8), lambda *_: None)
    assert (now[-1], seconds) == (103.0, 3.0)


def test_can_be_cancelled_between_steps(unet: Any) -> None:
    import comfy.model_management as management

    steps = list[int]()

    def cancel(*_: Any) -> None:
        steps.append(1)
        management.interrupt_current_processing(len(steps) == 3)

    hook = unet.model.diffusion_model.register_forward_pre_hook(cancel)
    with hook, pytest.raises(management.InterruptProcessingException):
        measure(unet, [0.5], task(unet, steps=50), runs=3)
    assert len(steps) == 3


def test_progress_goes_from_nothing_to_all(unet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the six runs is announced before it begins: both settings warm up once and run twice."""
    import comfy.utils

    seen, runs = list[tuple[int, int]](), list[tuple[int, int]]()
    monkeypatch.setattr(comfy.utils, "PROGRESS_BAR_HOOK", lambda *now, **_: seen.append(now[:2]))
    measure(unet, [0.5], task(unet, steps=3, size=8), 2, lambda *run: runs.append(run))
    assert runs == [(n, 6) for n in range(1, 7)]
    assert seen[0] == (1, 18)
    assert seen[-1] == (18, 18)


def test_a_model_that_cannot_be_merged_is_refused(stranger: Any) -> None:
    with pytest.raises(ValueError, match="cannot speed up this model"):
        measure(stranger, [0.5], task(stranger), runs=2)


def test_median_and_spread() -> None:
    assert timed(0.5, 3.0, 1.0, 2.0).median == 2.0
    assert timed(0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0).spread == pytest.approx((2.0, 5.0))


def test_recommends_the_least_error_of_about_the_same_speed() -> None:
    base, third, half, most = timed(0.0, 10, 10.1), timed(0.25, 8, 8.1), timed(0.5, 7, 7.1), timed(0.75, 6.8, 6.9)
    assert benchmark.recommended([base, third, half, most])[0] is half
    assert benchmark.recommended([base, third])[0] is third
    assert benchmark.recommended([base, third, most])[0] is most
    half.error = float("nan")
    assert benchmark.recommended([base, third, half, most])[0] is most


def test_recommends_the_least_error_that_is_fast_enough() -> None:
    base, third, half, most = timed(0.0, 10, 10.1), timed(0.25, 9, 9.1), timed(0.5, 8, 8.1), timed(0.75, 5, 5.1)
    third.error, half.error, most.error = 0.1, 0.2, 0.3
    assert benchmark.recommended([base, third, half, most])[1] is half, "a third is only 1.1x as fast"
    assert benchmark.recommended([base, third])[1] is None
    half.error = 0.4
    assert benchmark.recommended([base, third, half, most])[1] is most


def test_recommends_nothing_that_is_not_clearly_faster() -> None:
    noisy = [timed(0.0, 9.5, 10, 10.5), timed(0.5, 7, 9.9, 12)]
    assert tuple(benchmark.recommended(noisy)) == (None, None)
    assert benchmark.noise(noisy) == pytest.approx((11.16 - 8.16) / 9.9)
