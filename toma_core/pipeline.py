"""The front door. A block on merged tokens is three lines:

    reduced = reduce(x, plan)
    out = block(reduced)
    y = restore(out, reduced, x, plan)

with `plan = plan_for(x, grid, scope, evaluation)`: the stored one, a fresh one, or None to leave x whole.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

from torch import Tensor

from .cache import CachedBlock, unmerge_residual_cached
from .config import Granularity, SimilarityFrom
from .cost_model import UNET_BLOCK, Block, obstacle
from .merge import MergePlan, merge, pick, unmerge_residual
from .reasons import Message, Reason
from .run import RunState
from .schedule import LASTING, StepMode, StepPlan
from .tiles import TileBatch
from .windows import Grid


@dataclass(frozen=True, eq=False)
class Evaluation:
    """One call of the model: the run it belongs to, what it does, and what its batch holds.

    copies: one key per equal chunk of the batch, see `RunState.plan`. parts: one key per condition's chunk, for all
    that tells it from the others; the same as copies if not given. blind, piece, pictures: see `RunState.plan`.
    """

    run: RunState
    step_plan: StepPlan
    plan_keys: tuple[Hashable, ...] = (None,)
    cond_keys: tuple[Hashable, ...] = ()
    content_independent: Message | None = None
    piece: TileBatch | None = None
    pictures: tuple[Tensor, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "cond_keys", self.cond_keys or self.plan_keys)

    def of(self, block: str) -> Evaluation:
        """The same for a block, by its name: it may be merged at a ratio of its own."""
        step = self.step_plan.of(block)
        return self if step is self.step_plan else replace(self, step_plan=step)

    def plan(self, x: Tensor, grid: Grid, scope: Hashable) -> MergePlan | None:
        """The plan for tokens x of (B, N, C), the stored one or a fresh one. None where none is needed: this
        evaluation keeps detail, and the next one's plan is of the picture that this one predicts."""
        if self.refreshes and self.run.config.similarity_from is SimilarityFrom.PREDICTION:
            return None
        return self.run.plan(
            x, grid, scope, self.step_plan, self.plan_keys, self.content_independent, self.piece, self.pictures
        )

    def lasting_plan(self, x: Tensor, grid: Grid, scope: Hashable) -> MergePlan:
        """The plan for tokens x of (B, N, C) that show the same in the whole run, as those of a reference image. Of
        its own for each condition: they may have different ones."""
        return self.run.plan(x, grid, scope, self.lasting, self.cond_keys, self.content_independent)

    @property
    def lasting(self) -> StepPlan:
        """The step plan for tokens that show the same in the whole run."""
        return replace(self.step_plan, selection=LASTING, weighing=LASTING)

    def detail(self, block: str, x: Tensor, quantized: bool = False) -> CachedBlock | None:
        """The part in the reuse of detail of the block that is given x of (B, N, C); None if there is none, or if
        nothing was kept of it that fits. Blocks have different names. packs: see `Detail`."""
        run = self.run
        if not self.step_plan.mode.caches:
            return None
        keys = tuple((block, part) for part in self.cond_keys)
        if self.refreshes:
            return CachedBlock(run.cache, keys, quantized=quantized)
        kept = run.cache.kept(keys, x)
        return None if kept is None else CachedBlock(run.cache, keys, kept, quantized)

    @property
    def kv_cache(self) -> bool:
        """Whether merged blocks look at all tokens in this evaluation, or keep what the next ones look at."""
        return self.run.kv_cache and self.step_plan.mode.caches

    @property
    def refreshes(self) -> bool:
        """Whether this evaluation computes all tokens, to refresh the caches."""
        return self.step_plan.mode is StepMode.REFRESH

    def obstacle(self, x: Tensor, block: Block = UNET_BLOCK, around: Granularity | None = None) -> Message | None:
        """Why (B, N, C) tokens x that go through such a block are not merged, None if they are.
        around: what they would be merged around; None if that is what the settings say."""
        if round(self.step_plan.ratio * x.shape[1]) == 0:
            return Reason.NOTHING_TO_MERGE()
        if self.piece is not None and len(x) != len(self.piece.latent):
            return Reason.IMAGES_CHANGED()
        config = self.run.config
        return obstacle(x, x.shape[0] // len(self.cond_keys), config.min_tokens, block, around or config.granularity)


def plan_for(
    x: Tensor,
    grid: Grid,
    scope: Hashable,
    evaluation: Evaluation,
    block: Block = UNET_BLOCK,
    around: Granularity | None = None,
) -> MergePlan | None:
    """The plan for tokens x of (B, N, C), or None if they are to stay as they are, see `Evaluation.obstacle`.
    Blocks with one `scope` share a plan."""
    return None if evaluation.obstacle(x, block, around) else evaluation.plan(x, grid, scope)


def reduce(x: Tensor, plan: MergePlan | None, detail: CachedBlock | None = None) -> Tensor:
    """(B, N, C) -> (B, D, C), or x itself without a plan or when its detail is kept.

    detail: where a block's own update is at hand, its destinations are taken as they are, to be compared with it. Means
    hold less noise than the model expects at this step, and change for that reason alone.
    """
    if plan is None or (detail is not None and detail.kept is None):
        return x
    return merge(x, plan) if detail is None else pick(x, plan)


def restore(
    out: Tensor,
    reduced: Tensor,
    x: Tensor,
    plan: MergePlan | None,
    detail: CachedBlock | None = None,
    exact: bool = False,
) -> Tensor:
    """Give every token its destination's update: x + unmerge(out - reduced), (B, N, C); `out` itself without a plan.

    The block's residual stream goes through untouched, so that merging blurs what the block adds, not what it got.
    detail: the update is kept where the block ran whole, and what merged steps begin with, see `reuse`. exact:
    destinations have seen all tokens, so that what they show of a change is the step's alone: all of it is believed.
    """
    kept = None if detail is None else detail.kept
    if detail is not None and kept is None:
        detail.keep(out - x)
        return out
    if plan is None:
        return out
    if detail is None or kept is None:
        return unmerge_residual(out, reduced, x, plan)
    return x + detail.propagate(out - reduced, plan) if exact else unmerge_residual_cached(out, reduced, x, kept, plan)
