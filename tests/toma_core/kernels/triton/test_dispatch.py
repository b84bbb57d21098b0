"""Test when a run uses Triton kernels, and when it uses plain PyTorch. The reason must be reported, and both must give
equal results."""

from __future__ import annotations

import importlib
import logging
import sys
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import toma_core.kernels.dispatch
from tests.toma_core.kernels.cases import DEVICE, Case
from tests.toma_core.plans import plan_for
from toma_core import Evaluation, Facts, RunState, Schedule, StepMode, StepPlan, ToMAConfig, decide, reduce, restore
from toma_core.kernels.dispatch import Choice, Dispatch, KernelName, NoTriton
from toma_core.merge import MergePlan, unmerge

CASE = Case(6, 10, 4, 0.5, 24)
GRID = (CASE.height, CASE.width)
HERE = "kernel: name=triton" if DEVICE == "cuda" else "kernel_because: name=torch, reason=no_cuda"


def evaluation(given: Choice | None = None, **settings: Any) -> Evaluation:
    config = ToMAConfig(window_size=CASE.size, min_tokens=4, **settings)
    return Evaluation(RunState(Schedule(config), dispatch=Dispatch(given)), StepPlan(0, StepMode.MERGED, 0.5, 0, 0))


def on(kernels: Any, **settings: Any) -> Evaluation:
    """Return an evaluation that uses `kernels` on any device, or plain PyTorch if `kernels` is None."""
    return evaluation(Choice(kernels, None if kernels else NoTriton.NO_CUDA()), **settings)


def plan_of(x: torch.Tensor, where: Evaluation, scope: str = "a") -> MergePlan:
    plan = plan_for(x, GRID, scope, where)
    assert plan is not None
    return plan


def test_unasked(kernels: Any) -> None:
    """By default, a run uses kernels on a GPU and PyTorch on a CPU, even if Triton's interpreter is available."""
    where = evaluation()
    plan = plan_of(CASE.tokens(), where)
    assert (plan.kernels is None) == (DEVICE == "cpu")
    assert set(map(str, where.run.stats.kernels)) == {HERE}


def test_chosen_once_a_run(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    obstacle = toma_core.kernels.dispatch._obstacle
    monkeypatch.setattr(toma_core.kernels.dispatch, "_obstacle", lambda *a, **k: asked.append(a) or obstacle(*a, **k))
    where = evaluation()
    for scope in "abc":
        plan_of(CASE.tokens(), where, scope)
    assert len(asked) == 1


def chosen(x: torch.Tensor, case: Case = CASE, propagates: bool = False) -> Choice:
    return Dispatch().choose(x, x, case.layout(), propagates=propagates)


def on_a_gpu(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a fake tensor of tokens on a GPU, which need not exist."""
    with FakeTensorMode():
        return torch.empty(1, 60, 24, dtype=dtype, device="cuda")


def test_what_is_found_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(on_a_gpu(torch.float64)).reason == NoTriton.DTYPE(dtype="float64")
    if DEVICE == "cpu":
        assert chosen(on_a_gpu()).reason == NoTriton.FAILED(error="TRITON_INTERPRET=1")
        triton = importlib.import_module("toma_core.kernels.triton")
        monkeypatch.setattr(triton, "INTERPRETED", False)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
        assert chosen(on_a_gpu()).reason == NoTriton.OLD_GPU(least="8.0")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
        assert chosen(on_a_gpu(), Case(17, 17, 17, 0.5, 8)).reason == NoTriton.LARGE_WINDOWS(tokens=289, most=128)
    monkeypatch.setitem(sys.modules, "toma_core.kernels.triton", None)
    reason = chosen(on_a_gpu()).reason
    assert str(reason).startswith("triton_failed: error=ModuleNotFoundError")


class TestFirstUse:
    """Test what happens when a process tries a kernel for the first time."""

    @pytest.fixture(autouse=True)
    def seems_fine(self, kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(toma_core.kernels.dispatch, "_obstacle", lambda *args, **kwargs: None)
        monkeypatch.setattr(toma_core.kernels.dispatch, "_trials", {})

    def test_falls_back_once_and_says_why(
        self, kernels: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        calls = []

        def fail(*args: Any) -> None:
            calls.append(args)
            raise RuntimeError("Failed to find C compiler.\nPlease set CC.")

        monkeypatch.setattr(type(kernels), "merge", fail)
        reason = NoTriton.FAILED(error="RuntimeError: Failed to find C compiler.")
        for _ in range(2):
            with caplog.at_level(logging.WARNING):
                where = evaluation()
                plan_of(CASE.tokens(), where)
            assert where.run.stats.kernels == {Choice(None, reason).message}
        assert len(calls) == 1
        assert [record.getMessage() for record in caplog.records] == [
            f"ToMA: plain PyTorch instead of Triton kernels. {reason}"
        ]
        with pytest.raises(RuntimeError, match="C compiler"):
            reduce(CASE.tokens(), plan_of(CASE.tokens(), on(kernels)))

    def test_falls_back_where_results_are_off(self, kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        merge = type(kernels).merge
        monkeypatch.setattr(type(kernels), "merge", lambda *args: 1.1 * merge(*args))
        where = evaluation()
        plan_of(CASE.tokens(), where)
        assert where.run.stats.kernels == {Choice(None, NoTriton.WRONG_RESULTS()).message}

    @pytest.mark.parametrize("fails", [True, False, None])
    def test_packing_falls_back(self, fails: bool | None, kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """If the kernel fails to run or gives wrong results, PyTorch quantises."""
        x, used = torch.randn(1, 70, 64).to(DEVICE), []
        own = type(kernels).quantize

        def packing(self: Any, x: torch.Tensor) -> Any:
            if fails:
                raise RuntimeError("no")
            used.append(1)
            return own(x if fails is None else 2 * x)

        monkeypatch.setattr(type(kernels), "quantize", packing)
        dispatch = Dispatch()
        for _ in range(2):
            packed = dispatch.quantize(x)
            torch.testing.assert_close(dispatch.dequantize(packed), x, rtol=0, atol=0.3)
        assert len(used) == (0 if fails else 1 if fails is False else 3)

    def test_no_memory_is_no_reason_to_fall_back(self, kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*args: Any) -> None:
            raise torch.OutOfMemoryError

        monkeypatch.setattr(type(kernels), "merge", fail)
        with pytest.raises(torch.OutOfMemoryError):
            plan_of(CASE.tokens(), evaluation())

    def test_all_that_a_run_will_need_is_tried_at_its_first_plan(
        self, kernels: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A second run in the same process tries no kernel again. One log line announces the trials."""
        made = []
        for name in ("merge", "unmerge"):
            method = getattr(type(kernels), name)
            monkeypatch.setattr(
                type(kernels), name, lambda *a, name=name, method=method: made.append(name) or method(*a)
            )
        config = ToMAConfig(
            ratio=0.5, window_size=4, min_tokens=4, full_step_interval=4, selection_interval=4, weight_interval=2,
        )  # fmt: skip
        schedule = Schedule(config, tuple(float(8 - step) for step in range(8)))
        x = Case(8, 8, 4, 0.5, 24).tokens()
        for turn in range(2):
            run, tried = RunState(schedule), []
            for sigma in schedule.sigmas:
                made.clear()
                with caplog.at_level(logging.INFO):
                    plan_for(x, (8, 8), "a", Evaluation(run, decide(run, Facts(sigma))))
                tried.append(sorted(set(made)))
            assert tried == [["merge", "unmerge"] if turn == 0 else [], *[[]] * 7]
            assert run.stats.kernels == {KernelName.KERNEL(name="triton")}
        assert len(toma_core.kernels.dispatch._trials) == 2
        said = [record.getMessage() for record in caplog.records if "making its GPU kernels" in record.getMessage()]
        assert len(said) == 1

    @pytest.mark.parametrize(
        "case",
        [Case(8, 8, 4, 0.5, 32), Case(9, 7, 4, 0.5, 33, torch.float16), Case(16, 16, 8, 0.5, 128, torch.bfloat16)],
    )
    @pytest.mark.parametrize("wrong", [False, True])
    def test_propagation_is_tried_where_there_is_a_kv_cache(
        self, case: Case, wrong: bool, kernels: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made, unmerge = [], type(kernels).unmerge

        def propagated(self: Any, *args: Any) -> torch.Tensor:
            if len(args) < 9:
                return unmerge(self, *args)
            made.append(args[8] is not None)
            return (1.1 if wrong else 1) * unmerge(self, *args)

        monkeypatch.setattr(type(kernels), "unmerge", propagated)
        for _ in range(2):
            assert (chosen(case.tokens(), case, propagates=True).kernels is None) == wrong
        assert made == ([False, True, True] if case.channels % 2 == 0 else [False, False])
        assert chosen(case.tokens(), case).kernels is not None


def test_a_run_on_kernels_equals_one_without(kernels: Any) -> None:
    """The second step makes new weights for the same destinations."""
    fast, plain = (on(used, sharpness=30.0) for used in (kernels, None))
    for seed, weighing in ((0, 0), (1, 1)):
        x = CASE.tokens(seed)
        decision = StepPlan(0, StepMode.MERGED, 0.5, 0, weighing)
        results = []
        for where in (fast, plain):
            plan = plan_of(x, Evaluation(where.run, decision))
            reduced = reduce(x, plan)
            results.append((plan, reduced, restore(reduced.sin(), reduced, x, plan)))
        (a, b) = results
        assert a[0].kernels is not None
        assert b[0].kernels is None
        assert torch.equal(a[0].dest_slots, b[0].dest_slots)
        torch.testing.assert_close(a[1:], b[1:], rtol=1e-4, atol=1e-4)
    assert fast.run.stats.selections == plain.run.stats.selections == 1
    assert fast.run.stats.weighings == plain.run.stats.weighings == 2


def test_a_batch_of_several_parts_stays_on_kernels(kernels: Any) -> None:
    where = Evaluation(on(kernels).run, StepPlan(0, StepMode.MERGED, 0.5, 0, 0), ("left", "right", "left"))
    x = torch.cat([CASE.tokens(seed) for seed in range(3)])
    plan = plan_of(x, where)
    assert plan.kernels is not None
    plain = MergePlan(plan.windows, plan.budget, plan.dest_slots, plan.merge_weights, plan.unmerge_weights)
    torch.testing.assert_close(reduce(x, plan), reduce(x, plain))


def test_gradients_go_through_plain_pytorch(kernels: Any) -> None:
    plan = plan_of(CASE.tokens(), on(kernels))
    y = torch.randn(1, plan.num_destinations, CASE.channels, device=DEVICE, requires_grad=True)
    unmerge(y, plan).sum().backward()
    expected = plan.unmerge_weights.sum(2)
    if plan.budget.valid is not None:
        expected = expected[:, plan.budget.valid]
    assert y.grad is not None
    torch.testing.assert_close(y.grad[..., 0].flatten(), expected.flatten())


def test_other_dtypes_than_the_plans_go_through_plain_pytorch(kernels: Any) -> None:
    """For fp16 tokens and an fp32 plan, PyTorch raises its error for mixed dtypes, as it does without kernels."""
    plan = plan_of(CASE.tokens(), on(kernels))
    with pytest.raises(RuntimeError, match="same dtype"):
        reduce(CASE.tokens().half(), plan)
