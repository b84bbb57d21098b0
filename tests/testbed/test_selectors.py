"""Test rules that select destinations. Each selects the requested number of distinct tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.comfy_pack import pack_module
from testbed.selectors import RIVALS, farthest_point, random_order, rule, selecting, strided_grid, tome_matching

core, layout = pack_module("toma_core"), pack_module("toma_core.windows")
cosine_similarity = pack_module("toma_core.selection").cosine_similarity
make_budget, make_windows = layout.make_budget, layout.make_windows
ALL, SIDES = ("facility location", *RIVALS), st.integers(1, 12)


@pytest.mark.parametrize("kind", ALL)
@settings(max_examples=25)
@given(SIDES, SIDES, st.integers(2, 9), st.booleans(), st.floats(0.01, 0.95), st.integers(0, 2**31))
def test_distinct_real_tokens_as_many_as_asked(
    kind: str, height: int, width: int, size: int, shifted: bool, ratio: float, seed: int
) -> None:
    windows = make_windows(height, width, size, shifted)
    budget = make_budget(windows.counts, ratio)
    x = torch.randn(2, height * width, 4, generator=torch.Generator().manual_seed(seed))
    picks = rule(kind, seed)(cosine_similarity(windows.split(x)), windows, budget)
    assert picks.shape == (2, len(windows.counts), budget.slots)
    assert picks.dtype == torch.int64
    for image in picks.tolist():
        for slots, count, budgeted in zip(image, windows.counts, budget.counts, strict=True):
            assert slots[:budgeted] == sorted(set(slots[:budgeted]))
            assert 0 <= min(slots) <= max(slots) < count
            assert slots[budgeted:] == [slots[0]] * (len(slots) - budgeted)


def test_farthest_point_by_hand() -> None:
    """Tokens lie at 0, 10, 20 and 170 degrees. The first destination is the most central token, at 20 degrees (sum of
    cosines 1 + 0.98 + 0.94 - 0.87). The second is the farthest from it, at 170 degrees, the third is at 0."""
    angles = torch.deg2rad(torch.tensor([0.0, 10.0, 20.0, 170.0]))
    S = cosine_similarity(torch.stack([angles.cos(), angles.sin()], -1)[None])
    assert S.sum(1).argmax(1).item() == 2
    assert farthest_point(S, None, 4).tolist() == [[2, 3, 0, 1]]


def test_tome_by_hand() -> None:
    """Of 8 tokens, the candidates 0 and 4 are always destinations. The tokens that are least similar to both candidates
    become the other destinations."""
    S = torch.full((1, 8, 8), -0.5)
    for token, likeness in {1: 0.9, 2: 0.1, 3: 0.5, 5: 0.3, 6: 0.7, 7: 0.2}.items():
        S[0, token, 4] = likeness
    assert tome_matching(S, None, 5).tolist() == [[0, 4, 2, 7, 5]]
    assert tome_matching(S, None, 2).tolist() == [[0, 4]]


def test_grid_by_hand() -> None:
    """Destinations are the middle slots of equal groups of slots: 1, 4 and 7 of 9 slots, 1 and 3 of 4 slots."""
    assert strided_grid((9, 4), (3, 2), 3)[0].tolist() == [1, 4, 7]
    assert strided_grid((9, 4), (3, 2), 3)[1, :2].tolist() == [1, 3]
    assert strided_grid((5,), (5,), 5).tolist() == [[0, 1, 2, 3, 4]]


def test_random_has_its_own_generator() -> None:
    before = torch.random.get_rng_state()
    first = random_order((16, 9), 8, 5)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.rand(1)
    assert torch.equal(random_order((16, 9), 8, 5), first)
    assert not torch.equal(random_order((16, 9), 8, 6), first)


@pytest.mark.parametrize("kind", RIVALS)
def test_inside_it_picks_for_every_run(kind: str) -> None:
    x = torch.randn(1, 256, 12, generator=torch.Generator().manual_seed(0))
    step = core.StepPlan(0, core.StepMode.MERGED, 0.5, 0, 0)
    picks = []
    for one in (kind, "facility location"):
        with selecting(one):
            run = core.RunState(core.Schedule(core.ToMAConfig()))
            picks.append(run.plan(x, (16, 16), "a", step, (None,)).dest_slots)
    windows = make_windows(16, 16, 8)
    expected = rule(kind)(cosine_similarity(windows.split(x)), windows, make_budget(windows.counts, 0.5))
    assert torch.equal(picks[0], expected)
    assert not torch.equal(*picks)
