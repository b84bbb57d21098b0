"""Test the benchmarks on tiny models: variants, gates and result files."""

import os
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import bench, forward, micro, results, sections, suite, variants
from benchmarks.bench import Row
from benchmarks.gpu import kernels
from testbed import fullsize
from testbed.fullsize import Shape
from tests.processes import wait_for_end

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("pack")  # loaded before a model is built


@pytest.fixture(scope="module")
def unet(pack: ModuleType) -> Any:
    return fullsize.patcher("sdxl", torch.float32, CPU, tiny=True)


@pytest.mark.parametrize("model", ["sdxl", "flux", "wan", "ltx_av", "h3"])
def test_a_timed_step_runs_the_network_once_on_merged_tokens(model: str) -> None:
    shape = Shape(model, 256, 256, 1, tiny=True, frames=7 if model == "h3" else 3)
    patcher, inputs = fullsize.patcher(model, torch.float32, CPU, tiny=True), shape.inputs(CPU)
    runs = list[int]()
    handle = patcher.model.diffusion_model.register_forward_hook(lambda *_: runs.append(1))

    def flops(runner: forward.Runner) -> int:
        """Count the FLOPs of the network without the FLOPs of merging."""
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


SMALL = Shape("sdxl", 64, 64, 1, tiny=True)


def test_gates_see_what_is_wrong(unet: Any) -> None:
    def broken(model: Any) -> Any:
        model = model.clone()
        model.set_model_output_block_patch(lambda h, hsp, options: (-3 * h, hsp))
        return model

    chosen = [
        variants.toma("never", min_tokens=4096),
        variants.Variant("changes", variants.todo().patch, unchanged=True),
        variants.Variant("broken", broken),
        variants.Variant("missing", variants.core_node("nodes_tomesd", "NoSuchNode")),
    ]
    rows = {r.variant: r for r in forward.measure(unet, SMALL, chosen, 1, CPU)}
    assert "Nothing was merged" in rows["ToMA never"].gate
    assert "must not" in rows["changes"].gate
    assert "off" in rows["broken"].gate
    assert "cannot be had here" in rows["missing"].gate
    assert all(rows[variant.name].speedup is None for variant in chosen)
    assert rows["unpatched"].gate == ""


def test_a_model_that_is_left_changed_is_seen(unet: Any) -> None:
    bias = unet.model.diffusion_model.out[2].bias.data
    before = bias.clone()
    try:
        runner = forward.Runner(variants.Variant("late", lambda model: model), unet)
        base = runner(SMALL.inputs(CPU))
        bias += 1
        assert forward.problems(runner, runner(SMALL.inputs(CPU)), base)
    finally:
        bias.copy_(before)


@pytest.mark.parametrize("grid", ["8x8x16", "9x7x24"])
def test_an_operation_that_is_wrong_is_seen(grid: str, monkeypatch: pytest.MonkeyPatch) -> None:
    core = micro.pack_module("toma_core.merge")
    merge = core.merge
    monkeypatch.setattr(core, "merge", lambda x, plan: merge(x, plan) * (1.1 if x.dtype is torch.bfloat16 else 1.0))
    for dtype in (torch.float32, torch.bfloat16):
        rows = micro.measure(micro.Grid.parse(grid), 0.5, 2, dtype, CPU, micro.Limits(1e9, 1e9), 1)
        wrong = bench.red(rows)
        assert any("off from fp32" in line for line in wrong) == bool(wrong) == (dtype is torch.bfloat16)


def test_operands_are_more_than_a_cache_holds_and_worse_picks_are_seen() -> None:
    copies, windows, budget = micro.operands(micro.Grid(16, 16, 16), 0.5, 2, torch.float32, CPU)
    assert len({copy.x.data_ptr() for copy in copies}) == len(copies) > 2
    for copy in copies:
        assert micro.picks_problem(copy.plan.dest_slots, copy.x, windows, budget) == ""
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


def test_a_section_that_fails_is_named(tmp_path: Path) -> None:
    row = Row("sample, 20 steps, cfg 7", "sdxl", "1024x1024", 1, "ToMA every step", speedup=1.5)

    def fails(made: sections.Suite) -> None:
        made.results.add(row)
        raise RuntimeError("no such card")

    made = sections.Suite(True, CPU, torch.float32, time.time() + 60, results.Results(tmp_path, {"device": "a"}))
    suite.run_section(sections.Section("a", fails, 0), made)
    again = results.Results.read(tmp_path)
    assert again.wrong() == ["a: FAILED, RuntimeError: no such card"]
    assert again.rows == [row]
    assert again.wrong()[0] in (tmp_path / "results.md").read_text()


def test_a_section_is_stopped_at_its_limit_and_others_have_their_turn(tmp_path: Path) -> None:
    operations = next(section for section in sections.GPU if section.name == "micro")
    chosen = [sections.Section("sdxl-1024-cfg", sections.sdxl_rivals, 0, limit=0.02), operations]
    before = results.Results(tmp_path, {"device": "a"})
    after = suite.go_through(chosen, before, time.time() + 3600, ["--gpu", "--dry-run"], dry=True)
    assert after.wrong() == ["sdxl-1024-cfg: FAILED, stopped after 0 s"]
    assert {row.section.partition(":")[0] for row in after.rows} == {"micro"}


def test_sections_that_do_not_fit_are_left_out_and_extra_ones_take_no_time_from_later_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite, "_run", lambda *_: "")
    monkeypatch.setattr(suite, "time", SimpleNamespace(time=lambda: 0.0))
    flux = sections.Section("flux", sections.right, 20, 70)
    sizes = sections.Section("sizes", sections.right, 10, 9, extra=True)
    last = sections.Section("compile", sections.right, 60, 135)

    def left_out(seconds: float, *given: sections.Section) -> list[str]:
        found = results.Results(tmp_path, {"device": "a"})
        after = suite.go_through(list(given), found, seconds, [], False)
        return [note.partition(":")[0] for note in after.notes]

    assert left_out(100, flux, sizes, last) == ["sizes"]
    assert left_out(100, flux, sizes) == []
    assert left_out(30, last) == ["compile"]


@pytest.mark.parametrize(("given", "message"), [(["--gpu"], "no CUDA device"), (["--only", "sdlx"], "sdxl")])
def test_commands_that_cannot_run_are_refused(
    given: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.is_available() and given == ["--gpu"]:
        pytest.skip("there is one")
    monkeypatch.setattr(sys, "argv", ["suite", *given, "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match=message):
        suite.main()
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(sys.platform != "linux", reason="looks in /proc")
def test_a_section_is_stopped_with_what_it_started(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    section = ["setsid", "sh", "-c", 'sleep 600 & echo $! > "$0"; wait', str(pid_file)]
    for limit in (1, 10, 100):  # a busy machine starts the section late
        assert "stopped" in suite._run(section, dict(os.environ), limit)
        if pid_file.is_file() and (pid := pid_file.read_text()):
            break
    wait_for_end(int(pid))
