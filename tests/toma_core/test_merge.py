"""Test merge and unmerge against dense matrices from plain loops, and test weights and maps of plans."""

import importlib
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.loop import loop
from tests.toma_core.plans import image_of, randn, run_of, step_of
from toma_core.merge import MergePlan, draw_map, merge, stacked, unmerge, unmerge_residual, weigh
from toma_core.selection import allocate, cosine_similarity, select, spread
from toma_core.windows import make_budget, make_windows


def plan_of(
    x: torch.Tensor,
    height: int,
    width: int,
    *,
    ratio: float = 0.5,
    size: int = 4,
    shifted: bool = False,
    sharpness: float = 30.0,
    adaptive: bool = False,
) -> MergePlan:
    windows = make_windows(height, width, size, shifted)
    budget = make_budget(windows.counts, ratio)
    tokens = windows.split(x)
    if adaptive:
        budget = allocate(budget, spread(tokens, windows), windows)
    dest_slots = select(cosine_similarity(tokens), windows, budget)
    return weigh(tokens, dest_slots, windows, budget, sharpness, x.dtype)


def dense(x: torch.Tensor, plan: MergePlan, sharpness: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the paper's matrices A and M for one image, each (D, N), computed in loops over tokens in fp64. Check the
    order of destinations: window by window, and inside a window by slot."""
    destinations = plan.destinations[0].tolist()
    window_of = {t: w for w, n in enumerate(plan.windows.counts) for t in plan.windows.source[w, :n].tolist()}
    order = [list(window_of).index(token) for token in destinations]
    assert order == sorted(set(order))
    if not plan.budget.adaptive:
        counts = Counter(window_of[token] for token in destinations)
        assert [counts[w] for w in range(len(plan.windows.counts))] == list(plan.budget.counts)
    x = x[0].double()
    A = torch.zeros(len(destinations), len(x), dtype=torch.float64)
    for i in range(len(x)):
        near = [j for j, token in enumerate(destinations) if window_of[token] == window_of[i]]
        cos = [float(x[destinations[j]] @ x[i] / (x[destinations[j]].norm() * x[i].norm())) for j in near]
        powers = [math.exp(sharpness * (c - max(cos))) for c in cos]
        for j, power in zip(near, powers, strict=True):
            A[j, i] = power / sum(powers)
    return A, A / A.sum(1, keepdim=True)


@settings(max_examples=40)
@given(
    st.tuples(st.integers(1, 10), st.integers(1, 10)),
    st.integers(2, 6),
    st.booleans(),
    st.booleans(),
    st.floats(0.01, 0.95),
    st.sampled_from([1.0, 30.0, 300.0]),
    st.integers(0, 2**31),
)
def test_equal_to_the_dense_matrices_of_each_image(
    grid: tuple[int, int], size: int, shifted: bool, adaptive: bool, ratio: float, sharpness: float,
    seed: int,
) -> None:  # fmt: skip
    x = randn(seed, 2, math.prod(grid), 6)
    plan = plan_of(x, *grid, ratio=ratio, size=size, shifted=shifted, sharpness=sharpness, adaptive=adaptive)
    merged, y = merge(x, plan), randn(seed + 1, 2, plan.num_destinations, 6)
    back, updated = unmerge(y, plan), unmerge_residual(y, merged, x, plan)
    for n in range(2):
        A, M = dense(x[n : n + 1], image_of(plan, n), sharpness)
        X, Y = x[n].double(), y[n].double()
        for ours, theirs in ((merged, M @ X), (back, A.T @ Y), (updated, X + A.T @ (Y - M @ X))):
            torch.testing.assert_close(ours[n].double(), theirs, rtol=2e-3, atol=2e-3)


@loop("dtype", [torch.bfloat16, torch.float16], ids=str)
@loop("sharpness", [300.0, 10_000.0])
def test_weights_are_fp32_math_then_cast(dtype: torch.dtype, sharpness: float) -> None:
    """If cosines near 1 were rounded to half precision, a logit would change by 0.1 or more."""
    x = (1 + 0.05 * randn(2, 2, 117, 16)).to(dtype)
    low, high = plan_of(x, 13, 9, sharpness=sharpness), plan_of(x.float(), 13, 9, sharpness=sharpness)
    assert torch.equal(low.dest_slots, high.dest_slots)
    assert torch.equal(low.merge_weights, high.merge_weights.to(dtype))
    assert torch.equal(low.unmerge_weights, high.unmerge_weights.to(dtype))
    assert merge(x, low).dtype == unmerge(merge(x, low), low).dtype == dtype


def test_zero_and_constant_images_give_finite_plans() -> None:
    for x in (torch.zeros(1, 35, 4), torch.ones(1, 35, 4), torch.full((1, 35, 4), 1e-30)):
        plan = plan_of(x, 5, 7, sharpness=10_000.0)
        assert plan.merge_weights.isfinite().all()
        assert plan.unmerge_weights.isfinite().all()
        torch.testing.assert_close(unmerge(merge(x, plan), plan), x, rtol=1e-3, atol=1e-3)


@loop("dtype", [torch.float32, torch.bfloat16], ids=str)
@loop(("height", "width", "size"), [(8, 8, 4), (12, 12, 6), (8, 16, 4), (6, 24, 6), (4, 16, 8)], ids=str)
def test_rows_of_windows_at_once_are_windows_one_by_one(
    height: int, width: int, size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a row of the grid has few windows, all of equal size, one matrix product merges the row."""
    x = randn(13, 2, height * width, 6).to(dtype)
    plan = plan_of(x, height, width, size=size, ratio=0.25)
    out = randn(14, 2, plan.num_destinations, 6).to(dtype)
    rows = plan.windows.tiles[0]
    assert plan.strips[0].shape == (2 * rows, plan.num_destinations // rows, height * width // rows)

    def results(plan: MergePlan) -> tuple[torch.Tensor, ...]:
        reduced = merge(x, plan)
        # The tokens are the middle part of a longer sequence, as in Flux.
        between = torch.cat([x, x, x], 1)[:, len(x[0]) : 2 * len(x[0])]
        return reduced, merge(between, plan), unmerge(out, plan), unmerge_residual(out, reduced, between, plan)

    at_once = results(plan)
    monkeypatch.setattr(importlib.import_module("toma_core.merge"), "_MAX_IN_ROW", 0)
    alone = replace(plan)
    assert alone.strips is None
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(at_once, results(alone), rtol=tolerance, atol=tolerance)
    assert all(t.is_contiguous() for t in at_once)


def test_a_broken_token_stays_in_its_row_of_windows() -> None:
    """One product merges a row of windows, so NaN in one window spreads to all windows of its row, but not beyond."""
    x = randn(16, 2, 64, 6)
    plan = plan_of(x, 8, 8, ratio=0.25)
    assert plan.strips is not None
    broken = x.clone()
    broken[1, 5] = float("nan")
    sound, spoiled = (unmerge_residual(2 * merge(t, plan), merge(t, plan), t, plan) for t in (x, broken))
    assert torch.equal(spoiled[0], sound[0])
    assert torch.equal(spoiled[1, 32:], sound[1, 32:])
    assert not spoiled[1, :32].isfinite().any()


@loop(("height", "width"), [(8, 8), (13, 9)])
@loop("adaptive", [False, True])
@loop("images", [1, 2])
def test_a_plan_serves_a_larger_batch(images: int, adaptive: bool, height: int, width: int) -> None:
    """A plan of two images is stacked twice, for cond and uncond. A plan of one image serves four images unchanged."""
    x = randn(10, 4, height * width, 6)
    plan = plan_of(x[:images], height, width, adaptive=adaptive)
    used = stacked([plan, plan]) if images == 2 else plan
    assert images == 1 or torch.equal(used.destinations, torch.cat([plan.destinations] * 2))

    def results(x: torch.Tensor, plan: MergePlan) -> tuple[torch.Tensor, ...]:
        y = merge(x, plan)
        return y, unmerge(y, plan), unmerge_residual(y.sin(), y, x, plan)

    alone = zip(*(results(part, plan) for part in x.split(images)), strict=True)
    torch.testing.assert_close(results(x, used), tuple(map(torch.cat, alone)))


@loop(("height", "width"), [(8, 8), (13, 9), (1, 11), (11, 1), (3, 2)])
def test_memory_layout_does_not_matter(height: int, width: int) -> None:
    x = randn(12, 2, height * width, 6)
    plan = plan_of(x, height, width)
    y = merge(x, plan)
    for same in (x.mT.contiguous().mT, torch.cat([x, x], 2)[..., :6]):
        assert not same.is_contiguous() or height * width == 1
        torch.testing.assert_close(merge(same, plan), y)
    torch.testing.assert_close(unmerge(y.mT.contiguous().mT, plan), unmerge(y, plan), rtol=1e-5, atol=1e-6)


def test_gradients_flow() -> None:
    """Some guidance nodes compute gradients through the merged model."""
    x = randn(14, 1, 35, 4).requires_grad_()
    plan = plan_of(x.detach(), 5, 7)
    unmerge(merge(x, plan), plan).square().sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert (x.grad.abs().sum(-1) > 0).all()


def test_the_map_shows_each_token_with_its_most_similar_destination() -> None:
    x = randn(5, 2, 63, 6).bfloat16()
    plan = run_of().plan(x, (7, 9), "a", step_of(), (None,))
    drawn = draw_map(plan)
    assert (drawn.height, drawn.width, drawn.cuts) == (7, 9, plan.windows.cuts)
    assert torch.equal(drawn.destinations, plan.destinations[0])
    unit = torch.nn.functional.normalize(x[0].float(), dim=-1)
    destinations = drawn.destinations.tolist()
    for members, count in zip(plan.windows.source.tolist(), plan.windows.counts, strict=True):
        here = [d for d in destinations if d in members[:count]]
        for token in members[:count]:
            owner = drawn.owner[token].item()
            assert owner in here
            # The owner is the most similar destination. If two destinations are nearly equally similar, the token is a
            # mix of both, and the map may show either.
            assert unit[owner] @ unit[token] > max(unit[d] @ unit[token] for d in here) - 0.01
    assert drawn.owner[drawn.destinations].tolist() == destinations
    # The map of a video shows its first frame.
    video = torch.cat([x, randn(0, 2, 63, 6).bfloat16()], 1)
    first = draw_map(run_of().plan(video, (2, 7, 9), "a", step_of(), (None,)))
    assert (first.frames, drawn.frames) == (2, 1)
    assert (first.height, first.width, first.cuts) == (7, 9, drawn.cuts)
    assert torch.equal(first.owner, drawn.owner)
    assert torch.equal(first.destinations, drawn.destinations)
