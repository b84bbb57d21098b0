"""Test greedy facility location against plain loops, brute force and apricot-select, which breaks ties differently."""

import math

import pytest
import torch
from apricot import FacilityLocationSelection
from hypothesis import given
from hypothesis import strategies as st

from testbed.selectors import facility_location
from tests.loop import loop
from tests.toma_core.kernels.cases import check_slots
from tests.toma_core.plans import randn
from tests.toma_core.selection.reference import best_value, exact_greedy, naive_greedy, naive_value
from toma_core.selection import RECENT, cosine_similarity, greedy_facility_location, select, tie_step
from toma_core.windows import make_budget, make_windows

seeds = st.integers(0, 2**31)


@given(seeds, st.integers(1, 12), st.integers(1, 12), st.integers(0, 5))
def test_padding_is_never_picked_and_never_counts(seed: int, slots: int, dest_slots: int, padding: int) -> None:
    dest_slots = min(dest_slots, slots)
    S = torch.rand(2, slots, slots, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    padded = torch.nn.functional.pad(S, (0, padding, 0, padding), value=1.0)
    valid = (torch.arange(slots + padding) < slots).expand(2, -1)
    alone = greedy_facility_location(S, None, dest_slots)
    assert torch.equal(greedy_facility_location(padded, valid, dest_slots), alone)
    # If the budget exceeds the number of tokens, the search repeats valid slots.
    every = greedy_facility_location(padded, valid, slots + padding)
    assert every.max() < slots
    assert all(len(set(row[:slots])) == slots for row in every.tolist())


@loop(("height", "width", "size"), [(5, 7, 4), (13, 9, 5), (3, 1, 2), (1, 11, 3), (6, 6, 3)])
@loop("ratio", [0.25, 0.6])
def test_ragged_windows_of_a_batch_each_as_good_as_the_loops(height: int, width: int, size: int, ratio: float) -> None:
    windows = make_windows(height, width, size)
    budget = make_budget(windows.counts, ratio)
    S = cosine_similarity(windows.split(randn(7, 3, height * width, 5)))
    dest_slots = select(S, windows, budget)
    check_slots(dest_slots, windows, budget)
    for b in range(3):
        for w, (count, num_dest) in enumerate(zip(windows.counts, budget.counts, strict=True)):
            alone = S[b, w, :count, :count]
            chosen = dest_slots[b, w, :num_dest].tolist()
            best = naive_value(alone, naive_greedy(alone, num_dest))
            assert naive_value(alone, chosen) == pytest.approx(best, rel=1e-5)


@given(seeds, st.integers(2, 9), st.sampled_from([2, 5]), st.just(1.0) | st.floats(0.1, 1.0))
def test_within_1_minus_1_over_e_of_the_best(seed: int, slots: int, channels: int, least: float) -> None:
    """With priorities of at least `least`, the bound is 1 - exp(-least) times the best value."""
    S = cosine_similarity(randn(seed, 1, slots, channels))
    priority = least + (1 - least) * torch.rand(1, slots, generator=torch.Generator().manual_seed(seed))
    for number in range(1, slots + 1):
        order = greedy_facility_location(S, None, number, None if least == 1.0 else priority)
        value, best = facility_location(S, order).item(), best_value(S[0], number)
        assert (1 - math.exp(-least)) * best - 1e-4 <= value <= best + 1e-4
        if least == 1.0 and number in (1, slots):
            assert value == pytest.approx(best, rel=1e-5)


@loop("smooth", [False, True], ids=["noise", "smooth"])
def test_as_good_as_apricot_at_every_budget(smooth: bool) -> None:
    x = randn(5, 35, 16)
    if smooth:
        x = x.view(5, 7, 16).cumsum(0).cumsum(1).view(35, 16)
    S = cosine_similarity(x[None])
    outside = FacilityLocationSelection(24, metric="precomputed", optimizer="naive")
    outside.fit((1 + S[0]).double().numpy())
    order = greedy_facility_location(S, None, 24)
    values = [facility_location(S, order[:, :dest_slots]).item() for dest_slots in range(1, 25)]
    assert values == pytest.approx(outside.gains.cumsum().tolist(), rel=1e-5)


def test_ties_go_to_the_lowest_slot() -> None:
    """A slot is selected before a lower slot only if its gain is larger by more than the tie step. Priorities decide
    between equal tokens."""
    S = torch.eye(6).expand(2, -1, -1)
    assert greedy_facility_location(S, None, 6).tolist() == [[0, 1, 2, 3, 4, 5]] * 2
    twins = cosine_similarity(torch.tensor([[[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 1.0]]]))
    assert greedy_facility_location(twins, None, 4).tolist() == [[0, 1, 2, 3]]
    recent = torch.tensor([[RECENT, 1.0, 1.0, RECENT]])
    assert greedy_facility_location(twins, None, 2, recent).tolist() == [[1, 2]]
    S = torch.eye(4)
    S[0, 2] = S[2, 0] = 0.5
    for more, order in ((0.0, [0, 1]), (1e-6, [0, 1]), (1e-3, [1, 0])):
        S[1, 3] = S[3, 1] = 0.5 + more
        assert greedy_facility_location(S[None], None, 2).tolist() == [order]
        assert naive_greedy(S, 2) == order


def smooth(seed: int, windows: int, side: int, channels: int = 16) -> torch.Tensor:
    """Return tokens (windows, side * side, channels) whose neighbours are similar, as in a picture."""
    x = randn(seed, windows, channels, side, side)
    x = torch.nn.functional.avg_pool2d(x, 3, 1, 1) + 0.1 * x
    return x.flatten(2).transpose(1, 2).contiguous()


@loop(("side", "dest_slots"), [(5, 12), (8, 32), (8, 48), (16, 128)])
def test_ties_fall_by_slot_for_any_rounding(side: int, dest_slots: int) -> None:
    """Late in a search, gains of mutual nearest neighbours differ only by rounding, which must not decide."""
    x = smooth(3, 8, side)
    unit = torch.nn.functional.normalize(x.double(), dim=-1)
    exact = [exact_greedy(S, dest_slots, tie_step(side * side)) for S in unit @ unit.mT]
    assert min(lead for _, lead in exact) > 2e-6, "a tie is none of two mutual neighbours: take other features"
    assert sum(exact_greedy(S, dest_slots, 0.0)[1] < 1e-9 for S in unit @ unit.mT) >= 6, "nearly all have ties"

    S = cosine_similarity(x)
    expected = greedy_facility_location(S, None, dest_slots)
    assert expected.tolist() == [order for order, _ in exact]
    shuffled = torch.randperm(x.shape[-1], generator=torch.Generator().manual_seed(1))
    for other in (x * (1 + 1e-7 * randn(9, *x.shape)), x[..., shuffled], 3.0 * x):
        assert torch.equal(greedy_facility_location(cosine_similarity(other), None, dest_slots), expected)
    assert torch.equal(greedy_facility_location(S.mT.contiguous(), None, dest_slots), expected)
    alone = [greedy_facility_location(cosine_similarity(one), None, dest_slots) for one in x.split(1)]
    assert torch.equal(torch.cat(alone), expected)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            assert torch.equal(greedy_facility_location(cosine_similarity(x), None, dest_slots), expected)
    finally:
        torch.set_num_threads(before)
