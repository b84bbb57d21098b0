from __future__ import annotations

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
    """Flux needs a latent with more channels than the empty latent has. A video may have sound."""
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
    assert asked[0][:2] + asked[0][3:] == ([0.2, 0.4, 0.6], 7, 4)
    assert asked[0][2] is negative
    assert asked[1][0] == [0.6]
    assert asked[2][0] == [0.01], "no ratio is rounded away"


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
    """seconds: the runs at ratio 0.5. An empty list stands for `TIMINGS`."""
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
