"""Provide fixtures that compare merged blocks and runs with expected ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from testbed import models
from tests.nodes.adapters.families.layouts import (
    CLOSE,
    HEIGHT,
    WIDTH,
    Layout,
    arguments,
    merged_call,
    restored,
    run,
)


class MergedBlock:
    """A call of a block that ran merged. It is compared with a call of the same block on tokens merged by plain
    indexing.

    call, given: the recorded call, and its arguments by name.
    planned: the requests for plans since the call began, and their plans.
    plan: the plan of the image.
    seen: the arguments by name after merging by plain indexing.
    stats: the report of the run.
    """

    def __init__(self, layout: Layout, block: Any, call: Any, planned: list[Any], dense: Any, stats: Any) -> None:
        self.layout, self.block, self.call, self.planned, self.stats = layout, block, call, planned, stats
        self._dense = dense
        self.given = arguments(block, layout, call)
        self.merge(1)

    def merge(self, number: int) -> None:
        """Merge by the first `number` plans: the image's plan, then the plans of references."""
        plans = [each.plan for each in self.planned[:number]]
        self.plan = plans[0]
        matrices = zip(*map(self._dense, plans), strict=True)
        self.M, self.U = (
            torch.stack([torch.block_diag(*each) for each in zip(*kind, strict=True)]) for kind in matrices
        )
        self.seen, self.image, self.merged = merged_call(self.layout, self.given, plans, self.M)

    @property
    def tokens(self) -> Tensor:
        """Return the tokens before merging, (B, T, C)."""
        return self.layout.taken(self.given[self.layout.tokens])

    @property
    def found(self) -> Tensor:
        """Return the tokens after the block, (B, T, C)."""
        return self.layout.taken(self.call.out)

    def by_hand(self, **others: Any) -> Tensor:
        """Call the block on the merged arguments, some of which are replaced by `others`. Return the tokens after the
        block."""
        out = run(self.block, self.layout, {**self.seen, **others})
        return restored(self.layout, out, self.image, self.merged, self.U)

    def agrees(self) -> None:
        torch.testing.assert_close(self.found, self.by_hand(), **CLOSE)

    def needs(self, **wrong: Any) -> None:
        """Check that `agrees` would fail with these wrong arguments."""
        assert (self.by_hand(**wrong) - self.found).abs().max() > 1e-2


@pytest.fixture
def merged_block(attach: Any, record: Any, plan_calls: Any, dense: Any, stats_of: Any) -> Callable[..., MergedBlock]:
    """merged_block(model, layout, sample, **settings): merge each block separately. Call `sample(merged model)`, which
    must evaluate the model once. Return the second block's call as a `MergedBlock`."""

    def merged(model: Any, layout: Layout, sample: Callable[[Any], Any], **settings: Any) -> MergedBlock:
        block = getattr(model.model.diffusion_model, layout.blocks)[1]
        calls, patched = record(block), attach(model, granularity="block", **settings)
        sample(patched)
        assert stats_of(patched).unmerged == {}
        (call,) = calls
        return MergedBlock(layout, block, call, plan_calls[call.first_plan :], dense, stats_of(patched))

    return merged


@pytest.fixture
def run_merged(attach: Any, stats_of: Any) -> Callable[..., Any]:
    """run_merged(model, settings, **options of sampling): check that a run is merged in all blocks, is finite, can be
    repeated with the same result, and leaves the model as it was. Return its report."""

    def checked(model: Any, settings: Any, height: int = HEIGHT, width: int = WIDTH, **asked: Any) -> Any:
        merged = attach(model, **settings)
        plain, out, again, after = (models.sample(m, height, width, **asked) for m in (model, merged, merged, model))
        assert out.isfinite().all()
        assert out.shape == plain.shape
        assert not torch.equal(out, plain)
        assert torch.equal(out, again)
        assert torch.equal(after, plain)
        assert stats_of(merged).unmerged == {}
        return stats_of(merged)

    return checked


@pytest.fixture
def run_unmerged(attach: Any, stats_of: Any) -> Callable[..., Any]:
    """run_unmerged(model, **options of sampling): check that ToMA changes nothing in a run. Return its report."""

    def checked(model: Any, **asked: Any) -> Any:
        merged = attach(model)
        asked = {"height": HEIGHT, "width": WIDTH, "cfg": 1.0, "steps": 1, **asked}
        out, plain = (models.sample(each, **asked) for each in (merged, model))
        assert torch.equal(out, plain)
        return stats_of(merged)

    return checked
