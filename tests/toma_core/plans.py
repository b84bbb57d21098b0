"""Provide random tokens, runs and plans."""

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from toma_core import Evaluation, MergePlan, RunState, Schedule, StepMode, StepPlan, ToMAConfig
from toma_core.cost_model import Block
from toma_core.windows import Grid

UNET_BLOCK = Block(18, 20, (1, 2, 6))


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def run_of(**settings: Any) -> RunState:
    return RunState(Schedule(ToMAConfig(**{"window_size": 4, "min_tokens": 4, **settings})))


def step_of(ratio: float = 0.5, selection: int = 0, weighing: int = 0) -> StepPlan:
    return StepPlan(0, StepMode.MERGED, ratio, selection, weighing)


def plan_for(x: Tensor, grid: Grid, scope: Hashable, evaluation: Evaluation) -> MergePlan | None:
    """Return the plan for tokens x of (B, N, C) in a UNet, or None if they are not merged."""
    reason = evaluation.obstacle(x, UNET_BLOCK, evaluation.run.config.granularity)
    return None if reason else evaluation.plan(x, grid, scope)


def same(a: MergePlan, b: MergePlan) -> bool:
    names = "destinations", "merge_weights", "unmerge_weights"
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in names)


def image_of(plan: MergePlan, n: int) -> MergePlan:
    """Return the plan of image n of a batch."""
    budget = plan.budget
    own = budget.changed(lambda _, t: t[n : n + 1]) if budget.adaptive else budget
    return replace(plan.changed(lambda _, t: t[n : n + 1]), budget=own)
