"""Provide fixtures that compare merged blocks, and complete runs, with expected results."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from testbed import models
from tests.nodes.adapters.families.layouts import HEIGHT, WIDTH, Layout, arguments, merged_call, restored, run

ONE_STEP: dict[str, Any] = {"height": HEIGHT, "width": WIDTH, "cfg": 1.0, "steps": 1}


class MergedBlock:
    """A recorded call of a merged block or chain of blocks. `agrees` compares it with calls of the same blocks on
    tokens merged by plain indexing.

    blocks, calls: the blocks, and a recorded call of each.
    given: the arguments of the first call, by name.
    planned: the plans requested since the first call began, each with its request.
    plan: the plan of the image.
    seen: the arguments in `given` after merging by plain indexing.
    stats: the report of the run.
    """

    def __init__(self, layout: Layout, blocks: list[Any], calls: list[Any], plan_calls: list[Any], dense: Any) -> None:
        self.layout, self.blocks, self.calls, self._dense = layout, blocks, calls, dense
        self.planned = plan_calls[calls[0].first_plan :]
        self.stats: Any = None
        self.given = arguments(blocks[0], layout, calls[0])
        self.merge(1)

    def merge(self, number: int) -> None:
        """Merge by plain indexing with the first `number` plans: the image's plan, then the plans of references."""
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
        """Return the tokens after the last block, (B, T, C)."""
        return self.layout.taken(self.calls[-1].out)

    def by_hand(self, **others: Any) -> Tensor:
        """Call the blocks on the arguments in `seen`, updated with `others`. Return the tokens after the last block."""
        layout, given = self.layout, {**self.seen, **others}
        for block, call in zip(self.blocks, self.calls, strict=True):
            if block is not self.blocks[0]:  # arguments without tokens, such as Chroma's modulation, differ by block
                own = arguments(block, layout, call)
                merged = layout.tokens, layout.rope_arg, *layout.rows, layout.keys
                given |= {name: value for name, value in own.items() if name not in merged}
            out = run(block, layout, given)
            given[layout.tokens] = out if layout.out is None else out[layout.out]
        return restored(layout, out, self.image, self.merged, self.U)

    def agrees(self, times: float = 1.0) -> None:
        """Check that the recorded result equals that of `by_hand`. times: factor of the tolerance. Values reach 30, so
        an fp32 sum in another order differs by 1e-5."""
        torch.testing.assert_close(self.found, self.by_hand(), rtol=times * 1e-4, atol=times * 1e-3)

    def needs(self, **wrong: Any) -> None:
        """Check that `agrees` would fail with these wrong arguments."""
        assert (self.by_hand(**wrong) - self.found).abs().max() > 1e-2


@pytest.fixture
def merged_block(attach: Any, record: Any, plan_calls: Any, dense: Any, stats_of: Any) -> Callable[..., MergedBlock]:
    """merged_block(model, layout, **options of sampling): merge each block separately in one evaluation. Return the
    second block's call as a `MergedBlock`. chain: merge all blocks as one chain instead, and return the chain's calls.
    references: whether references are merged too."""

    def merged(model: Any, layout: Layout, chain: bool = False, references: bool = False, **asked: Any) -> MergedBlock:
        blocks = list(getattr(model.model.diffusion_model, layout.blocks))
        blocks = blocks if chain else blocks[1:2]
        calls = [record(block) for block in blocks]
        patched = attach(model, granularity="stack" if chain else "block", merge_references=references)
        models.sample(patched, **{**ONE_STEP, **asked})
        assert stats_of(patched).unmerged == {}
        block = MergedBlock(layout, blocks, [call for (call,) in calls], plan_calls, dense)
        block.stats = stats_of(patched)
        return block

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
        out, plain = (models.sample(each, **{**ONE_STEP, **asked}) for each in (merged, model))
        assert torch.equal(out, plain)
        return stats_of(merged)

    return checked
