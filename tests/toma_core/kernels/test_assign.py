"""Hard plans in one launch each: selection and owners, means, copies, against the plain PyTorch of `merge` in fp32."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.toma_core.kernels.cases import DEVICE, Case, each
from toma_core.config import SelectorKind, WindowKind
from toma_core.merge import MergePlan, merge, unmerge, unmerge_update, weigh
from toma_core.selection import cosine_similarity, select

HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32

CASES = (
    Case(5, 7, 4, 0.5, 40, FULL),
    Case(5, 7, 4, 0.25, 77, HALF, batch=3),
    Case(13, 19, 8, 0.75, 64, BRAIN, batch=2),
    Case(16, 8, 8, 0.5, 130, HALF),
    Case(9, 11, 4, 0.5, 40, HALF, kind=WindowKind.STRIPE),
    Case(1, 3, 2, 0.5, 1, FULL),
    # More than 64 tokens in a window, more than 128: several steps of the sum, scores in global memory.
    Case(9, 10, 16, 0.25, 40, BRAIN),
    Case(13, 12, 16, 0.25, 40, FULL),
)


def plan_of(case: Case, x: Tensor) -> MergePlan:
    """A hard plan in plain PyTorch, its weights in fp32."""
    windows, budget = case.layout()
    tokens = windows.split(x.float())
    picks = select(cosine_similarity(tokens), windows, budget, SelectorKind.GRID)
    return weigh(tokens, picks, windows, budget, math.inf, FULL)


def check_own(plan: MergePlan) -> None:
    """Every destination belongs to itself."""
    assert plan.owners is not None
    destinations = torch.arange(plan.owners.shape[0] * plan.kept, device=DEVICE).view(-1, plan.kept)
    assert torch.equal(plan.owners.gather(1, plan.destinations), destinations)


def normal(case: Case, tokens: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(case.batch, tokens, case.channels, generator=generator).to(DEVICE, case.dtype)


def check(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype
    assert actual.is_contiguous()
    tolerance = {FULL: 2e-6, HALF: 1e-3, BRAIN: 8e-3}[dtype]
    torch.testing.assert_close(actual.float(), expected, rtol=tolerance, atol=tolerance)


def check_all(case: Case, kernels: Any) -> None:
    x = case.tokens()
    plan = plan_of(case, x)
    merged = kernels.merge_hard(x, plan.owners, plan.windows, plan.budget)
    check(merged, merge(x.float(), plan), case.dtype)
    out = normal(case, plan.kept, 1)
    assert torch.equal(kernels.unmerge_hard(out, plan.owners), unmerge(out, plan)), "a copy, to the last bit"
    kept = [t.clone() for t in (out, merged, x)]
    restored = kernels.restore_hard(out, merged, x, plan.owners)
    check(restored, unmerge_update(out.float(), merged.float(), x.float(), plan), case.dtype)
    assert all(torch.equal(a, b) for a, b in zip((out, merged, x), kept, strict=True)), "inputs are left alone"
    assert torch.equal(kernels.restore_hard(merged, merged, x, plan.owners), x), "nothing added, nothing changed"


@each(*CASES)
def test_means_and_copies(case: Case, kernels: Any) -> None:
    check_all(case, kernels)


@each(*CASES)
def test_owners(case: Case, kernels: Any) -> None:
    """Every token belongs to a destination of its window that is as similar as any, a destination to itself."""
    x, (windows, budget) = case.tokens(), case.layout()
    picks, M, back = kernels.select_weigh(x, windows, budget, math.inf)
    again = kernels.weigh(x, picks, windows, budget, math.inf)
    torch.testing.assert_close(again, (M, back))
    plan = MergePlan(windows, budget, picks, M, back, kernels, hard=True)
    real = torch.ones_like(windows.source, dtype=torch.bool) if windows.valid is None else windows.valid
    assert set(back.unique().tolist()) <= {0.0, 1.0}
    assert torch.equal(back.sum(-1), real.to(back.dtype).expand_as(back[..., 0]))
    A = back.float().transpose(2, 3)
    check(M.contiguous(), A / A.sum(-1, keepdim=True).clamp_min(1.0), case.dtype)
    check_own(plan)

    similarity = cosine_similarity(windows.split(x.float()))
    chosen = similarity.gather(2, picks[..., None].expand(-1, -1, -1, windows.slots))
    if budget.valid is not None:
        chosen = chosen.masked_fill(~budget.valid[..., None], -2.0)
    taken = (chosen * A).sum(2)
    assert (taken >= chosen.amax(2) - 1e-5)[:, real].all()


@each(Case(5, 7, 4, 0.5, 40, HALF, batch=2))
def test_any_strides(case: Case, kernels: Any) -> None:
    """Parts of longer sequences, as in Flux, and channels that are not next to each other."""
    x = case.tokens()
    plan = plan_of(case, x)
    out, reduced = normal(case, plan.kept, 1), normal(case, plan.kept, 2)
    merged = kernels.merge_hard(x, plan.owners, plan.windows, plan.budget)
    restored = kernels.restore_hard(out, reduced, x, plan.owners)

    def between(t: Tensor) -> Tensor:
        noise = torch.full((t.shape[0], 7, t.shape[2]), float("nan"), dtype=t.dtype, device=DEVICE)
        return torch.cat([noise, t, noise], 1)[:, 7:-7]

    def apart(t: Tensor) -> Tensor:
        return t.transpose(1, 2).contiguous().transpose(1, 2)

    for view in (between, apart):
        assert not view(x).is_contiguous()
        assert torch.equal(kernels.merge_hard(view(x), plan.owners, plan.windows, plan.budget), merged)
        assert torch.equal(kernels.restore_hard(view(out), view(reduced), view(x), plan.owners), restored)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@each(Case(7, 9, 4, 0.5, 16, FULL), Case(13, 11, 16, 0.9, 16, HALF))
def test_broken_tokens_cannot_point_outside(case: Case, kernels: Any) -> None:
    """A model that computed NaN gives a spoiled picture, never a wild address."""
    x, (windows, budget) = case.tokens(), case.layout()
    x[:, ::3] = float("nan")
    plan = MergePlan(windows, budget, *kernels.select_weigh(x, windows, budget, math.inf), kernels, hard=True)
    check_own(plan)
    assert plan.owners is not None
    assert ((plan.owners >= 0) & (plan.owners < plan.kept)).all()


@each(Case(5, 7, 4, 0.5, 40, FULL, batch=3))
def test_refused(case: Case, kernels: Any) -> None:
    """Sizes that would read past a tensor."""
    x = case.tokens()
    plan = plan_of(case, x)
    out, layout = normal(case, plan.kept, 1), (plan.windows, plan.budget)
    with pytest.raises(ValueError, match="expected tokens"):
        kernels.merge_hard(x[:, 1:], plan.owners, *layout)
    with pytest.raises(ValueError, match="expected owners"):
        kernels.merge_hard(x, plan.owners[:1], *layout)
    with pytest.raises(ValueError, match="expected owners"):
        kernels.unmerge_hard(out, plan.owners[:2])
    with pytest.raises(ValueError, match="expected tokens"):
        kernels.restore_hard(out, out[:, 1:], x, plan.owners)
    with pytest.raises(ValueError, match="expected tokens"):
        kernels.restore_hard(out, out, x[:, 1:], plan.owners)


@pytest.mark.gpu
@each(
    Case(64, 64, 8, 0.5, 640, HALF, batch=2),
    Case(104, 152, 8, 0.25, 640, BRAIN, batch=4),
    Case(64, 64, 16, 0.5, 3072, BRAIN),
    Case(52, 76, 16, 0.75, 1280, FULL, batch=3),
)
def test_full_size(case: Case, kernels: Any) -> None:
    check_all(case, kernels)
