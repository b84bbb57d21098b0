"""Test the kernels that merge, unmerge and restore tokens, against the plain PyTorch of `toma_core.merge` in fp32."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.toma_core.kernels.cases import DEVICE, Case, each, views
from toma_core.merge import MergePlan, merge, stacked, unmerge, unmerge_residual
from toma_core.pipeline import unmerge_residual_cached
from toma_core.windows import Budget

HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32

CASES = (
    Case(5, 7, 4, 0.5, 40, FULL),
    Case(5, 7, 4, 0.25, 77, HALF, batch=3),
    Case(13, 19, 8, 0.5, 40, HALF, batch=3),
    Case(13, 19, 8, 0.75, 77, BRAIN),
    Case(13, 19, 8, 0.9, 64, FULL),
    Case(16, 24, 8, 0.25, 640, HALF),
    # In these two cases a window has more than 64 tokens and destinations, so a kernel needs several steps for a sum.
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
    return replace(
        plan, merge_weights=plan.merge_weights.to(dtype), unmerge_weights=plan.unmerge_weights.to(dtype), kernels=None
    )


def check(actual: Tensor, expected: Tensor, dtype: torch.dtype, roundings: int = 1) -> None:
    """Check that the error of `actual` is at most `roundings` roundings to the dtype. Kernels compute sums in fp32."""
    assert actual.dtype == dtype
    assert actual.is_contiguous()
    atol = roundings * {FULL: 2e-6, HALF: 1e-3, BRAIN: 8e-3}[dtype]
    torch.testing.assert_close(actual.float(), expected, rtol=atol, atol=atol)


def normal(case: Case, tokens: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(case.batch, tokens, case.channels, generator=generator).to(DEVICE, case.dtype)


@each(*CASES, full_size=FULL_SIZE)
def test_merge(case: Case, kernels: Any) -> None:
    plan, x = random_plan(case), case.tokens()
    actual = kernels.merge(x, plan.merge_weights, plan.windows, plan.budget)
    check(actual, merge(x.float(), in_dtype(plan, FULL)), case.dtype)


@each(*CASES)
def test_unmerge(case: Case, kernels: Any) -> None:
    plan = random_plan(case)
    y = normal(case, plan.num_destinations, 1)
    actual = kernels.unmerge(y, plan.unmerge_weights, plan.windows, plan.budget)
    check(actual, unmerge(y.float(), in_dtype(plan, FULL)), case.dtype, 2)


@each(*CASES, full_size=FULL_SIZE)
def test_restore(case: Case, kernels: Any) -> None:
    plan, x = random_plan(case), case.tokens()
    out, reduced = normal(case, plan.num_destinations, 1), normal(case, plan.num_destinations, 2)
    copies = [t.clone() for t in (out, reduced, x)]
    actual = kernels.unmerge(out, plan.unmerge_weights, plan.windows, plan.budget, reduced, x)
    check(actual, x.float() + unmerge(out.float() - reduced.float(), in_dtype(plan, FULL)), case.dtype, 4)
    assert all(torch.equal(a, b) for a, b in zip((out, reduced, x), copies, strict=True)), "inputs are left alone"


@each(Case(5, 7, 4, 0.5, 40, FULL, batch=3))
def test_a_block_that_adds_nothing_changes_nothing(case: Case, kernels: Any) -> None:
    plan, x = random_plan(case), case.tokens()
    reduced = kernels.merge(x, plan.merge_weights, plan.windows, plan.budget)
    assert torch.equal(kernels.unmerge(reduced, plan.unmerge_weights, plan.windows, plan.budget, reduced, x), x)


@each(Case(5, 7, 4, 0.5, 40, HALF, batch=2))
def test_any_strides(case: Case, kernels: Any) -> None:
    plan, x = random_plan(case), case.tokens()
    layout = plan.windows, plan.budget
    out, reduced = normal(case, plan.num_destinations, 1), normal(case, plan.num_destinations, 2)
    merged = kernels.merge(x, plan.merge_weights, *layout)
    restored = kernels.unmerge(out, plan.unmerge_weights, *layout, reduced, x)
    for view in views(x):
        assert torch.equal(kernels.merge(view, plan.merge_weights, *layout), merged)
    for parts in zip(*map(views, (out, reduced, x)), strict=True):
        assert torch.equal(kernels.unmerge(parts[0], plan.unmerge_weights, *layout, *parts[1:]), restored)


@each(Case(5, 7, 4, 0.5, 40, FULL), Case(13, 19, 8, 0.5, 40, FULL, adaptive=True))
def test_one_plan_for_a_batch(case: Case, kernels: Any) -> None:
    """The plan is for one image, but the batch has three images. No kernel may read past the end of an adaptive
    budget."""
    plan, x = random_plan(case), replace(case, batch=3).tokens()
    copied = stacked([plan] * 3)
    merged, theirs = (kernels.merge(x, each.merge_weights, each.windows, each.budget) for each in (plan, copied))
    assert torch.equal(merged, theirs)
    back, theirs = (kernels.unmerge(merged, each.unmerge_weights, each.windows, each.budget) for each in (plan, copied))
    assert torch.equal(back, theirs)


@each(Case(5, 7, 4, 0.5, 40, FULL, batch=3))
def test_refused(case: Case, kernels: Any) -> None:
    """Kernels refuse sizes with which they would read past the end of a tensor."""
    plan, x = random_plan(case), case.tokens()
    out = normal(case, plan.num_destinations, 1)
    with pytest.raises(ValueError, match="does not fit a batch of 3"):
        kernels.merge(x, plan.merge_weights[:2], plan.windows, plan.budget)
    with pytest.raises(ValueError, match="rows are not contiguous"):
        kernels.merge(x, plan.unmerge_weights.transpose(2, 3), plan.windows, plan.budget)
    M, back = (plan.merge_weights, plan.windows, plan.budget), (plan.unmerge_weights, plan.windows, plan.budget)
    for refused in (
        lambda: kernels.unmerge(out, *back, out[:, 1:], x),
        lambda: kernels.unmerge(out, *back, out, x[:, 1:]),
        lambda: kernels.merge(x[:, 1:], *M),
        lambda: kernels.unmerge(out[:, 1:], *back),
    ):
        with pytest.raises(ValueError, match="expected tokens"):
            refused()


@each(Case(13, 19, 8, 0.5, 24, HALF), Case(13, 19, 8, 0.5, 24, FULL, adaptive=True), Case(16, 16, 8, 0.5, 40, FULL))
def test_one_image_several_times_is_no_copy(case: Case, kernels: Any) -> None:
    """A plan that is stacked three times is not copied. Results equal the results of three copies."""
    plan = replace(random_plan(case), kernels=kernels)
    many, copied = stacked([plan] * 3), stacked([replace(plan) for _ in range(3)])
    x, out = normal(replace(case, batch=3), plan.tokens, 0), normal(replace(case, batch=3), plan.num_destinations, 1)
    merged = merge(x, many)
    assert torch.equal(merged, merge(x, copied))
    assert torch.equal(unmerge(out, many), unmerge(out, copied))
    assert torch.equal(unmerge_residual(out, merged, x, many), unmerge_residual(out, merged, x, copied))
    assert torch.equal(
        unmerge_residual_cached(out, merged, x, x, many), unmerge_residual_cached(out, merged, x, x, copied)
    )
    assert torch.equal(many.destinations, copied.destinations)
    for name in ("dest_slots", "merge_weights", "unmerge_weights"):
        ours, theirs = getattr(many, name), getattr(copied, name)
        assert torch.equal(ours, theirs)
        assert ours.data_ptr() == getattr(plan, name).data_ptr()
    x = x.double().requires_grad_()
    torch.testing.assert_close(merge(x, in_dtype(many, torch.float64)), merge(x, in_dtype(copied, torch.float64)))


@each(Case(13, 19, 8, 0.5, 8, FULL, batch=2, adaptive=True))
def test_budgets_of_their_own_share_launches(case: Case, kernels: Any) -> None:
    """Launches are prepared once for all plans, although each plan has its own budget."""
    first, second = random_plan(case), random_plan(case)
    x = case.tokens()
    # In the second plan, the two images have swapped their budgets.
    budget = second.budget
    assert budget.adaptive
    other = Budget(budget.counts, budget.compact.flip(0), budget.expand.flip(0), budget.valid.flip(0))
    second = MergePlan(
        first.windows, other, second.dest_slots, second.merge_weights.flip(0), second.unmerge_weights.flip(0)
    )
    prepared = len(kernels._launches)
    for plan in (first, second):
        merged = kernels.merge(x, plan.merge_weights, plan.windows, plan.budget)
        check(merged, merge(x, plan), FULL)
        check(
            kernels.unmerge(2 * merged, plan.unmerge_weights, plan.windows, plan.budget, merged, x),
            x + unmerge(merged, plan),
            FULL,
            4,
        )
    assert len(kernels._launches) == prepared + 2
