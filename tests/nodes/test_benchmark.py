"""The benchmark node: what it hands out and what it says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import models
from scripts.comfy_pack import pack_module

benchmark = pack_module("nodes.benchmark")
Node = benchmark.ToMABenchmark
Timing = pack_module("nodes.timing").Timing
TIMINGS = [
    Timing(0.0, [0.100, 0.101, 0.102]),
    Timing(0.25, [0.080, 0.081, 0.082], 0.02, "4096 -> 3072 tokens"),
    Timing(0.5, [0.060, 0.061, 0.062], 0.05, "4096 -> 2048 tokens"),
]


@pytest.fixture
def run(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """run(model, **inputs): plot, table, recommendation and the node's whole answer; previews in a temporary folder."""
    import folder_paths

    monkeypatch.setattr(folder_paths, "temp_directory", str(tmp_path))

    def call(model: Any, **inputs: Any) -> tuple[torch.Tensor, str, float, Any]:
        latent = {"samples": torch.zeros(1, 4, 32, 32)}
        given = {"ratio": 0.5, "preset": "balanced", "sweep": False, "steps": 4, "runs": 2, **inputs}
        answer = Node.execute(model, models.conditioning(model), latent, **given)
        return (*answer.args, answer)

    return call


@pytest.mark.compat
def test_measures_a_real_model_and_says_where(unet: Any, run: Any) -> None:
    plot, table, best, answer = run(unet)
    assert plot.shape[0] == 1
    assert plot.shape[-1] == 3
    assert 0 <= plot.min() <= plot.max() <= 1
    assert best in (0.0, 0.5)
    lines = table.splitlines()
    assert lines[0].startswith("| setting ")
    assert len({len(line) for line in lines[:4]}) == 1, "the columns are aligned"
    assert lines[2].startswith("| without ToMA |")
    assert lines[3].startswith("| ratio 0.5 ")
    assert "latent 32 x 32, batch 1, without negative; 2 runs of 4 steps each" in table
    assert f"float32, attention pytorch, torch {torch.__version__}, ComfyUI 0." in table
    assert "At ratio 0.5: 256 -> 128 tokens in 2/17 blocks, 4/4 steps" in table
    assert answer.ui["text"][0] == table
    short = answer.ui["toma"][0]["text"].splitlines()
    assert short[0].startswith("Recommended")
    assert short[1].startswith("without ToMA: ")
    assert short[2].startswith("ratio 0.5: ")
    assert short[-1] in table
    assert len(answer.ui["images"]) == 1


def test_an_empty_latent_becomes_one_of_the_model(flux: Any, run: Any) -> None:
    _, table, _, _ = run(flux)
    assert "latent 32 x 32" in table


def test_sweep_measures_thirds_of_the_ratio(unet: Any, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def measure(model: Any, settings: Any, ratios: Any, task: Any, runs: int) -> Any:
        asked.append((ratios, task.steps, task.negative, runs, settings.overrides))
        return TIMINGS

    monkeypatch.setattr(benchmark.timing, "measure", measure)
    negative = models.conditioning(unet, seed=2)
    run(unet, sweep=True, ratio=0.6, negative=negative, steps=7, runs=4)
    run(unet, sweep=False, ratio=0.6)
    run(unet, sweep=True, ratio=0.01)
    assert asked[0][:2] + asked[0][3:] == ([0.2, 0.4, 0.6], 7, 4, {"ratio": 0.6})
    assert asked[0][2] is negative
    assert asked[1][0] == [0.6]
    assert asked[2][0] == [0.01], "no ratio is rounded away"


def test_the_recommendation_goes_with_its_reason(unet: Any, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark.timing, "measure", lambda *_: TIMINGS)
    _, table, best, _ = run(unet)
    assert best == 0.5
    assert "Recommended ratio: 0.5 (1.66x)." in table
    assert "| 1.25x | 0.020  |" in table
    monkeypatch.setattr(benchmark.timing, "measure", lambda *_: [*TIMINGS[:1], Timing(0.5, [0.2, 0.2], 0.1, "m")])
    _, table, best, _ = run(unet)
    assert best == 0.0
    assert "leave ToMA off here" in table


def test_ratio_zero_has_nothing_to_measure(unet: Any, run: Any) -> None:
    message = "ToMA: ratio is 0, so there is nothing to measure. Allowed: a number above 0, up to 0.95. Try 0.5."
    assert Node.validate_inputs(ratio=0.0) == message
    with pytest.raises(ValueError, match="nothing to measure"):
        run(unet, ratio=0.0)
    assert Node.validate_inputs(ratio=0.5) is True
    assert "Allowed: a number from 0 to 0.95" in Node.validate_inputs(ratio=2.0)


def test_another_nodes_attention_is_named(unet: Any) -> None:
    model = unet.clone()
    model.model_options["transformer_options"]["optimized_attention_override"] = lambda f, *a, **k: f(*a, **k)
    assert f"attention pytorch, overridden by {__name__}" in benchmark._machine(model)
