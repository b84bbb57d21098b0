"""Test the map that `draw_map` makes of a plan."""

from __future__ import annotations

import torch

from tests.toma_core.plans import randn, run_of, step_of
from toma_core.merge import MergePlan, draw_map


def plan_of(x: torch.Tensor, grid: tuple[int, ...]) -> MergePlan:
    return run_of().plan(x, grid, None, step_of(), (None,))


def test_the_map_shows_each_token_with_its_most_similar_destination() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 63, 6).bfloat16()
    plan = plan_of(x, (7, 9))
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


def test_of_a_video_the_first_frame_is_drawn() -> None:
    x = randn(0, 1, 3 * 63, 6)
    drawn, first = draw_map(plan_of(x, (3, 7, 9))), draw_map(plan_of(x[:, :63], (7, 9)))
    assert (drawn.frames, first.frames) == (3, 1)
    assert (drawn.height, drawn.width, drawn.cuts) == (7, 9, first.cuts)
    assert torch.equal(drawn.owner, first.owner)
    assert torch.equal(drawn.destinations, first.destinations)
