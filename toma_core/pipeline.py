"""The front door. A block on merged tokens is three lines:

reduced, plan = reduce(x, grid, scope, evaluation)
out = block(reduced)
y = restore(out, reduced, x, plan)
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from torch import Tensor

from .merge import MergePlan, merge, unmerge
from .schedule import Decision
from .state import RunState

__all__ = ["Evaluation", "plan_for", "reduce", "restore"]


@dataclass(frozen=True, eq=False)
class Evaluation:
    """One call of the model: the run it belongs to, what to do in it, and what its batch holds.

    copies: one key per equal chunk of the batch, see `RunState.plan`.
    """

    run: RunState
    decision: Decision
    copies: tuple[Hashable, ...] = (None,)


def plan_for(x: Tensor, grid: tuple[int, int], scope: Hashable, evaluation: Evaluation) -> MergePlan | None:
    """The plan for tokens x of (B, H * W, C), or None if they are to stay as they are: at ratio 0, on a grid below
    `min_tokens`, or when nothing would be merged."""
    config, decision = evaluation.run.config, evaluation.decision
    tokens = grid[0] * grid[1]
    if tokens < config.min_tokens or round(decision.ratio * tokens) == 0:
        return None
    return evaluation.run.plan(x, grid, scope, decision, evaluation.copies)


def reduce(
    x: Tensor, grid: tuple[int, int], scope: Hashable, evaluation: Evaluation
) -> tuple[Tensor, MergePlan | None]:
    """(B, N, C) -> (B, D, C) and its plan, or x itself and None if it stays whole."""
    plan = plan_for(x, grid, scope, evaluation)
    return (x, None) if plan is None else (merge(x, plan), plan)


def restore(out: Tensor, reduced: Tensor, x: Tensor, plan: MergePlan | None) -> Tensor:
    """Give every token its destination's update: x + unmerge(out - reduced), (B, N, C).

    The block's residual stream goes through untouched, so that merging blurs what the block adds and not what it got.
    """
    return out if plan is None else x + unmerge(out - reduced, plan)
