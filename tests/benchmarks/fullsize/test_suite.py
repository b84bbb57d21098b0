"""Test the benchmarks on tiny models: variants, gates and result files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import bench, forward, micro, results, sample, sections, suite, variants
from benchmarks.bench import Row
from benchmarks.gpu import kernels
from scripts.comfyui import ROOT
from testbed import fullsize
from testbed.fullsize import Shape

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def loaded(pack: ModuleType) -> None:
    """Load the pack before a model is built."""


@pytest.fixture(scope="module")
def unet(loaded: None) -> Any:
    return fullsize.patcher("sdxl", torch.float32, CPU, tiny=True)


def test_every_variant_of_an_evaluation(unet: Any) -> None:
    ratio = 0.5
    merged = forward.toma_variants([ratio], forward.GRANULARITIES, variants.TINY)
    chosen = [*merged, *variants.unet_rivals(ratio), variants.stacked(variants.todo(), merged[-1])]
    rows = {r.variant: r for r in forward.measure(unet, Shape("sdxl", 128, 192, 2, tiny=True), chosen, 1, CPU)}
    assert bench.red(list(rows.values())) == []
    assert rows["unpatched"].error == 0
    for variant in merged:
        row = rows[variant.name]
        assert row.tokens == "96 -> 48, 24 -> 12"
        assert row.error is not None
        assert 0 < row.error < forward.FARTHEST
        assert "kernels: torch" in row.note
    assert "no-op" in rows["ComfyUI's ToMe node"].note
    for rival in (variants.tome(ratio), variants.todo()):
        assert rows[rival.name].error, rival.name


@pytest.mark.parametrize("model", ["sdxl", "flux", "wan", "ltx_av", "h3"])
def test_a_timed_step_runs_the_network_once_on_merged_tokens(model: str) -> None:
    shape = Shape(model, 256, 256, 1, tiny=True, frames=7 if model == "h3" else 3)
    patcher, inputs = fullsize.patcher(model, torch.float32, CPU, tiny=True), shape.inputs(CPU)
    runs = list[int]()
    handle = patcher.model.diffusion_model.register_forward_hook(lambda *_: runs.append(1))

    def flops(runner: forward.Runner) -> int:
        """Count the FLOPs of the network, without those of merging."""
        runs.clear()
        with FlopCounterMode(display=False) as counter:
            runner(inputs)
        return counter.get_total_flops() - counter.get_flop_counts()["Global"].get(torch.ops.aten.bmm, 0)

    try:
        unpatched = flops(forward.Runner(variants.UNPATCHED, patcher))
        for variant in (variants.preset("balanced", ratio=0.5, **variants.TINY), variants.toma("", **variants.TINY)):
            runner = forward.Runner(variant, patcher)
            flops(runner)
            assert len(runs) == (2 if runner.looks else 1)
            for _ in range(2):
                assert flops(runner) < 0.9 * unpatched, variant.name
                assert len(runs) == 1, variant.name
    finally:
        handle.remove()


def test_gates_see_what_is_wrong(unet: Any) -> None:
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
    assert "Nothing was merged" in rows["ToMA never"].gate
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


def test_sampling_runs_and_steps_that_caches_skip(unet: Any) -> None:
    shape = Shape("sdxl", 64, 64, 1, tiny=True)
    chosen = sample.usual_variants(0.5, **variants.TINY)
    rows = {r.variant: r for r in sample.measure(unet, shape, 6, 3.0, chosen, 1, CPU, shares=True)}
    assert bench.red(list(rows.values())) == []
    every = rows["ToMA every step, ratio 0.5"]
    assert "6/6 steps merged" in every.note
    assert every.tokens == "16 -> 8, 4 -> 2"
    assert set(every.shares) == {"plan", "merge", "unmerge"}
    assert all(0 < share < 1 for share in every.shares.values())
    assert rows["LazyCache"].speedup is not None


@pytest.mark.parametrize("grid", ["8x8x16", "9x7x24"])
def test_operations_alone(grid: str, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = micro.Limits(1e9, 1e9)
    what = micro.Grid.parse(grid), 0.5, 2
    rows = micro.measure(*what, torch.float32, CPU, limits, 1)
    assert {row.section for row in rows} == {f"micro: {part}" for part in ("selection", "weights", *_MERGES)}
    assert bench.red(rows) == []
    assert "| unmerge |" in micro.table(rows)
    core = micro.pack_module("toma_core.merge")
    merge = core.merge
    monkeypatch.setattr(core, "merge", lambda x, plan: merge(x, plan) * (1.1 if x.dtype is torch.bfloat16 else 1.0))
    rows = micro.measure(*what, torch.bfloat16, CPU, limits, 1)
    assert any("off from fp32" in line for line in bench.red(rows))


_MERGES = ("merge", "unmerge", "reuse")


def test_operands_are_more_than_a_cache_holds_and_alike() -> None:
    copies, windows, budget = micro.operands(micro.Grid(8, 8, 16), 0.5, 1, torch.float32, CPU)
    assert len({copy.x.data_ptr() for copy in copies}) == len(copies) > 2
    for copy in copies:
        assert micro.picks_problem(copy.plan.dest_slots, copy.x, windows, budget) == ""
        torch.testing.assert_close(copy.plan.merge_weights, copies[0].plan.merge_weights, rtol=1e-3, atol=1e-4)
    seen: list[int] = []
    call = micro._in_turn(lambda o: seen.append(o.x.data_ptr()), copies)
    for _ in range(2 * len(copies)):
        call()
    assert seen == [copy.x.data_ptr() for copy in copies] * 2


def test_picks_that_are_worse_are_seen() -> None:
    copies, windows, budget = micro.operands(micro.Grid(16, 16, 16), 0.5, 2, torch.float32, CPU)
    picks = copies[0].plan.dest_slots
    worst = torch.arange(picks.shape[-1]).expand(picks.shape)
    assert "of the best" in micro.picks_problem(worst, copies[0].x, windows, budget)


def test_a_kernel_that_is_wrong_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    module = micro.pack_module("toma_core.kernels.triton")
    merge = module.TritonKernels.merge
    case = kernels.Case("tiny", (8, 8), 16, 4, dtype=torch.float32)

    def gates() -> dict[str, str]:
        return {row.variant: row.gate for row in kernels.check(case, module.TritonKernels(), CPU)}

    assert set(gates().values()) == {""}
    monkeypatch.setattr(module.TritonKernels, "merge", lambda *args: 1.01 * merge(*args))
    wrong = gates()
    assert "off" in wrong.pop("merge")
    assert set(wrong.values()) == {""}


def measured(speedup: float | None, **more: Any) -> Row:
    run = "sample, 20 steps, cfg 7"
    return Row(run, "sdxl", "1024x1024", 1, "ToMA every step", speedup=speedup, **more)


def test_dry_run_of_the_script_for_gpus(tmp_path: Path) -> None:
    """Run one section of the GPU benchmarks on a CPU. tests/benchmarks/gpu/test_rehearsal.py runs all sections."""
    options = ["--gpu", "--dry-run", "--minutes", "60", "--out", str(tmp_path), "--only", "break-even"]
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
    assert {path.name for path in tmp_path.iterdir()} == {"results.json", "results.md"}
    stored = json.loads((tmp_path / "results.json").read_text())
    assert {row["section"] for row in stored["rows"]} == {"break-even"}
    assert "dry run" in stored["conditions"]["models"]


def test_a_section_that_fails_is_named(tmp_path: Path) -> None:
    def fails(made: sections.Suite) -> None:
        made.results.add(measured(1.5))
        raise RuntimeError("no such card")

    made = sections.Suite(True, CPU, torch.float32, time.time() + 60, results.Results(tmp_path, {"device": "a"}))
    suite.run_section(sections.Section("a", fails, 0), made)
    again = results.Results.read(tmp_path)
    assert again.wrong() == ["a: FAILED, RuntimeError: no such card"]
    assert again.rows == [measured(1.5)]
    assert "a: FAILED, RuntimeError: no such card" in (tmp_path / "results.md").read_text()


def test_a_section_is_stopped_at_its_limit_and_others_have_their_turn(tmp_path: Path) -> None:
    chosen = [sections.Section("sdxl-1024-cfg", sections.sdxl_rivals, 0, limit=0.1), sections.GPU[3]]
    assert chosen[1].name == "micro"
    before = results.Results(tmp_path, {"device": "a"})
    after = suite.go_through(chosen, before, time.time() + 300, ["--gpu", "--dry-run"], dry=True)
    assert after.wrong() == ["sdxl-1024-cfg: FAILED, stopped after 0 s"]
    assert {row.section.partition(":")[0] for row in after.rows} == {"micro"}


def test_sections_that_do_not_fit_are_left_out(tmp_path: Path) -> None:
    after = suite.go_through(
        [sections.GPU[-1]], results.Results(tmp_path, {"device": "a"}), time.time() + 30, [], False
    )
    assert [note.partition(",")[0] for note in after.notes] == ["compile: left out"]
    assert after.rows == after.wrong() == []


def test_extra_sections_take_no_time_from_what_comes_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "_run", lambda *_: "")
    chosen = [
        sections.Section("flux", sections.right, 20, 70),
        sections.Section("sizes", sections.right, 10, 9, extra=True),
    ]
    last = sections.Section("compile", sections.right, 60, 135)

    def left_out(*given: sections.Section) -> list[str]:
        found = results.Results(tmp_path, {"device": "a"})
        after = suite.go_through(list(given), found, time.time() + 100, [], False)
        return [note.partition(":")[0] for note in after.notes]

    assert left_out(*chosen, last) == ["sizes"]
    assert left_out(*chosen) == []


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    monkeypatch.setattr(sys, "argv", ["suite", "--gpu"])
    with pytest.raises(SystemExit, match="no CUDA device"):
        suite.main()
