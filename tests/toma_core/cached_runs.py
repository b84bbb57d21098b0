"""Provide helpers for runs with a KV cache on toy blocks, whose updates are cached."""

from collections.abc import Callable

import torch
from torch import Tensor

from tests.toma_core.plans import plan_for, randn
from toma_core import Evaluation, RunState, Schedule, StepMode, StepPlan, ToMAConfig, decide, reduce, restore
from toma_core.decision import Facts
from toma_core.merge import MergePlan

GRID = (8, 8)
SETTINGS = {"min_tokens": 4, "full_step_interval": 3, "weight_interval": 10, "kv_cache": True}


def run_of(**settings: object) -> RunState:
    config = ToMAConfig(**{**SETTINGS, **settings})  # type: ignore[arg-type]
    return RunState(Schedule(config, tuple(float(10 - i) for i in range(10))))


def at(run: RunState, step: int, *cond_keys: str, takes_part: tuple[str, ...] = ()) -> Evaluation:
    """Return the evaluation of a step for a call with the conditions `cond_keys`. An evaluation may consist of several
    calls. takes_part: the conditions of all calls of the evaluation. By default this call is the only one."""
    signatures = dict.fromkeys(takes_part or cond_keys)
    return Evaluation(run, decide(run, Facts(10.0 - step, conditions=signatures)), (None,) * len(cond_keys), cond_keys)


def merging(run: RunState, step: int, *cond_keys: str) -> Evaluation:
    """Return an evaluation that merges even if its conditions have no cached entries."""
    return Evaluation(run, run.schedule.decide(10.0 - step), (None,) * len(cond_keys), cond_keys)


def modes(run: RunState, *evaluations: tuple[int, str]) -> str:
    """Return the mode of each evaluation as a letter: full (f), refresh (r) or merged with caches (m). An evaluation is
    a pair such as (2, "ab"): step 2 with the conditions a and b."""
    said = ""
    for step, conditions in evaluations:
        said += letter(at(run, step, *conditions).step_plan)
        if said[-1] == "r":
            run.coverage.store(tuple(("block", c) for c in conditions), torch.zeros(len(conditions), 64, 6))
    return said


def letter(plan: StepPlan) -> str:
    return "frm"[list(StepMode).index(plan.mode)]


def block(x: Tensor) -> Tensor:
    """Return x plus a residual: the sine of the preceding token."""
    return x + x.roll(1, dims=1).sin()


def passed(
    x: Tensor, evaluation: Evaluation, name: str = "block", body: Callable[[Tensor], Tensor] = block
) -> tuple[Tensor, MergePlan | None]:
    """Return the tokens after a block, and the plan that merged them, or None in a refresh."""
    plan = plan_for(x, GRID, "scope", evaluation)
    detail = evaluation.cached(name, x)
    reduced = reduce(x, plan, detail)
    return restore(body(reduced), reduced, x, plan, detail), plan


def features(seed: int, batch: int = 1) -> Tensor:
    return randn(seed, batch, 64, 6)
