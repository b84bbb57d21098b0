"""The benchmarks run, on tiny models: every variant, the gates, the goals and the files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmarks import bench, forward, fullsize, micro, sample, suite, variants
from benchmarks.bench import Row
from benchmarks.fullsize import Shape
from benchmarks.goals import GOALS
from scripts.comfyui import ROOT

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def loaded(pack: ModuleType) -> None:
    """Models and hooks come from ComfyUI and the pack."""


@pytest.fixture(scope="module")
def unet(loaded: None) -> Any:
    return fullsize.patcher("sdxl", torch.float32, CPU, tiny=True)


def test_every_variant_of_an_evaluation(unet: Any) -> None:
    ratio = 0.5
    merged = forward.toma_variants([ratio], forward.GRANULARITIES, variants.TINY)
    chosen = [*merged, *variants.unet_rivals(ratio), variants.stacked(variants.todo(), merged[-1])]
    rows = {r.variant: r for r in forward.measure(unet, Shape("sdxl", 128, 192, 2, tiny=True), chosen, 1, CPU)}
    assert bench.red(list(rows.values())) == []
    assert rows["unpatched"].distance == 0
    for variant in merged:
        row = rows[variant.name]
        assert row.tokens == "96 -> 48, 24 -> 12"
        assert row.distance is not None
        assert 0 < row.distance < forward.FARTHEST
        assert row.planning is not None
        assert row.planning > 0
        assert "kernels: torch" in row.note
    assert "no-op" in rows["ComfyUI's ToMe node"].note
    for rival in (variants.tome(ratio), variants.todo()):
        assert rows[rival.name].distance, rival.name


def test_gates_see_what_is_wrong(unet: Any) -> None:
    """Too few tokens to merge, a rival that must change nothing and does, an output that is far off."""
    shape = Shape("sdxl", 64, 64, 1, tiny=True)

    def broken(model: Any) -> Any:
        model = model.clone()
        model.set_model_unet_function_wrapper(lambda apply, args: apply(args["input"], args["timestep"], **args["c"]))
        model.set_model_output_block_patch(lambda h, hsp, options: (-3 * h, hsp))
        return model

    chosen = [
        variants.toma("never", min_tokens=4096),
        variants.Variant("changes", variants.todo().patch, unchanged=True),
        variants.Variant("broken", broken),
        variants.Variant("missing", variants.core_node("nodes_tomesd", "NoSuchNode")),
    ]
    rows = {r.variant: r for r in forward.measure(unet, shape, chosen, 1, CPU)}
    assert "nothing was merged" in rows["ToMA never"].gate
    assert "must not" in rows["changes"].gate
    assert "off" in rows["broken"].gate
    assert "cannot be had here" in rows["missing"].gate
    assert all(rows[variant.name].speedup is None for variant in chosen)
    assert rows["unpatched"].gate == ""


def test_a_model_that_is_left_changed_is_seen(unet: Any) -> None:
    network = unet.model.diffusion_model
    before = network.out[2].bias.data.clone()

    def leaves_traces(model: Any) -> Any:
        network.out[2].bias.data += 1
        return model

    try:
        rows = forward.measure(
            unet, Shape("sdxl", 64, 64, 1, tiny=True), [variants.toma("stack", **variants.TINY)], 1, CPU
        )
        assert bench.red(rows) == []
        late = variants.Variant("late", lambda model: model)
        runner = forward.Runner(late, unet)
        shape = Shape("sdxl", 64, 64, 1, tiny=True)
        base = runner(shape.inputs(CPU))
        leaves_traces(unet)
        assert forward.problems(runner, runner(shape.inputs(CPU)), base)
    finally:
        network.out[2].bias.data.copy_(before)


def test_whole_runs_and_what_caches_skip(unet: Any) -> None:
    shape = Shape("sdxl", 64, 64, 1, tiny=True)
    chosen = sample.usual_variants(0.5, **variants.TINY)
    rows = {r.variant: r for r in sample.measure(unet, shape, 6, 3.0, chosen, 1, CPU, shares=True)}
    assert bench.red(list(rows.values())) == []
    every = rows["ToMA every step, ratio 0.5"]
    assert "6/6 steps merged" in every.note
    assert every.tokens == "16 -> 8, 4 -> 2"
    assert set(every.shares) == {"plan", "merge", "unmerge"}
    assert all(0 < share < 1 for share in every.shares.values())
    assert " of 6 evaluations" in rows["LazyCache"].note
    assert rows["LazyCache"].speedup is not None


@pytest.mark.parametrize("grid", ["8x8x16", "9x7x24"])
def test_operations_alone(grid: str, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = micro.Limits(1e9, 1e9)
    made = micro.jobs(micro.Grid.parse(grid), 0.5, 2, torch.float32, CPU, None)
    assert {job.part for job in made} == {"selection", "weights", "merge", "unmerge"}
    rows = micro.measure(micro.Grid.parse(grid), 0.5, 2, torch.float32, CPU, limits, 1)
    assert bench.red(rows) == []
    assert "| unmerge |" in micro.table(rows)
    core = micro.pack_module("toma_core.merge")
    merge = core.merge
    monkeypatch.setattr(core, "merge", lambda x, plan: merge(x, plan) * (1.1 if x.dtype is torch.bfloat16 else 1.0))
    rows = micro.measure(micro.Grid.parse(grid), 0.5, 2, torch.bfloat16, CPU, limits, 1)
    assert any("off from fp32" in line for line in bench.red(rows))


def measured(speedup: float | None, **more: Any) -> Row:
    run = "sample, 20 steps, cfg 7"
    return Row(run, "sdxl", "1024x1024", 1, "ToMA every step", speedup=speedup, **more)


@pytest.mark.parametrize(
    ("row", "result"),
    [
        (measured(1.5), ("1.5x", False)),
        (measured(1.4), ("1.4x", True)),
        (measured(None, gate="broken"), (bench.REFUSED, False)),
        (None, ("not measured", False)),
    ],
)
def test_goals_are_met_missed_or_not_measured(row: Row | None, result: tuple[str, bool]) -> None:
    goal = GOALS[0]
    wanted, *judged = goal.judged([row] if row else [])
    assert wanted == ">= 1.45x"
    assert tuple(judged) == result


def test_goals_of_shares_and_of_selection() -> None:
    by_name = {goal.name: goal for goal in GOALS}
    row = measured(1.5, shares={"plan": 0.005, "merge": 0.02, "unmerge": 0.02})
    assert by_name["SDXL 1024, CFG: plans, % of a run"].judged([row]) == ("<= 1", "0.5", False)
    assert by_name["SDXL 1024, CFG: merge and unmerge, % of a run"].judged([row]) == ("<= 3", "4", True)
    fast = Row("micro: selection and weights", "64x64x640", "ratio 0.5", 1, "Triton, replayed", p50=9e-6)
    goal = by_name["selection and weights of 64x64x640, us"]
    assert goal.judged([fast]) == ("<= 20", "9", False)


@pytest.mark.parametrize("only", [["tests", "micro", "sdxl-1024-cfg", "attention", "break-even"]], ids="+".join)
def test_dry_run_of_the_script_for_gpus(only: list[str], tmp_path: Path) -> None:
    """The whole way on a CPU: sections, goals, table, and few small files in one folder."""
    options = ["--gpu", "--dry-run", "--minutes", "60", "--out", str(tmp_path), "--only", *only]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.suite", *options],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    files = sorted(path.name for path in tmp_path.iterdir())
    assert set(files) >= {"results.csv", "results.json", "results.md", "results.png", "tests.log"}
    assert len(files) <= 8
    stored = json.loads((tmp_path / "results.json").read_text())
    assert {row["section"].partition(":")[0].partition(",")[0] for row in stored["rows"]} == {
        "micro",
        "sample",
        "attention",
        "break-even",
    }
    by_attention = {(row["model"], row["variant"]) for row in stored["rows"] if row["section"] == "attention"}
    for model in ("sdxl", "flux"):
        assert {(model, "pytorch attention"), (model, "pytorch attention + ToMA stack")} <= by_attention
    assert "dry run" in stored["conditions"]["models"]
    page = (tmp_path / "results.md").read_text()
    assert "| SDXL 1024, CFG | >= 1.45x | not measured |" in page, "tiny pictures reach no goal"
    assert "passed" in page


def test_a_section_that_fails_is_named_and_others_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(_: Any) -> None:
        raise RuntimeError("no such card")

    def works(made: suite.Suite) -> None:
        made.notes.append("it went on")

    monkeypatch.setattr(suite, "GPU", (("a", 0, fails), ("b", 0, works)))
    monkeypatch.setattr(sys, "argv", ["suite", "--gpu", "--dry-run", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="no such card"):
        suite.main()
    page = (tmp_path / "results.md").read_text()
    assert "a: FAILED, RuntimeError: no such card" in page
    assert "it went on" in page


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    monkeypatch.setattr(sys, "argv", ["suite", "--gpu"])
    with pytest.raises(SystemExit, match="no CUDA device"):
        suite.main()
