"""Test the kernels that merge, unmerge and restore tokens, against the plain PyTorch of `toma_core.merge` in fp32."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.toma_core.kernels.cases import BRAIN, DEVICE, FULL, HALF, Case, each, views
from toma_core.merge import MergePlan, merge, stacked, unmerge, unmerge_residual
from toma_core.windows import Budget

CASES = (
    Case(5, 7, 4, 0.5, 40, FULL),
    Case(5, 7, 4, 0.25, 77, HALF, batch=3),
    Case(13, 19, 8, 0.5, 40, HALF, batch=3),
    Case(13, 19, 8, 0.75, 77, BRAIN),
    Case(13, 19, 8, 0.9, 64, FULL),
    Case(16, 24, 8, 0.25, 640, HALF),
    # In the next two cases a window has more than 64 tokens and destinations, so a kernel needs several steps for a
    # sum.
    Case(13, 19, 16, 0.25, 40, BRAIN),
    Case(20, 17, 32, 0.5, 77, FULL, batch=3),
    Case(1, 3, 2, 0.5, 1, FULL),
    Case(52, 76, 8, 0.5, 40, HALF),
    Case(13, 19, 8, 0.5, 40, FULL, batch=3, adaptive=True),
    Case(16, 30, 16, 0.75, 40, HALF, batch=2, adaptive=True),
)
FULL_SIZE = (
    Case(64, 64, 8, 0.5, 640, HALF, batch=2),
    Case(104, 152, 8, 0.25, 640, BRAIN, batch=4),
    Case(64, 64, 16, 0.5, 3072, BRAIN),
    Case(52, 76, 16, 0.75, 1280, FULL, batch=3),
    Case(256, 256, 4, 0.5, 640, HALF, batch=4),
    Case(64, 64, 8, 0.5, 3072, BRAIN, batch=2, adaptive=True),
)


def random_plan(case: Case) -> MergePlan:
    """Return a plan with random weights. Weights of padding and of unused slots are zero."""
    windows, budget = case.layout()
    generator = torch.Generator().manual_seed(7)
    shape = (case.batch, len(windows.counts), budget.slots, windows.slots)
    A = torch.rand(shape, generator=generator).to(DEVICE)
    if windows.valid is not None:
        A = A * windows.valid[:, None, :]
    if budget.valid is not None:
        A = A * budget.valid[..., None]
    M = A / A.sum(-1, keepdim=True).clamp_min(1e-9)
    back = (A / A.sum(-2, keepdim=True).clamp_min(1e-9)).transpose(2, 3).contiguous()
    dest_slots = torch.zeros(shape[:3], dtype=torch.int64, device=DEVICE)
    return MergePlan(windows, budget, dest_slots, M.to(case.dtype), back.to(case.dtype))


def in_dtype(plan: MergePlan, dtype: torch.dtype) -> MergePlan:
    M, back = plan.merge_weights.to(dtype), plan.unmerge_weights.to(dtype)
    return replace(plan, merge_weights=M, unmerge_weights=back, kernels=None)


def check(actual: Tensor, expected: Tensor, dtype: torch.dtype, roundings: int = 1) -> None:
    """Check that `actual` is off by at most `roundings` rounding errors of the dtype. Kernels compute sums in fp32."""
    assert actual.dtype == dtype
    assert actual.is_contiguous()
    atol = roundings * {FULL: 2e-6, HALF: 1e-3, BRAIN: 8e-3}[dtype]
    torch.testing.assert_close(actual.float(), expected, rtol=atol, atol=atol)


@each(*CASES, full_size=FULL_SIZE)
def test_merge_unmerge_and_restore(case: Case, kernels: Any) -> None:
    plan, x = random_plan(case), case.tokens()
    exact, back = in_dtype(plan, FULL), (plan.unmerge_weights, plan.windows, plan.budget)
    out, reduced = case.normal(plan.num_destinations, 1), case.normal(plan.num_destinations, 2)
    copies = [t.clone() for t in (out, reduced, x)]
    merged = kernels.merge(x, plan.merge_weights, plan.windows, plan.budget)
    check(merged, merge(x.float(), exact), case.dtype)
    check(kernels.unmerge(out, *back), unmerge(out.float(), exact), case.dtype, 2)
    restored = kernels.unmerge(out, *back, reduced, x)
    check(restored, x.float() + unmerge(out.float() - reduced.float(), exact), case.dtype, 4)
    assert torch.equal(kernels.unmerge(merged, *back, merged, x), x), "a block that adds nothing"
    assert all(map(torch.equal, (out, reduced, x), copies)), "inputs are left alone"


@each(Case(5, 7, 4, 0.5, 40, HALF, batch=2))
def test_any_strides(case: Case, kernels: Any) -> None:
    plan, x = random_plan(case), case.tokens()
    layout = plan.windows, plan.budget
    out, reduced = case.normal(plan.num_destinations, 1), case.normal(plan.num_destinations, 2)
    merged = kernels.merge(x, plan.merge_weights, *layout)
    restored = kernels.unmerge(out, plan.unmerge_weights, *layout, reduced, x)
    for y, *others in zip(*map(views, (out, reduced, x)), strict=True):
        assert torch.equal(kernels.merge(others[1], plan.merge_weights, *layout), merged)
        assert torch.equal(kernels.unmerge(y, plan.unmerge_weights, *layout, *others), restored)


@each(Case(5, 7, 4, 0.5, 40, FULL, batch=3))
def test_refused(case: Case, kernels: Any) -> None:
    """Kernels refuse sizes with which they would read past the end of a tensor."""
    plan, x = random_plan(case), case.tokens()
    out = case.normal(plan.num_destinations, 1)
    M, back, layout = plan.merge_weights, plan.unmerge_weights, (plan.windows, plan.budget)
    for refused, why in (
        (lambda: kernels.merge(x, M[:2], *layout), "does not fit a batch of 3"),
        (lambda: kernels.merge(x, back.transpose(2, 3), *layout), "rows are not contiguous"),
        (lambda: kernels.merge(x[:, 1:], M, *layout), "expected tokens"),
        (lambda: kernels.unmerge(out[:, 1:], back, *layout), "expected tokens"),
        (lambda: kernels.unmerge(out, back, *layout, out[:, 1:], x), "expected tokens"),
        (lambda: kernels.unmerge(out, back, *layout, out, x[:, 1:]), "expected tokens"),
    ):
        with pytest.raises(ValueError, match=why):
            refused()


@each(Case(13, 19, 8, 0.5, 24, HALF), Case(13, 19, 8, 0.5, 24, FULL, adaptive=True), Case(16, 16, 8, 0.5, 40, FULL))
def test_a_plan_of_one_image_serves_a_batch_without_a_copy(case: Case, kernels: Any) -> None:
    """Three images use the plan of one image, either as it is or stacked three times. Results must equal those with
    three copies of the plan. No kernel may read past the end of an adaptive budget."""
    plan, batch = replace(random_plan(case), kernels=kernels), replace(case, batch=3)
    many, copied = stacked([plan] * 3), stacked([replace(plan) for _ in range(3)])
    x, out = batch.normal(plan.tokens, 0), batch.normal(plan.num_destinations, 1)
    merged = merge(x, copied)
    for one in (plan, many):
        assert torch.equal(kernels.merge(x, one.merge_weights, one.windows, one.budget), merged)
        back = kernels.unmerge(out, one.unmerge_weights, one.windows, one.budget)
        assert torch.equal(back, unmerge(out, copied))
    assert torch.equal(unmerge_residual(out, merged, x, many), unmerge_residual(out, merged, x, copied))
    assert torch.equal(many.destinations, copied.destinations)
    for name in ("dest_slots", "merge_weights", "unmerge_weights"):
        ours = getattr(many, name)
        assert torch.equal(ours, getattr(copied, name))
        assert ours.data_ptr() == getattr(plan, name).data_ptr()
    x = x.double().requires_grad_()
    torch.testing.assert_close(merge(x, in_dtype(many, torch.float64)), merge(x, in_dtype(copied, torch.float64)))


@each(Case(13, 19, 8, 0.5, 8, FULL, batch=2, adaptive=True))
def test_budgets_of_their_own_share_launches(case: Case, kernels: Any) -> None:
    """Launches are prepared once for all plans. In the second plan, two images have swapped their budgets."""
    first, x = random_plan(case), case.tokens()
    budget = first.budget
    assert budget.adaptive
    swapped = Budget(budget.counts, budget.compact.flip(0), budget.expand.flip(0), budget.valid.flip(0))
    M, back = first.merge_weights.flip(0), first.unmerge_weights.flip(0)
    second = replace(first, budget=swapped, merge_weights=M, unmerge_weights=back)
    prepared = len(kernels._launches)
    for plan in (first, second):
        merged = kernels.merge(x, plan.merge_weights, plan.windows, plan.budget)
        check(merged, merge(x, plan), FULL)
        restored = kernels.unmerge(2 * merged, plan.unmerge_weights, plan.windows, plan.budget, merged, x)
        check(restored, x + unmerge(merged, plan), FULL, 4)
    assert len(kernels._launches) == prepared + 2
