"""Run a block on merged tokens:

    reduced = reduce(x, plan)
    out = block(reduced)
    y = restore(out, reduced, x, plan)

with `plan = evaluation.plan(x, grid, scope)`: a stored plan, a new plan, or None to compute all tokens.

In a run with a KV cache, a refresh stores a block's update, keys and values, and a merged step propagates them. The
paper has no caches. Caches work because a block's update changes slowly from step to step. Its fine structure, which
merging loses, changes slowest.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from . import cost_model
from .cache import Cache, Keys
from .config import Granularity
from .coverage import Coverage
from .latent_regression import LatentChange, Rotation
from .merge import MergePlan, gather_destinations, merge, unmerge_residual
from .reasons import Message, Reason
from .run import RunState
from .schedule import LASTING, StepMode, StepPlan
from .tiles import TileBatch
from .windows import Grid


@dataclass(frozen=True, eq=False)
class Refresh:
    """The cache entry of a chain's update, or of a block's keys or values, in an evaluation that writes the entry."""

    coverage: Coverage
    keys: Keys  # one for each equal chunk of the batch
    kv: bool = False  # keys or values

    def store(self, update: Tensor) -> None:
        """Cache an update, (B, N, C)."""
        self.coverage.store(self.keys, update, self.kv)


@dataclass(frozen=True, eq=False)
class Cached:
    """The cache entry of a chain's update, or of a block's keys or values, in a merged evaluation that reads the
    entry."""

    cache: Cache
    keys: Keys  # one for each equal chunk of the batch
    update: Tensor  # (B, N, C), as cached
    kv: bool = False  # keys or values
    change: LatentChange | None = None  # change of the latent; None if unknown, and for tokens of reference images

    def propagate(self, fresh: Tensor, plan: MergePlan, rotation: Rotation | None = None) -> Tensor:
        """Propagate the update by the change at destinations (see `latent_regression`); cache and return the result,
        (B, N, C). Without a regression, the result is update + unmerge(fresh - update at destinations).

        fresh: (B, D, C), the new values at destinations. rotation: of the keys, if keys are propagated. Raises
        `torch.OutOfMemoryError`.
        """
        regression = None if self.change is None else self.change.regression(plan)
        if regression is not None:
            propagated = regression.propagate(self.update, fresh, rotation)
        else:
            propagated = unmerge_residual(fresh, gather_destinations(self.update, plan), self.update, plan)
        if propagated.dtype is torch.float16:
            # Clamp, because the next step would subtract an infinity from itself and get NaN.
            propagated = propagated.clamp_(-65504, 65504)
        self.cache.put(self.keys, propagated, self.kv)
        return propagated


@dataclass(frozen=True, eq=False)
class Evaluation:
    """What blocks need to know about one call of the model."""

    run: RunState
    step_plan: StepPlan
    plan_keys: tuple[Hashable, ...] = (None,)  # one for each equal chunk of the batch, see `RunState.plan`
    cond_keys: tuple[Hashable, ...] = ()  # one for each condition's chunk, all distinct; `plan_keys` if not given
    tile: TileBatch | None = None  # see `RunState.plan`
    pictures: tuple[Tensor, ...] = ()  # see `RunState.plan`
    images: int = 0  # images in the call's batch; 0 if unknown
    change: LatentChange | None = None  # change of the latent since the caches were written; None if unknown

    def __post_init__(self) -> None:
        object.__setattr__(self, "cond_keys", self.cond_keys or self.plan_keys)

    def of(self, block: str) -> Evaluation:
        """Return the evaluation with the ratio of this block."""
        step = self.step_plan.of(block)
        return self if step is self.step_plan else replace(self, step_plan=step)

    def again(self) -> Evaluation:
        """Return a copy with separate cache keys, used if another node calls the model a second time."""
        return replace(self, cond_keys=tuple((key, "again") for key in self.cond_keys))

    def plan(self, x: Tensor, grid: Grid, scope: Hashable) -> MergePlan | None:
        """Return the plan for tokens x of (B, N, C). Blocks with the same `scope` share the plan. Return None in a
        refresh: the next plan is made from the picture that the refresh predicts."""
        if self.refreshes:
            self.run.computed(grid, self.plan_keys)
            return None
        return self.run.plan(x, grid, scope, self.step_plan, self.plan_keys, self.tile, self.pictures)

    def lasting_plan(self, x: Tensor, grid: Grid, scope: Hashable) -> MergePlan:
        """Return the plan for tokens x of (B, N, C) that show the same content during the entire run, as tokens of a
        reference image do. Each condition has its own plan, because conditions may have different reference images."""
        return self.run.plan(x, grid, scope, self.lasting, self.cond_keys)

    @property
    def lasting(self) -> StepPlan:
        """The step plan for tokens that show the same content during the entire run."""
        return replace(self.step_plan, selection=LASTING, weighing=LASTING)

    def cached(self, block: str, x: Tensor, kv: bool = False, of_latent: bool = True) -> Refresh | Cached | None:
        """Return the block's cache entry for tokens x of (B, N, C): an entry to write in a refresh, or to read in a
        merged step. Return None without caches, or if no cached tensor has the shape, dtype and device of x.

        kv: whether the entry holds keys or values. of_latent: False for tokens of a reference image.
        """
        if not self.step_plan.mode.caches:
            return None
        run, keys = self.run, self.keys(block)
        if self.refreshes:
            return Refresh(run.coverage, keys, kv)
        update = run.cache.read(keys, x)
        return None if update is None else Cached(run.cache, keys, update, kv, self.change if of_latent else None)

    def keys(self, block: str) -> Keys:
        """Return a block's cache keys, one for each condition."""
        return tuple((block, cond) for cond in self.cond_keys)

    @property
    def refreshes(self) -> bool:
        """Whether this evaluation computes all tokens to refresh the caches."""
        return self.step_plan.mode is StepMode.REFRESH

    def obstacle(self, x: Tensor, block: cost_model.Block, granularity: Granularity) -> Message | None:
        """Return why tokens x of (B, N, C) are not merged in a block of this cost, None if they are merged."""
        if round(self.step_plan.ratio * x.shape[1]) == 0:
            return Reason.NOTHING_TO_MERGE()
        if self.images and len(x) != self.images:
            return Reason.IMAGES_CHANGED()
        images, tokens, width = len(x) // len(self.cond_keys), *x.shape[1:]
        if least := self.run.config.min_tokens:  # a number set by the user applies to every device
            return Reason.TOO_FEW_TOKENS(least=least) if tokens < least else None
        card = cost_model.card_of(x.device)
        return cost_model.too_little(tokens, images, width, x.dtype, card, block, granularity)


def reduce(x: Tensor, plan: MergePlan | None, cached: Refresh | Cached | None = None) -> Tensor:
    """Merge (B, N, C) to (B, D, C); return x itself without a plan or in a refresh."""
    if plan is None or isinstance(cached, Refresh):
        return x
    # With a cached update, do not average tokens. Means hold less noise than the model expects, and for that reason
    # alone their update would differ from the cached update.
    return merge(x, plan) if cached is None else gather_destinations(x, plan)


def restore(
    out: Tensor,
    reduced: Tensor,
    x: Tensor,
    plan: MergePlan | None,
    cached: Refresh | Cached | None = None,
) -> Tensor:
    """Return x + unmerge(out - reduced), (B, N, C). Without a plan and in a refresh, return `out` itself; a refresh
    also caches out - x. With a cached update, return x + the propagated update, which is cached in turn."""
    if isinstance(cached, Refresh):
        cached.store(out - x)
        return out
    if plan is None:
        return out
    if cached is None:
        return unmerge_residual(out, reduced, x, plan)
    return x + cached.propagate(out - reduced, plan)
