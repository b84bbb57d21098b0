"""Test when a run uses Triton kernels or plain PyTorch, that the run reports why, and that both give equal results."""

import importlib
import logging
import sys
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.toma_core.kernels.cases import DEVICE, Case
from tests.toma_core.plans import plan_for
from toma_core import Evaluation, RunState, Schedule, StepMode, StepPlan, ToMAConfig, reduce, restore
from toma_core.kernels import dispatch
from toma_core.kernels.dispatch import Choice, Dispatch, NoTriton
from toma_core.merge import MergePlan, unmerge
from toma_core.reasons import Message

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


def test_unasked(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default, a run chooses once: kernels on a GPU, PyTorch on a CPU, also if Triton's interpreter is on."""
    asked, obstacle, where = list[Any](), dispatch._obstacle, evaluation()
    monkeypatch.setattr(dispatch, "_obstacle", lambda *args: asked.append(args) or obstacle(*args))
    for scope in "abc":
        assert (plan_of(CASE.tokens(), where, scope).kernels is None) == (DEVICE == "cpu")
    assert set(map(str, where.run.stats.kernels)) == {HERE}
    assert len(asked) == 1


def chosen(x: torch.Tensor, case: Case = CASE, propagates: bool = False) -> Choice:
    return Dispatch().choose(x, x, case.layout(), propagates=propagates)


def on_a_gpu(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a fake tensor of tokens on a GPU. The machine needs no GPU for this."""
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
    assert str(chosen(on_a_gpu()).reason).startswith("triton_failed: error=ModuleNotFoundError")


class TestFirstUse:
    """Test what happens when a process tries a kernel for the first time."""

    @pytest.fixture(autouse=True)
    def seems_fine(self, kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(dispatch, "_obstacle", lambda *args: None)
        monkeypatch.setattr(dispatch, "_trials", {})

    @pytest.mark.parametrize(
        ("factor", "reason"),
        [
            (1.0, None),
            (1.1, NoTriton.WRONG_RESULTS()),
            (None, NoTriton.FAILED(error="RuntimeError: Failed to find C compiler.")),
        ],
    )
    def test_a_process_tries_once_and_says_why_it_falls_back(
        self,
        factor: float | None,
        reason: Message | None,
        kernels: Any,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        merge, calls = type(kernels).merge, list[Any]()

        def merged(*args: Any) -> torch.Tensor:
            calls.append(args)
            if factor is None:
                raise RuntimeError("Failed to find C compiler.\nPlease set CC.")
            return factor * merge(*args)

        monkeypatch.setattr(type(kernels), "merge", merged)
        with caplog.at_level(logging.INFO):
            for _ in range(2):
                where = evaluation()
                plan_of(CASE.tokens(), where)
                assert where.run.stats.kernels == {Choice(None if reason else kernels, reason).message}
        assert len(calls) == (1 if reason else 2), "a trial ends at the first fault, or launches twice"
        begins, *said = [record.getMessage() for record in caplog.records]
        assert "making its GPU kernels" in begins
        assert said == ([f"ToMA: plain PyTorch instead of Triton kernels. {reason}"] if reason else [])
        if factor is None:
            with pytest.raises(RuntimeError, match="C compiler"):
                reduce(CASE.tokens(), plan_of(CASE.tokens(), on(kernels)))

    @pytest.mark.parametrize("fails", [True, False, None])
    def test_packing_falls_back(self, fails: bool | None, kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """If the kernel fails to run or gives wrong results, PyTorch quantises."""
        x, used, own = torch.randn(1, 70, 64).to(DEVICE), list[int](), type(kernels).quantize

        def packing(self: Any, x: torch.Tensor) -> Any:
            if fails:
                raise RuntimeError("no")
            used.append(1)
            return own(x if fails is None else 2 * x)

        monkeypatch.setattr(type(kernels), "quantize", packing)
        choosing = Dispatch()
        for _ in range(2):
            packed = choosing.quantize(x)
            torch.testing.assert_close(choosing.dequantize(packed), x, rtol=0, atol=0.3)
        assert len(used) == (0 if fails else 1 if fails is False else 3)

    def test_no_memory_is_no_reason_to_fall_back(self, kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*args: Any) -> None:
            raise torch.OutOfMemoryError

        monkeypatch.setattr(type(kernels), "merge", fail)
        with pytest.raises(torch.OutOfMemoryError):
            plan_of(CASE.tokens(), evaluation())

    @pytest.mark.parametrize(
        "case",
        [Case(8, 8, 4, 0.5, 32), Case(9, 7, 4, 0.5, 33, torch.float16), Case(16, 16, 8, 0.5, 128, torch.bfloat16)],
    )
    @pytest.mark.parametrize("wrong", [False, True])
    def test_propagation_is_tried_where_there_is_a_kv_cache(
        self, case: Case, wrong: bool, kernels: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made, unmerge = list[bool](), type(kernels).unmerge

        def propagated(self: Any, *args: Any) -> torch.Tensor:
            if len(args) < 9:
                return unmerge(self, *args)
            made.append(args[8] is not None)
            return (1.1 if wrong else 1) * unmerge(self, *args)

        monkeypatch.setattr(type(kernels), "unmerge", propagated)
        for _ in range(2):
            assert (chosen(case.tokens(), case, propagates=True).kernels is None) == wrong
        tried = [False, True] if case.channels % 2 == 0 else [False]
        assert made == ([False] if wrong else 2 * tried)
        assert chosen(case.tokens(), case).kernels is not None


def test_a_run_on_kernels_equals_one_without(kernels: Any) -> None:
    """The second step makes new weights for the same destinations."""
    fast, plain = (on(used, sharpness=30.0) for used in (kernels, None))
    for seed, weighing in ((0, 0), (1, 1)):
        x = CASE.tokens(seed)
        decision = StepPlan(0, StepMode.MERGED, 0.5, 0, weighing)
        ours, theirs = (plan_of(x, Evaluation(where.run, decision)) for where in (fast, plain))
        assert ours.kernels is not None
        assert theirs.kernels is None
        assert torch.equal(ours.dest_slots, theirs.dest_slots)
        reduced = reduce(x, ours)
        torch.testing.assert_close(reduced, reduce(x, theirs), rtol=1e-4, atol=1e-4)
        restored = (restore(reduced.sin(), reduced, x, plan) for plan in (ours, theirs))
        torch.testing.assert_close(*restored, rtol=1e-4, atol=1e-4)
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
