"""Prompts for areas, masks and ranges of steps, batches of prompts, and prompts in one model call or in several."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ..judge import attach
from ..kit import SIDE, Kit, node
from ..row import CHEAP, MERGED, Graph
from .table import row

GROUP = "Prompts"
HALF = SIDE // 2
PIXELS = 8 * SIDE


@row(GROUP, "Areas (ConditioningSetArea)", others=MERGED, quick=True)
def areas(kit: Kit) -> Graph:
    """Give each half of the picture a prompt. In a run of one step, another prompt for the left half changes only the
    left half."""
    area, combine = node("nodes.ConditioningSetArea"), node("nodes.ConditioningCombine")

    def sample(model: Any, seed: int) -> Tensor:
        left = area(kit.prompt(seed), PIXELS // 2, PIXELS, 0, 0, 1.0)
        right = area(kit.prompt(3), PIXELS // 2, PIXELS, PIXELS // 2, 0, 1.0)
        return kit.sample(model, steps=1, positive=combine(left, right))

    def stays_left(result: Tensor) -> None:
        other = sample(attach(kit.model), 9)
        assert torch.equal(other[..., HALF:], result[..., HALF:])
        assert not torch.equal(other[..., :HALF], result[..., :HALF])

    return Graph(sample=lambda m: sample(m, 1), without=Graph(sample=lambda m: sample(m, 9)), check=stays_left)


@row(GROUP, "Masks (ConditioningSetMask, also with their bounds)", others=CHEAP, quick=True)
def masks(kit: Kit) -> Iterator[Graph]:
    """Add a masked prompt to a global one. In a run of one step, the masked prompt changes the area of the mask."""
    put, combine = node("nodes.ConditioningSetMask"), node("nodes.ConditioningCombine")
    mask = torch.zeros(1, SIDE, SIDE)
    mask[:, 4:16, 8:20] = 1.0

    def sample(seed: int, bounds: str, model: Any) -> Tensor:
        positive = combine(put(kit.prompt(seed), mask, bounds, 1.0), kit.prompt(3))
        return kit.sample(model, steps=1, positive=positive)

    def stays_inside(bounds: str, result: Tensor) -> None:
        changed = (sample(9, bounds, attach(kit.model)) != result).any(1)
        assert torch.equal(changed, mask.bool().expand_as(changed))

    # Skip mask bounds for videos, because ComfyUI computes bounds only for masks of two dimensions.
    for bounds in ("default",) if kit.frames else ("default", "mask bounds"):
        yield Graph(
            sample=partial(sample, 1, bounds),
            without=Graph(sample=partial(sample, 9, bounds)),
            check=partial(stays_inside, bounds),
            name=bounds,
        )


@row(GROUP, "Prompts combined, concatenated, averaged, zeroed and timed", others=CHEAP)
def combined(kit: Kit) -> Iterator[Graph]:
    timed = node("nodes.ConditioningSetTimestepRange")
    one, two = kit.prompt(1), kit.prompt(3)
    positives = {
        "combined": node("nodes.ConditioningCombine")(one, two),
        "concatenated": node("nodes.ConditioningConcat")(one, two),
        "averaged": node("nodes.ConditioningAverage")(one, two, 0.4),
        "zeroed": node("nodes.ConditioningZeroOut")(one),
        "timed": node("nodes.ConditioningCombine")(timed(one, 0.0, 0.5), timed(two, 0.5, 1.0)),
    }
    for name, positive in positives.items():
        yield Graph(options={"steps": 3, "positive": positive}, without=Graph(options={"steps": 3}), name=name)


@row(GROUP, "Prompts of other lengths", others=MERGED, sound=True)
def lengths(kit: Kit) -> Graph:
    """Use prompts whose lengths differ so that they cannot share one model call."""
    conds = {"positive": kit.prompt(1, tokens=154), "negative": kit.prompt(2, tokens=77)}
    return Graph(sample=lambda m: kit.sample(m, **conds))


@row(GROUP, "A batch with a prompt for each image", others=MERGED)
def batch_of_prompts(kit: Kit) -> Graph:
    """Check that in a run of one step, another prompt for the second image changes only the second image."""

    def sample(model: Any, seed: int) -> Tensor:
        both = [kit.prompt(s)[0] for s in (1, seed)]
        pooled = torch.cat([options["pooled_output"] for _, options in both])
        positive = [[torch.cat([text for text, _ in both]), {"pooled_output": pooled}]]
        return kit.sample(model, batch=2, steps=1, positive=positive)

    def stays_second(result: Tensor) -> None:
        other = sample(attach(kit.model), 9)
        assert torch.equal(other[0], result[0])
        assert not torch.equal(other[1], result[1])

    return Graph(sample=lambda m: sample(m, 3), without=Graph(sample=lambda m: sample(m, 9)), check=stays_second)


@row(GROUP, "Split CFG: positive and negative in calls of their own, for want of memory", others=MERGED, sound=True)
def split_cfg(kit: Kit) -> Graph:
    """Check that separate model calls for the positive and the negative prompt give the result of a joined call up to
    rounding. Destinations on a grid and soft weights do not amplify rounding."""
    smooth: dict[str, Any] = {"selector": "grid", "sharpness": 20.0}

    def sample(model: Any) -> Tensor:
        with mock.patch.object(model.model, "memory_required", lambda *args, **kwargs: 1e30):
            return kit.sample(model)

    def near(result: Tensor) -> None:
        torch.testing.assert_close(result, kit.sample(attach(kit.model, **smooth)), rtol=1e-4, atol=1e-2)

    return Graph(sample=sample, settings=smooth, steered=False, check=near)
