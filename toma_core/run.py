"""What lives exactly as long as one sampling run: plans, layouts on the device, counters.

To reset, throw the `RunState` away. Nothing here is shared between runs, and nothing outlives one.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from .cache import ResidualCache
from .config import SimilarityFrom, ToMAConfig
from .kernels.dispatch import Choice, Dispatch, Uses
from .maps import draw_map
from .merge import MergePlan, stacked, weigh
from .prediction import picture_tokens
from .reasons import Message, Reason
from .schedule import LASTING, Schedule, StepPlan
from .selection import cosine_similarity, in_parts, select, select_at_random
from .stats import RunStats
from .tiles import TileBatch
from .windows import Budget, Grid, Windows, make_budget, make_windows

# scope and copy, grid, ratio, images, dtype, device
_PlanKey = tuple[tuple[Hashable, Hashable], Grid, float, int, torch.dtype, torch.device]
# scope, grid, ratio, copies, images of each, dtype, device
_StackKey = tuple[Hashable, Grid, float, tuple[Hashable, ...], int, torch.dtype, torch.device]


@dataclass(frozen=True)
class _Entry:
    """A plan for one copy of each image, when it was made, and the same plan for a batch of several copies."""

    plan: MergePlan
    selection: int
    weighing: int
    repeated: dict[int, MergePlan]

    @property
    def lasts(self) -> bool:
        """Whether the plan is of tokens that show the same in the whole run."""
        return self.selection == LASTING


@dataclass(eq=False)
class RunState:
    """The state of one run. `schedule` holds the frozen settings; everything else is filled in as the run goes.
    oom_scopes: the scopes for whose plans there was no memory; with the next evaluation all is whole. kv_cache: whether
    merged blocks look at all tokens; packs: at what is kept of them in four bits a number. otherwise: the settings
    where that turns out not to be possible. attention_hook_missed, served: whether attention of a block that should
    have looked did not ask what at, and whether that of any did. tiles: whether calls are about pieces of the
    latent."""

    schedule: Schedule
    oom_scopes: set[Hashable] = field(default_factory=set)
    stats: RunStats = field(default_factory=RunStats)
    dispatch: Dispatch = field(default_factory=Dispatch)
    _plans: dict[_PlanKey, _Entry] = field(default_factory=dict)
    _stacks: dict[_StackKey, tuple[list[MergePlan], MergePlan]] = field(default_factory=dict)
    _layouts: dict[Hashable, tuple[Windows, Budget]] = field(default_factory=dict)
    _tried: set[Hashable] = field(default_factory=set)
    cache: ResidualCache = field(default_factory=ResidualCache)
    kv_cache: bool = field(init=False)
    quantized: bool = False
    otherwise: ToMAConfig | None = None
    attention_hook_missed: bool = False
    tiles: bool = False
    attention_hook_called: bool = False

    def __post_init__(self) -> None:
        self.kv_cache = self.config.kv_cache and self.config.uses_cache
        self.cache.pack, self.cache.unpack = self.dispatch.pack, self.dispatch.unpack

    @property
    def config(self) -> ToMAConfig:
        return self.schedule.config

    def begins(self) -> None:
        """An evaluation of the sampler begins: what was seen in the one before has its consequences now, for all calls
        of the model in it alike."""
        unasked = (
            Reason.KV_FOREIGN_ATTENTION() if self.attention_hook_missed and not self.attention_hook_called else None
        )
        reason = Reason.TILES() if self.tiles else unasked
        if self.kv_cache and reason and self.otherwise is not None:
            self._look_no_more(self.otherwise, reason)
        self.cache.limit()

    def _look_no_more(self, config: ToMAConfig, reason: Message) -> None:
        """Merged blocks cannot attend to all tokens after all: from here on as presets are without that. They leave
        other blocks whole, so that detail is kept anew."""
        self.schedule, self.kv_cache, self.quantized = replace(self.schedule, config=config), False, False
        self.stats.without_kv_cache = reason
        for made in (self._plans, self._stacks, self._layouts, self.cache):
            made.clear()

    def plan(
        self,
        x: Tensor,
        grid: Grid,
        scope: Hashable,
        step: StepPlan,
        plan_keys: tuple[Hashable, ...],
        content_independent: Message | None = None,
        piece: TileBatch | None = None,
        pictures: tuple[Tensor, ...] = (),
    ) -> MergePlan:
        """The plan for tokens x of (B, N, C) on `grid`, made if there is none or it is too old.

        scope: which blocks share a plan. copies: for each of the equal chunks of the batch, a key for what part of
        the latent it shows. Chunks with one key (as cond and uncond have) hold the same images under different
        conditioning: they share one plan, made from the first of them, in this call and in later ones.
        blind: why destinations must not depend on x, if they must not: then they lie at random, and only weights are
        made from x. piece: what the call shows, if no key tells; a plan of it is not for
        other calls but those of its evaluation. pictures: for each of the chunks (b, C', ..., H', W'), what plans are
        made from in place of x; all blocks share them then.
        """
        if piece is not None:
            return self._plan_of(piece, x, grid, scope, step, content_independent)
        chunk = x.shape[0] // len(plan_keys)
        keys = list(dict.fromkeys(plan_keys))
        if any(len(picture) != chunk for picture in pictures):
            pictures = ()  # somebody has changed the batch inside
        if pictures:
            scope = SimilarityFrom.PREDICTION

        def entry_of(key: Hashable) -> _Entry:
            place = plan_keys.index(key)
            tokens = x[place * chunk : (place + 1) * chunk]
            return self._entry(
                tokens, grid, (scope, key), step, content_independent, pictures[place] if pictures else None
            )

        if len(keys) == 1:
            entry = entry_of(keys[0])
            if len(plan_keys) not in entry.repeated:
                entry.repeated[len(plan_keys)] = entry.plan.repeat(len(plan_keys))
            return entry.repeated[len(plan_keys)]
        plans = {key: entry_of(key).plan for key in keys}
        cond_keys = [plans[key] for key in plan_keys]
        place = (scope, grid, step.ratio, plan_keys, chunk, x.dtype, x.device)
        stack = self._stacks.get(place)
        if stack is None or any(old is not new for old, new in zip(stack[0], cond_keys, strict=True)):
            stack = self._stacks[place] = cond_keys, stacked(cond_keys)
        return stack[1]

    def _plan_of(
        self,
        piece: TileBatch,
        x: Tensor,
        grid: Grid,
        scope: Hashable,
        step: StepPlan,
        content_independent: Message | None,
    ) -> MergePlan:
        key = scope, grid, step.ratio
        if key not in piece.plans:
            tokens = piece.tokens(x)
            plan = piece.settled(key, self._selected(tokens, tokens, grid, step, content_independent, even=True))
            self.stats.count_plan(grid, plan.kept, selected=True)
            # In the place of the last piece's, so that it can be drawn.
            self._remember(((scope, TileBatch), grid, step.ratio, 0, x.dtype, x.device), plan, step)
        return piece.plans[key]

    def kept(self, grid: Grid, step: StepPlan, device: torch.device) -> int:
        """How many tokens of a grid are left where it is merged."""
        return self._layout(grid, step, device)[1].total

    def _entry(
        self,
        x: Tensor,
        grid: Grid,
        scope: tuple[Hashable, Hashable],
        step: StepPlan,
        content_independent: Message | None,
        picture: Tensor | None = None,
    ) -> _Entry:
        key = (scope, grid, step.ratio, x.shape[0], x.dtype, x.device)
        old = self._plans.get(key)
        if old is not None and old.selection == step.selection:
            if old.weighing == step.weighing:
                return old
            plan, selected = self._reweighed(x, old.plan, _features(x, grid, picture)), False
        else:
            # Of what tokens show while they are noise, no window has more than another. References are never noise.
            noisy = picture is None and step.selection != LASTING
            even = noisy and self.config.similarity_from is SimilarityFrom.PREDICTION
            plan, selected = self._selected(x, _features(x, grid, picture), grid, step, content_independent, even), True
        self.stats.count_plan(grid, plan.kept, selected)
        return self._remember(key, plan, step)

    def _remember(self, key: _PlanKey, plan: MergePlan, step: StepPlan) -> _Entry:
        entry = _Entry(plan, step.selection, step.weighing, {1: plan})
        self._forget(key[1], entry, step.in_use)
        # To the end of the dict, so that `draw` finds the plan made last.
        self._plans.pop(key, None)
        self._plans[key] = entry
        return entry

    def _forget(self, grid: Grid, entry: _Entry, ratios: frozenset[float]) -> None:
        """Drop the plans of a grid that are older than this one, or of none of these ratios, which nobody asks for
        again: of windows over a batch that move there would be ever more. Those that last, of references as large as
        the image, are no older than its own. Several devices may do so at once."""
        old = [
            key
            for key, other in list(self._plans.items())
            if key[1] == grid
            and (other.selection != entry.selection or key[2] not in ratios)
            and other.lasts == entry.lasts
        ]
        for key in old:
            self._plans.pop(key, None)
        gone = {(key[0][0], *key[1:3]) for key in old}
        if gone:
            self._stacks = {place: stack for place, stack in list(self._stacks.items()) if place[:3] not in gone}

    def _selected(
        self,
        x: Tensor,
        features: Tensor,
        grid: Grid,
        step: StepPlan,
        content_independent: Message | None,
        even: bool = False,
    ) -> MergePlan:
        """even: each window has the same share of destinations, whatever the settings say."""
        config = self.config
        if content_independent:
            self.stats.chosen_blindly(content_independent)
        even = even or bool(content_independent) or not config.adapts_budget
        windows, budget = self._laid_out(features, grid, step, even)
        choice = self._choose(x, features, windows, budget, even)
        self.stats.computed_by(choice.message)
        kernels = choice.kernels
        if kernels is not None and not content_independent:
            return MergePlan(
                windows, budget, *kernels.select_weigh(features, windows, budget, config.sharpness), kernels
            )
        tokens = windows.split(features)
        if content_independent:
            picks = select_at_random(len(x), windows, budget, step.selection)
        else:
            picks = select(in_parts(cosine_similarity, tokens), windows, budget)
        plan = weigh(tokens, picks, windows, budget, config.sharpness, x.dtype)
        return replace(plan, kernels=kernels)

    def _choose(self, x: Tensor, features: Tensor, windows: Windows, budget: Budget, even: bool) -> Choice:
        """Which kernels compute a plan. Those of all steps are made and tried at the first: none later, in a run."""
        config, dispatch = self.config, self.dispatch
        uses = Uses(config.weight_interval % config.selection_interval != 0, config.uses_cache)
        choice = dispatch.pick(x, windows, budget, features, uses)
        grid = windows.grid
        place = (grid, even, x.shape[2], features.shape[2], x.dtype, x.device)
        if choice.kernels is not None and dispatch.given is None and place not in self._tried:
            self._tried.add(place)
            for kind in self.schedule.kinds:
                dispatch.pick(x, *self._laid_out(features, grid, kind, even), features, uses)
        return choice

    def _reweighed(self, x: Tensor, plan: MergePlan, features: Tensor) -> MergePlan:
        config, kernels, windows, budget = self.config, plan.kernels, plan.windows, plan.budget
        if kernels is not None:
            M, back = kernels.weigh(features, plan.picks, windows, budget, config.sharpness)
            return replace(plan, merge_weights=M, unmerge_weights=back)
        return weigh(windows.split(features), plan.picks, windows, budget, config.sharpness, x.dtype)

    def _laid_out(self, features: Tensor, grid: Grid, step: StepPlan, even: bool) -> tuple[Windows, Budget]:
        """Windows, and what each of them keeps: the same share, or as much as there is in it."""
        windows, budget = self._layout(grid, step, features.device)
        return windows, budget if even else self.dispatch.moved(features, windows, budget)

    def _layout(self, grid: Grid, step: StepPlan, device: torch.device) -> tuple[Windows, Budget]:
        config = self.config
        shifted = config.shifts_windows and step.selection % 2 == 1
        key = (grid, step.ratio, shifted, device)
        if key not in self._layouts:
            *frames, height, width = grid
            windows = make_windows(height, width, config.window_shape, config.window_size, shifted, *frames)
            budget = make_budget(windows.counts, step.ratio, windows.frames)
            self._layouts[key] = windows.to(device), budget.to(device)
        return self._layouts[key]

    def __deepcopy__(self, memo: dict[int, object]) -> RunState:
        # It rides in options that others may copy while a run is on; what they then call belongs to the same run.
        return self

    def draw(self) -> None:
        """Keep a drawing of the last plan of each grid in the stats. The image is computed by now, and what is only
        shown must not cost it: if drawing fails, say so and go without."""
        last = {key[1]: entry.plan for key, entry in self._plans.items() if not entry.lasts}
        try:
            self.stats.maps = {grid: draw_map(plan) for grid, plan in last.items()}
        except Exception as error:
            # As text: who keeps log records would keep the error, and with it the frames and tensors of the run.
            logging.warning("ToMA: the windows of this run could not be drawn: %s", str(error))

    def close(self) -> RunStats:
        """Drop every tensor of the run and hand over its stats."""
        self.stats.full_by = self.schedule.why_full()
        self.stats.cache_bytes, self.stats.cache_disabled = self.cache.most, self.cache.disabled
        self._plans.clear()
        self._stacks.clear()
        self._layouts.clear()
        self.cache.clear()
        return self.stats


def _features(x: Tensor, grid: Grid, picture: Tensor | None) -> Tensor:
    """What tokens x of (B, N, C) are compared by, (B, N, C'): the picture that they show, or themselves."""
    return x if picture is None else picture_tokens(picture, grid, x)
