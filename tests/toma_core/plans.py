from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor

from toma_core import Evaluation, MergePlan
from toma_core.cost_model import Block
from toma_core.windows import Grid

UNET_BLOCK = Block(18, 20, (1, 2, 6))


def plan_for(x: Tensor, grid: Grid, scope: Hashable, evaluation: Evaluation) -> MergePlan | None:
    """Return the plan for tokens x of (B, N, C) in a UNet, or None if they are not merged."""
    reason = evaluation.obstacle(x, UNET_BLOCK, evaluation.run.config.granularity)
    return None if reason else evaluation.plan(x, grid, scope)
