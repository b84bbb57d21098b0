"""The state of one sampling run: plans, layouts on the device, caches and counters."""

from __future__ import annotations

import logging
from collections.abc import Hashable
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from .cache import Cache
from .config import Granularity, ToMAConfig
from .coverage import Coverage
from .kernels.dispatch import Choice, Dispatch
from .merge import MergePlan, draw_map, stacked, weigh
from .prediction import similarity_features
from .reasons import Message, Reason
from .schedule import LASTING, Schedule, StepMode, StepPlan
from .selection import RECENT, allocate, cosine_similarity, in_parts, select, spread
from .stats import RunStats
from .tiles import TileBatch
from .windows import Grid, Layout, make_budget, make_windows


class _PlanKey(NamedTuple):
    scope: tuple[Hashable, Hashable]  # scope of the blocks that share the plan, and the key of a part of the latent
    grid: Grid
    ratio: float
    selection: int  # LASTING if the tokens show the same content during the entire run (reference images)
    images: int
    dtype: torch.dtype
    device: torch.device


@dataclass(eq=False)
class RunState:
    """The state of one run; all fields except the schedule are filled in during the run."""

    schedule: Schedule  # holds the frozen settings
    stats: RunStats = field(default_factory=RunStats)
    dispatch: Dispatch = field(default_factory=Dispatch)
    _plans: dict[_PlanKey, tuple[MergePlan, int]] = field(default_factory=dict)  # plan, generation of its weights
    # Plans and their concatenation, by the plans' ids.
    _stacks: dict[tuple[int, ...], tuple[list[MergePlan], MergePlan]] = field(default_factory=dict)
    _layouts: dict[Hashable, Layout] = field(default_factory=dict)
    # Destinations, (B, D), of the last selection since a refresh, by the plan's key with generation 0.
    _recent: dict[_PlanKey, Tensor] = field(default_factory=dict)
    _tried: set[Hashable] = field(default_factory=set)
    cache: Cache = field(default_factory=Cache)
    coverage: Coverage = field(init=False)  # records the inputs from which the cache's entries were made
    disabled_by: Message | None = None  # why all later steps are full
    tiles: bool = False  # calls of the model show tiles of the latent
    references: bool = False  # calls of the model have reference images
    attention_hook_called: bool | None = None  # in the last evaluation; None if it has ended no chain with a KV cache

    def __post_init__(self) -> None:
        self.cache.quantize = self.dispatch.quantize
        self.cache.dequantize = self.dispatch.dequantize
        self.coverage = Coverage(self.cache)

    @property
    def config(self) -> ToMAConfig:
        return self.schedule.config

    @property
    def kv_cache(self) -> bool:
        """Whether merged blocks attend to all tokens."""
        return self.config.uses_cache

    def check_kv_cache(self) -> None:
        """Merge nothing more if the last evaluation was tiled, or if no attention called ToMA's hook in it. Guidance
        may replace the attention of single blocks or calls."""
        called, self.attention_hook_called = self.attention_hook_called, None
        if self.kv_cache and not self.disabled_by and (self.tiles or called is False):
            self.disable(Reason.TILES() if self.tiles else Reason.KV_FOREIGN_ATTENTION())

    def computed(self, grid: Grid, plan_keys: tuple[Hashable, ...]) -> None:
        """Forget the last destinations in these parts of the latent, because a refresh has computed all tokens."""
        for key in [key for key in list(self._recent) if key.grid == grid and key.scope[1] in plan_keys]:
            self._recent.pop(key, None)

    def disable(self, reason: Message) -> None:
        """Drop plans and caches; all later steps are full."""
        self.disabled_by = reason
        self.stats.call_not_merged(reason)
        self._clear()

    def _clear(self) -> None:
        for made in (self._plans, self._stacks, self._layouts, self._recent, self.coverage):
            made.clear()

    def plan(
        self,
        x: Tensor,
        grid: Grid,
        scope: Hashable,
        step: StepPlan,
        plan_keys: tuple[Hashable, ...],
        tile: TileBatch | None = None,
        pictures: tuple[Tensor, ...] = (),
    ) -> MergePlan:
        """Return the plan for tokens x of (B, N, C) on `grid`; make the plan if there is none, or if it is too old.

        scope: blocks with the same scope share a plan.
        plan_keys: for each equal chunk of the batch, the part of the latent that the chunk shows. Chunks with the same
        key (cond and uncond) hold the same images and share a plan, which is made from the first of them.
        tile: the images of a call on tiles; their plan serves this evaluation only.
        pictures: one per chunk, (b, C', ..., H', W'); plans for all scopes are then made from the pictures, not from x.
        """
        if tile is not None:
            return self._tile_plan(tile, x, grid, scope, step)
        chunk = x.shape[0] // len(plan_keys)
        if any(len(picture) != chunk for picture in pictures):
            pictures = ()  # the model has changed the size of the batch
        if pictures:
            scope = "prediction"
        by_key: dict[Hashable, MergePlan] = {}
        for n, key in enumerate(plan_keys):
            if key not in by_key:
                part, picture = x[n * chunk : (n + 1) * chunk], pictures[n] if pictures else None
                by_key[key] = self._plan(part, grid, (scope, key), step, picture)
        plans = [by_key[key] for key in plan_keys]
        if len(plans) == 1:
            return plans[0]
        at = tuple(map(id, plans))
        stack = self._stacks.get(at) or (plans, stacked(plans))
        self._stacks[at] = stack
        return stack[1]

    def _tile_plan(self, tile: TileBatch, x: Tensor, grid: Grid, scope: Hashable, step: StepPlan) -> MergePlan:
        key = scope, grid, step.ratio
        if key not in tile.plans:
            tokens = x.index_select(0, tile.first)
            plan = tile.resolve(key, self._selected(tokens, tokens, grid, step, even=True))
            self.stats.count_plan(grid, plan.num_destinations, selected=True)
            # All tiles share this key, so that only the last tile's plan remains and is drawn.
            drawn = _PlanKey((scope, TileBatch), grid, step.ratio, step.selection, 0, x.dtype, x.device)
            self._remember(drawn, plan, step)
        return tile.plans[key]

    def num_destinations(self, grid: Grid, step: StepPlan, device: torch.device) -> int:
        return self._layout(grid, step, device)[1].total

    def _plan(
        self, x: Tensor, grid: Grid, scope: tuple[Hashable, Hashable], step: StepPlan, picture: Tensor | None
    ) -> MergePlan:
        """Return the plan of one part of the latent, made from tokens x, (B, N, C), or from a picture if given."""
        key = _PlanKey(scope, grid, step.ratio, step.selection, len(x), x.dtype, x.device)
        old, weighing = self._plans.get(key, (None, 0))
        if old is not None and weighing == step.weighing:
            return old
        features = x if picture is None else similarity_features(picture, grid, x)
        if old is not None:
            plan = self._reweighed(old, features)
        else:
            # Budgets follow the variance of predicted pictures and reference images, which hold no noise. Tokens are
            # mostly noise, whose variance is equal in all windows.
            even = picture is None and step.selection != LASTING
            propagates = self._by_latents(step) and step.mode is StepMode.MERGED_CACHED
            turn = key._replace(selection=0)
            plan = self._selected(x, features, grid, step, even, self._recent.get(turn) if propagates else None)
            if propagates:
                self._recent[turn] = plan.destinations
        self.stats.count_plan(grid, plan.num_destinations, selected=old is None)
        self._remember(key, plan, step)
        return plan

    def _remember(self, key: _PlanKey, plan: MergePlan, step: StepPlan) -> None:
        """Store a plan; several devices may do so at once.

        Drop plans of the same grid and kind (lasting or not) if they are of another generation, or if the step does not
        use their ratio. Such plans would accumulate where context windows move over a batch.
        """
        lasts, ratios = key.selection == LASTING, step.in_use
        rivals = [each for each in list(self._plans) if (each.grid, each.selection == LASTING) == (key.grid, lasts)]
        old = [each for each in rivals if each.selection != key.selection or each.ratio not in ratios]
        # The plan goes to the end of the dict, so that `draw` finds the latest plan of each grid.
        gone = {id(self._plans.pop(each, (None, 0))[0]) for each in (*old, key)}
        self._plans[key] = plan, step.weighing
        self._stacks = {at: stack for at, stack in list(self._stacks.items()) if gone.isdisjoint(at)}

    def _selected(
        self, x: Tensor, features: Tensor, grid: Grid, step: StepPlan, even: bool, recent: Tensor | None = None
    ) -> MergePlan:
        """Return a plan with new destinations. even: give each window destinations in proportion to its tokens, as runs
        without a KV cache always do. recent: (B, D), destinations of lower priority, only in runs with a KV cache."""
        config, priority = self.config, None
        if self.kv_cache:  # runs with a KV cache compile only the kernel with a priority
            priority = torch.ones(len(features), prod(grid), device=features.device)
            if recent is not None:
                priority.scatter_(1, recent, RECENT)
        even = even or not self.kv_cache
        layout = self._laid_out(features, grid, step, even)
        choice = self._choose(x, features, layout, even)
        self.stats.kernels.add(choice.message)
        if (kernels := choice.kernels) is not None:
            return MergePlan(*layout, *kernels.weigh(features, None, *layout, config.sharpness, priority), kernels)
        tokens = layout[0].split(features)
        slots = select(in_parts(cosine_similarity, tokens), *layout, priority)
        return weigh(tokens, slots, *layout, config.sharpness, x.dtype)

    def _reweighed(self, plan: MergePlan, features: Tensor) -> MergePlan:
        slots, layout, sharpness = plan.dest_slots, (plan.windows, plan.budget), self.config.sharpness
        if plan.kernels is None:
            return weigh(plan.windows.split(features), slots, *layout, sharpness, features.dtype)
        return MergePlan(*layout, *plan.kernels.weigh(features, slots, *layout, sharpness), plan.kernels)

    def _choose(self, x: Tensor, features: Tensor, layout: Layout, even: bool) -> Choice:
        """Return the kernels that compute a plan. In the first step, also try the kernels of later steps."""
        config, dispatch, grid = self.config, self.dispatch, layout[0].grid
        weighs = config.weight_interval % config.selection_interval != 0
        choice = dispatch.choose(x, features, layout, weighs, self.kv_cache)
        key = (grid, even, x.shape[2], features.shape[2], x.dtype, x.device)
        if choice.kernels is not None and dispatch.given is None and key not in self._tried:
            self._tried.add(key)
            for kind in self.schedule.kinds:
                dispatch.choose(x, features, self._laid_out(features, grid, kind, even), weighs, self.kv_cache)
        return choice

    def _laid_out(self, features: Tensor, grid: Grid, step: StepPlan, even: bool) -> Layout:
        windows, budget = self._layout(grid, step, features.device)
        if even:
            return windows, budget
        return windows, allocate(budget, spread(windows.split(features), windows), windows, self._by_latents(step))

    def _by_latents(self, step: StepPlan) -> bool:
        """Return whether merged steps can propagate by the change of the latent, which reference images do not have."""
        return self.kv_cache and step.selection != LASTING

    def _layout(self, grid: Grid, step: StepPlan, device: torch.device) -> Layout:
        config = self.config
        # Every second selection uses windows that are shifted by half a window; the paper does not shift windows.
        shifted = config.granularity is not Granularity.MODULE and step.selection % 2 == 1
        key = (grid, step.ratio, shifted, device)
        if key not in self._layouts:
            *frames, height, width = grid
            windows = make_windows(height, width, config.window_size, shifted, *frames)
            budget = make_budget(windows.counts, step.ratio, windows.frames)
            self._layouts[key] = windows.to(device), budget.to(device)
        return self._layouts[key]

    def __deepcopy__(self, memo: dict[int, object]) -> RunState:
        # Blocks hold the run while their `forward` is replaced. If another node copies a block, block and copy share
        # the run.
        return self

    def draw(self) -> None:
        """Store a map of the last plan of each grid in the stats. If drawing fails, only log a warning."""
        last = {key.grid: plan for key, (plan, _) in self._plans.items() if key.selection != LASTING}
        try:
            self.stats.maps = {grid: draw_map(plan) for grid, plan in last.items()}
        except Exception as error:
            # Log the error's text only, because a log record with the error itself would keep the run's tensors alive.
            logging.warning("ToMA: the windows of this run could not be drawn: %s", str(error))

    def close(self) -> RunStats:
        """Drop every tensor of the run and return its stats."""
        self.stats.full_by = self.schedule.why_full()
        self.stats.cache_bytes = self.cache.peak_bytes
        if self.cache.host is not None:
            self.stats.kv_place, self.stats.kv_pinned = self.cache.host.peak, self.cache.host.pinned
        self._clear()
        return self.stats
