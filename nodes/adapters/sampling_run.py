"""The state of one sampling run, and of its evaluation in progress: conditions, and tiles of the latent so far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any
from uuid import uuid4
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ...toma_core import Evaluation, RunState, Schedule, StepMode, StepPlan, ToMAConfig, decide
from ...toma_core.decision import Facts, decide_call, decide_tiles, out_of_memory
from ...toma_core.latent_regression import LatentChange
from ...toma_core.reasons import Message, Reason
from ...toma_core.schedule import RatioSchedule
from ...toma_core.stats import RunStats
from ...toma_core.tiles import TileBatch
from .conditions import Contents, area_size, chunks_of, crop, frames_of, is_active, patches_of, set_hooks, state_of
from .origin import foreign_positions
from .sigmas import SigmaTracker
from .streams import Shapes, first
from .trajectory import Trajectory

# A run that begins below this share of the highest noise level begins with an image, not with pure noise.
_ALL_NOISE = 0.99


def records_gradients() -> bool:
    """Whether autograd records the model's computation, as in training; nothing may be merged or cached then."""
    return torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


@dataclass(eq=False)
class SamplingRun:
    """One sampling run: its state, and the plan of the evaluation in progress."""

    run: RunState
    step_plan: StepPlan  # plan of the evaluation in progress
    tracker: SigmaTracker = field(default_factory=SigmaTracker)
    contents: Contents = field(default_factory=Contents)
    shapes: Shapes | None = None  # shapes of the latent's streams, if it has several
    areas: dict[Hashable, Sequence[int]] = field(default_factory=dict)  # the area of each condition that has one
    trajectory: Trajectory = field(default_factory=Trajectory)
    # State of the evaluation in progress.
    sigma: float | None = None  # as passed to the model; None before the run's first evaluation
    latent_shape: tuple[int, ...] = ()  # () if unknown
    patches: Hashable = ()  # patches of the model, by name
    several_devices: bool = False  # whether conditions may run on several devices
    counts: Counter[Hashable] = field(default_factory=Counter)  # calls so far, by condition and key
    calls: int = 0  # calls of `observe` in this evaluation
    merged_calls: int = 0  # how many of these calls merge
    tiles: dict[Hashable, tuple[Hashable, list[TileBatch]]] = field(default_factory=dict)  # by shape and device
    _lock: Lock = field(default_factory=Lock)
    _key: str = field(default_factory=lambda: uuid4().hex)  # represents the run when it is copied or pickled

    @classmethod
    def start(
        cls,
        config: ToMAConfig,
        model_sampling: Any,
        sigmas: list[float],
        ratio_schedule: RatioSchedule = (),
        takes_frames: bool = False,
    ) -> SamplingRun:
        """Start a run. sigmas: one per step, then the sigma at the run's end. ratio_schedule: see `Schedule`.
        takes_frames: whether the model is for videos. Two such models may sample one video, each in its own run."""
        first, last = config.start_percent, config.end_percent
        start = float(model_sampling.percent_to_sigma(first)) if first > 0 else float("inf")
        end = float(model_sampling.percent_to_sigma(last)) if last < 1 else float("-inf")
        finishes = sigmas[-1:] == [0.0]
        continues_run = takes_frames and bool(sigmas) and sigmas[0] < _ALL_NOISE * float(model_sampling.sigma_max)
        run = RunState(Schedule(config, tuple(sigmas[:-1]), start, end, finishes, continues_run, ratio_schedule))
        run.stats.total_steps, run.stats.by_profile = len(sigmas[:-1]), bool(ratio_schedule)
        return cls(run, StepPlan(0))

    def next(self, timestep: Tensor) -> None:
        """Begin an evaluation of the sampler at this noise level. Until `observe` decides, the evaluation is full."""
        self.step_plan = self.step_plan.with_mode(StepMode.FULL)
        self.tracker.next(timestep)
        self.trajectory.next()
        self._reset()

    def predicted(self, image: Any) -> None:
        if isinstance(image, Tensor) and not records_gradients():
            self.trajectory.predicted(first(image, self.shapes))

    def close(self) -> RunStats:
        """End the run, also after an error: drop the tensors that the run holds, and return its stats."""
        self.trajectory.close()
        self.tiles.clear()
        return self.run.close()

    def no_memory(self, again: bool = True) -> bool:
        """After memory ran out, drop plans and caches, and make this evaluation and all later ones full. Return False
        if a full evaluation would need as much memory: for a picture without a KV cache, and if the evaluation is
        already full. again: whether all calls of the evaluation are repeated."""
        plan = out_of_memory(self.run, self.step_plan, self._video)
        if plan is None:
            return False
        self.step_plan = plan
        if again:
            self.run.stats.discard_evaluations(plan.step, self.calls, self.merged_calls)
            self._reset()
        return True

    def undecided(self, reason: Message) -> None:
        """Make a call full, because `observe` has failed for this call."""
        self.step_plan = self.step_plan.with_mode(StepMode.FULL)
        self.run.stats.count_evaluation(self.step_plan.step, 0.0)
        self.run.stats.full_because(self.step_plan.step, reason)

    def full_instead(self, reason: Message) -> None:
        """Make the rest of this evaluation full, because a call could not be prepared for merging."""
        self.run.coverage.broken_off()
        with self._lock:
            self._go_on(self.step_plan.with_mode(StepMode.FULL))
            self.run.stats.full_because(self.step_plan.step, reason)

    @property
    def _video(self) -> bool:
        return len(self.latent_shape) > 4 and self.latent_shape[2] > 1

    def _awaits_prediction(self, transformer_options: Mapping[str, Any]) -> bool:
        """Whether plans for the conditions in progress need a predicted picture that does not exist yet. Runs with a KV
        cache make plans from predictions, except for context windows."""
        if not self.run.kv_cache or self.prediction(transformer_options) is not None:
            return False
        return self.tracker.evaluation == 0 or frames_of(transformer_options) is None

    def _reset(self) -> None:
        self.counts.clear()
        self.tiles.clear()
        self.several_devices = False
        self.calls = self.merged_calls = 0

    def observe(
        self,
        timestep: Tensor,
        conds: Sequence[Any] = (),
        latent: Tensor | None = None,
        model_options: Mapping[str, Any] = {},
        model: Any = None,
    ) -> None:
        """Decide the mode of a call of ComfyUI's `calc_cond_batch`. conds: its lists of conditions. latent: (B, C, ...,
        H, W)."""
        at = self.tracker.of(timestep)
        if at.model_sigma != self.sigma:
            self.sigma = at.model_sigma
            self._reset()
        if latent is not None:
            self.latent_shape = latent.shape
            self.run.cache.bounded = self._video
        options = model_options.get("transformer_options", {})
        frames, self.patches = frames_of(options), patches_of(options)
        present = [cond for group in conds for cond in group or () if "uuid" in cond]
        self.areas.update({cond["uuid"]: tuple(cond["area"]) for cond in present if cond.get("area") is not None})
        self.contents.note(present)
        active = [cond for cond in present if is_active(cond, at.model_sigma)]
        self.several_devices |= len(active) > 1 and len(model_options.get("multigpu_clones") or ()) > 1
        keys = self._keys((cond["uuid"] for cond in active), frames, self.counts.copy())
        set_hooks(model, active, timestep, model_options)
        module = foreign_positions(getattr(model, "diffusion_model", None))
        states = (state_of(cond, at.model_sigma, options) for cond in active)
        conditions = dict(zip(keys, states, strict=True))
        if self.trajectory.latent is None and latent is not None:
            self.trajectory.observe(latent, at, tuple(conditions))
        if not self.calls:
            self.run.check_kv_cache()
            self.run.coverage.enforce_limit()
        facts = Facts(
            *at,
            conditions,
            awaits_prediction=self._awaits_prediction(options),
            unshared=self.several_devices and (self.run.tiles or self.prediction(options) is None),
            gradients=records_gradients(),
            new_noise=self.trajectory.new_noise,
            enlarges=self.tracker.enlarges,
            another=self.trajectory.another,
            unknown=Reason.FOREIGN_POSITIONS(module=module) if module else None,
        )
        self.step_plan = decide(self.run, facts)
        self.run.stats.count_evaluation(self.step_plan.step, self.step_plan.merged_ratio)
        self.calls += 1
        self.merged_calls += self.step_plan.mode.merges

    def evaluation(self, x: Tensor, transformer_options: Mapping[str, Any]) -> Evaluation:
        """Return the evaluation of one call of the model on latents of (B, C, ..., H, W). Conditions with the same area
        share plans, made from the picture of `prediction` or, without one, from the tokens of the first condition. A
        call on a tile of the latent makes plans only for this tile, because the next call may get another."""
        chunks, frames = chunks_of(len(x), transformer_options), frames_of(transformer_options)
        cond_keys = self.cond_keys(len(x), transformer_options)
        if self._is_tile(x, transformer_options):
            self.run.tiles |= not self.trajectory.another
            with self._lock:
                self._go_on(decide_tiles(self.run, self.step_plan, self.several_devices))
            return Evaluation(self.run, self.step_plan, (None,), cond_keys, self._tile(x, chunks), images=len(x))
        areas, picture = [self.areas.get(chunk) for chunk in chunks], self.prediction(transformer_options)
        plan_keys: tuple[Hashable, ...] = tuple((area, frames) for area in areas)
        if self.several_devices:
            device = transformer_options.get("multigpu_thread_device")
            plan_keys = tuple((device, key) for key in plan_keys)
        pictures = () if picture is None else tuple(crop(picture, area) for area in areas)
        # The latent of the call that wrote the caches for these conditions; None if unknown.
        before = self.run.coverage.latent_of(cond_keys)
        change = None
        if before is not None and (before.shape, before.device) == (x.shape, x.device):
            change = LatentChange(x, before)
        return Evaluation(self.run, self.step_plan, plan_keys, cond_keys, None, pictures, len(x), change)

    def decide_call(self, evaluation: Evaluation, layout: Hashable) -> Evaluation:
        """Return the evaluation of a call in the mode that its caches allow. layout: see `decision.decide_call`."""
        with self._lock:
            self._go_on(decide_call(self.run, self.step_plan, evaluation.cond_keys, layout))
        return replace(evaluation, step_plan=self.step_plan)

    def ended(self, evaluation: Evaluation, x: Tensor, layout: Hashable, unreached: Iterable[str]) -> None:
        """Record that a call on latents x has written its caches. unreached: chains that another node skipped."""
        if not evaluation.step_plan.mode.caches:
            return
        run, missed = self.run, [key for name in unreached for key in evaluation.keys(name)]
        if not evaluation.refreshes and any(run.cache.holds((key,)) for key in missed):
            # Make the next evaluation a refresh, because some cached entries now belong to this latent and others to an
            # older one.
            run.coverage.forget({*evaluation.cond_keys})
            return
        run.coverage.ended(evaluation.cond_keys, x.clone(), layout if evaluation.refreshes else None)
        if evaluation.refreshes:
            run.cache.drop(missed)

    def _go_on(self, plan: StepPlan) -> None:
        """Continue this evaluation with another plan, and correct the counts if the evaluation no longer merges."""
        if self.step_plan.mode.merges and not plan.mode.merges:
            self.run.stats.discard_evaluations(plan.step, 0, 1)
            self.merged_calls -= 1
        self.step_plan = plan

    def _tile(self, x: Tensor, chunks: Hashable) -> TileBatch:
        """Return the tiles of a call. Only tiles of the first condition are stored, so that comparisons stay few. Tiles
        of other conditions come in any order, and are only compared with the stored tiles."""
        who = self.calls, chunks
        first, tiles = self.tiles.setdefault((x.shape[1:], x.device), (who, []))
        if who != first:
            return TileBatch(x, tuple(tiles))
        tiles.append(TileBatch(x))
        return tiles[-1]

    def prediction(self, transformer_options: Mapping[str, Any]) -> Tensor | None:
        """Return the clean image that the last evaluation of this size predicted, (B, C, ..., H, W). None if plans are
        made from tokens, as without a KV cache and for context windows."""
        # Without a KV cache, plans are made from tokens, unless several devices have to make equal plans.
        unused = not self.run.kv_cache and not self.several_devices
        if unused or frames_of(transformer_options) is not None:
            return None
        return self.trajectory.prediction(self.latent_shape)

    def _is_tile(self, x: Tensor, transformer_options: Mapping[str, Any]) -> bool:
        """Whether a call has a condition whose input is neither the entire latent nor the condition's area."""
        if self.trajectory.another or (self.trajectory.tiles and not self.run.kv_cache):
            return True
        if not self.latent_shape:
            return False
        uuids = transformer_options.get("uuids") or (None,)
        sizes = (area_size(self.areas.get(uuid), self.latent_shape[2:]) for uuid in uuids)
        return len(x) != self.latent_shape[0] * len(uuids) or any(x.shape[2:] != size for size in sizes)

    def cond_keys(self, batch: int, transformer_options: Mapping[str, Any]) -> tuple[Hashable, ...]:
        """Return the key of each condition in the batch, and count its call. No two keys of an evaluation are equal."""
        with self._lock:
            return self._keys(chunks_of(batch, transformer_options), frames_of(transformer_options), self.counts)

    def _keys(self, conditions: Iterable[Any], frames: Hashable, counts: Counter[Hashable]) -> tuple[Hashable, ...]:
        """Return a key for each condition: its content, area, frames, the latent's shape, the model's patches (which
        perturbed guidance changes) and how many calls it has had, including this one. Update `counts`."""
        keys = []
        for each in conditions:
            key = self.contents.of(each), self.areas.get(each), frames, self.latent_shape, self.patches
            counts[each, key] += 1
            keys.append((key, counts[each, key]))
        return tuple(keys)

    def __reduce__(self) -> tuple[Any, ...]:
        # While sampling, other nodes copy or pickle the options, which hold the run. They must get the run itself.
        _runs[self._key] = self
        return _run_of, (self._key,)


_runs: WeakValueDictionary[str, SamplingRun] = WeakValueDictionary()  # runs that were copied or pickled, by key


def _run_of(key: str) -> SamplingRun | None:
    """Return the run that was pickled; None in another process, or if the run is over."""
    return _runs.get(key)
