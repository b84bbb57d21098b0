"""Test the kernel that selects destinations and computes weights, against plain PyTorch in fp32."""

from typing import Any

import pytest
import torch
from torch import Tensor

from testbed.selectors import facility_location, random_order
from tests.toma_core.kernels.cases import BRAIN, DEVICE, FULL, HALF, Case, check_slots, destinations_of, each, views
from tests.toma_core.selection.reference import exact_greedy, naive_greedy
from toma_core.merge import weigh
from toma_core.selection import RECENT, cosine_similarity, in_reading_order, select, tie_step
from toma_core.windows import Budget, Windows

SCALE = 300.0
CASES = (
    Case(5, 7, 4, 0.5, 40, FULL),
    Case(5, 7, 4, 0.25, 77, HALF, batch=3),
    Case(13, 19, 8, 0.5, 40, HALF),
    Case(13, 19, 8, 0.75, 64, BRAIN, batch=3),
    Case(13, 19, 8, 0.9, 77, FULL),
    Case(16, 8, 8, 0.5, 640, HALF),
    Case(9, 10, 16, 0.75, 40, BRAIN),
    Case(3, 3, 2, 0.9, 5, FULL),
    # In the next two cases nearly every token of a window is a destination: 61 of 64 and 81 of 90.
    Case(9, 8, 8, 0.05, 40, HALF),
    Case(9, 10, 16, 0.1, 24, BRAIN),
    Case(12, 10, 16, 0.9, 77, HALF),
    Case(13, 19, 8, 0.75, 24, FULL, batch=3, adaptive=True),
    Case(11, 22, 11, 0.9, 24, FULL, batch=2, adaptive=True),
)
FULL_SIZE = (
    Case(64, 64, 8, 0.5, 640, HALF, batch=2),
    Case(104, 152, 8, 0.5, 640, BRAIN, batch=4),
    Case(66, 66, 11, 0.5, 3072, BRAIN),
    Case(64, 64, 8, 0.5, 64, BRAIN, batch=2, adaptive=True),
)


def check_weights(M: Tensor, back: Tensor, x: Tensor, dest_slots: Tensor, windows: Windows, budget: Budget) -> None:
    expected = weigh(windows.split(x.float()), dest_slots, windows, budget, SCALE, torch.float32)
    # An error of 1e-7 in a cosine becomes 3e-5 in a weight at sharpness 300. Weights are then rounded to the dtype.
    tolerance = {FULL: 1e-4, HALF: 1e-3, BRAIN: 8e-3}[x.dtype]
    assert M.dtype == back.dtype == x.dtype
    torch.testing.assert_close(M.float(), expected.merge_weights, rtol=0, atol=tolerance)
    torch.testing.assert_close(back.float(), expected.unmerge_weights, rtol=0, atol=tolerance)
    if windows.valid is not None:
        assert not M.transpose(2, 3)[:, ~windows.valid].any(), "padding is merged into nothing"
        assert not back[:, ~windows.valid].any()
    if budget.valid is not None:
        unused = ~budget.valid.expand(M.shape[:3])
        assert not M[unused].any(), "an unused place takes from no token"
        assert not back.transpose(2, 3)[unused].any()


def check_objective(x: Tensor, dest_slots: Tensor, windows: Windows, budget: Budget) -> None:
    """Check that destinations represent windows as well as PyTorch's do. If gains are close, the slots may differ."""
    similarity = cosine_similarity(windows.split(x.float()))
    expected = select(similarity, windows, budget)
    valid = None if windows.valid is None else windows.valid.repeat(x.shape[0], 1)
    value, best = (facility_location(similarity.flatten(0, 1), p.flatten(0, 1), valid) for p in (dest_slots, expected))
    torch.testing.assert_close(value, best, rtol=2e-3, atol=1e-3)


@each(*CASES, full_size=FULL_SIZE)
def test_select_and_weigh(case: Case, kernels: Any) -> None:
    x, (windows, budget) = case.tokens(), case.layout()
    dest_slots, M, back = kernels.weigh(x, None, windows, budget, SCALE)
    assert dest_slots.dtype == torch.int64
    check_slots(dest_slots, windows, budget)
    check_weights(M, back, x, dest_slots, windows, budget)
    check_objective(x, dest_slots, windows, budget)
    if case in FULL_SIZE:
        return
    similarity, decided = cosine_similarity(windows.split(x.float())), 0
    for image, kept_here in enumerate(destinations_of(budget, case.batch)):
        for w, (kept, count) in enumerate(zip(kept_here, windows.counts, strict=True)):
            alone = similarity[image, w, :count, :count]
            order, lead = exact_greedy(alone, kept, tie_step(windows.slots))
            if lead > 2e-6:
                decided += 1
                assert dest_slots[image, w, :kept].tolist() == sorted(order)
    assert decided >= 0.75 * case.batch * len(budget.counts)


@each(Case(5, 10, 5, 0.5, 24, FULL), Case(16, 24, 8, 0.5, 40, FULL, batch=2), Case(11, 11, 11, 0.7, 24, FULL))
def test_ties_fall_by_slot(case: Case, kernels: Any) -> None:
    """Gains of two mutual nearest neighbours differ only by rounding. The kernel must select the one in the lower
    slot."""
    x, (windows, budget) = case.tokens(1), case.layout()
    similarity = cosine_similarity(windows.split(x))
    expected = select(similarity, windows, budget)
    for image in range(case.batch):
        for w, kept in enumerate(budget.counts):
            order, lead = exact_greedy(similarity[image, w], kept, tie_step(windows.slots))
            assert lead > 2e-6, "a tie is none of two mutual neighbours: take other features"
            assert windows.slots > 25 or order == naive_greedy(similarity[image, w], kept)
            assert expected[image, w, :kept].tolist() == sorted(order)
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(9)).to(DEVICE)
    for other in (x, x * (1 + 1e-7 * noise), x.flip(2)):
        assert torch.equal(kernels.weigh(other, None, windows, budget, SCALE)[0], expected)
    assert torch.equal(kernels.weigh(x[:1], None, windows, budget, SCALE)[0], expected[:1])


@each(CASES[0], CASES[2], Case(13, 10, 4, 0.5, 40, FULL, batch=3, adaptive=True))
def test_priority(case: Case, kernels: Any) -> None:
    """Equal priorities change nothing. If the selected tokens get a lower priority, the kernel selects others."""
    x, (windows, budget) = case.tokens(1), case.layout()
    before, M, back = kernels.weigh(x, None, windows, budget, SCALE)
    places = windows.source.expand(len(x), -1, -1).gather(2, before).flatten(1)
    priority = torch.ones(len(x), windows.tokens, device=DEVICE)
    for ours, theirs in zip(kernels.weigh(x, None, windows, budget, SCALE, priority), (before, M, back), strict=True):
        assert torch.equal(ours, theirs)
    priority.scatter_(1, places, RECENT)
    dest_slots, M, back = kernels.weigh(x, None, windows, budget, SCALE, priority)
    expected = select(cosine_similarity(windows.split(x)), windows, budget, priority)
    assert (dest_slots == expected).float().mean() > 0.98
    assert (dest_slots != before).float().mean() > 0.5
    check_weights(M, back, x, dest_slots, windows, budget)


@each(CASES[2], CASES[3], CASES[11])
def test_weigh_alone(case: Case, kernels: Any) -> None:
    x, (windows, budget) = case.tokens(1), case.layout()
    order = random_order(windows.counts, budget.slots, 0).to(DEVICE)
    dest_slots = in_reading_order(order.expand(len(x), -1, -1), windows, budget)
    before = dest_slots.clone()
    check_weights(*kernels.weigh(x, dest_slots, windows, budget, SCALE)[1:], x, dest_slots, windows, budget)
    assert torch.equal(dest_slots, before)


@each(Case(5, 6, 8, 0.5, 40, HALF, batch=2))
def test_any_strides(case: Case, kernels: Any) -> None:
    x, (windows, budget) = case.tokens(), case.layout()
    expected = kernels.weigh(x, None, windows, budget, SCALE)
    for view in views(x):
        for a, b in zip(kernels.weigh(view, None, windows, budget, SCALE), expected, strict=True):
            assert torch.equal(a, b)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@each(Case(7, 9, 4, 0.5, 16, FULL), Case(12, 10, 16, 0.9, 16, HALF))
def test_equal_and_broken_tokens(case: Case, kernels: Any) -> None:
    """If all tokens are equal or zero, the first slots of each window are selected, with equal weights. Tokens that are
    NaN or infinite break the picture, but slots must still lie within their windows."""
    x, (windows, budget) = case.tokens(), case.layout()
    for value in (0.0, 1.0):
        alike = torch.full_like(x, value)
        dest_slots, M, back = kernels.weigh(alike, None, windows, budget, SCALE)
        for row, kept in zip(dest_slots[0].tolist(), budget.counts, strict=True):
            assert row[:kept] == list(range(kept))
        check_weights(M, back, alike, dest_slots, windows, budget)
    for value in (float("nan"), float("inf")):
        x[:, ::3] = value
        check_slots(kernels.weigh(x, None, windows, budget, SCALE)[0], windows, budget)


def test_refused(kernels: Any) -> None:
    case = Case(17, 16, 17, 0.5, 8)
    with pytest.raises(ValueError, match="at most 128 tokens"):
        kernels.weigh(case.tokens(), None, *case.layout(), SCALE)
    case = Case(4, 4, 4, 0.5, 8)
    dest_slots = torch.zeros(2, 1, 8, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match="do not fit 1 images"):
        kernels.weigh(case.tokens(), dest_slots, *case.layout(), SCALE)
