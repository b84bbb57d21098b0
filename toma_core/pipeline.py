"""Run a block on merged tokens:

    reduced = reduce(x, plan)
    out = block(reduced)
    y = restore(out, reduced, x, plan)

with `plan = evaluation.plan(x, grid, scope)`: a stored plan, a new plan, or None to compute all tokens.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

from torch import Tensor

from . import cost_model
from .cache import Keys
from .config import Granularity
from .latent_regression import LatentChange
from .merge import MergePlan, gather_destinations, merge, unmerge_residual
from .propagation import Cached, Refresh, unmerge_residual_cached
from .reasons import Message, Reason
from .run import RunState
from .schedule import LASTING, StepMode, StepPlan
from .tiles import TileBatch
from .windows import Grid


@dataclass(frozen=True, eq=False)
class Evaluation:
    """One call of the model."""

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
        """Return this evaluation with separate cache keys, for a second call of the model in the same evaluation."""
        return replace(self, cond_keys=tuple((key, "again") for key in self.cond_keys))

    def plan(self, x: Tensor, grid: Grid, scope: Hashable) -> MergePlan | None:
        """Return the plan for tokens x of (B, N, C). Blocks with one `scope` share a plan. None in a refresh if plans
        are made from predicted pictures, because the next plan is made from this refresh's prediction."""
        if self.refreshes:
            self.run.computed(grid, self.plan_keys)
            if self.run.config.uses_prediction:
                return None
        return self.run.plan(x, grid, scope, self.step_plan, self.plan_keys, self.tile, self.pictures)

    def lasting_plan(self, x: Tensor, grid: Grid, scope: Hashable) -> MergePlan:
        """Return the plan for tokens x of (B, N, C) that show the same content during the entire run, such as those of
        a reference image. Each condition has its own plan, because conditions may have different reference images."""
        return self.run.plan(x, grid, scope, self.lasting, self.cond_keys)

    @property
    def lasting(self) -> StepPlan:
        """The step plan for tokens that show the same content during the entire run."""
        return replace(self.step_plan, selection=LASTING, weighing=LASTING)

    def cached(self, block: str, x: Tensor, kv: bool = False, of_latent: bool = True) -> Refresh | Cached | None:
        """Return the block's cache entry for tokens x of (B, N, C): one to write in a refresh, one to read in a merged
        step. None if the evaluation uses no caches, or no cached tensor has the shape, dtype and device of x.

        kv: whether the entry holds keys or values. of_latent: whether the tokens are the latent's, not a reference
        image's.
        """
        if not self.step_plan.mode.caches:
            return None
        run, keys = self.run, self.keys(block)
        quantized = kv and run.quantized
        if self.refreshes:
            return Refresh(run.coverage, keys, quantized, kv)
        update = run.cache.read(keys, x)
        change = self.change if of_latent else None
        return None if update is None else Cached(run.cache, keys, update, quantized, kv, change)

    def keys(self, block: str) -> Keys:
        """Return a block's cache keys, one for each condition."""
        return tuple((block, cond) for cond in self.cond_keys)

    @property
    def kv_cache(self) -> bool:
        """Whether this evaluation refreshes or uses a KV cache."""
        return self.run.kv_cache and self.step_plan.mode.caches

    @property
    def refreshes(self) -> bool:
        """Whether this evaluation computes all tokens to refresh the caches."""
        return self.step_plan.mode is StepMode.REFRESH

    def obstacle(self, x: Tensor, block: cost_model.Block, granularity: Granularity) -> Message | None:
        """Return why tokens x of (B, N, C) are not merged in a block of this cost, None if they are."""
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
    # With a cached update, blocks compute the destination tokens themselves, not weighted means. Means hold less noise
    # than the model expects, so their update would differ from the cached one for that reason alone.
    return merge(x, plan) if cached is None else gather_destinations(x, plan)


def restore(
    out: Tensor,
    reduced: Tensor,
    x: Tensor,
    plan: MergePlan | None,
    cached: Refresh | Cached | None = None,
    exact: bool = False,
) -> Tensor:
    """Return x + unmerge(out - reduced), (B, N, C); `out` itself without a plan or in a refresh, which caches out - x.

    Only the block's update is unmerged; x passes unchanged. cached: the block's cache entry. exact: whether
    destinations attended to all tokens; the change of their update then has weight 1, and the propagated update is
    cached.
    """
    if isinstance(cached, Refresh):
        cached.store(out - x)
        return out
    if plan is None:
        return out
    if cached is None:
        return unmerge_residual(out, reduced, x, plan)
    if exact:
        return x + cached.propagate(out - reduced, plan)
    return unmerge_residual_cached(out, reduced, x, cached.update, plan)
