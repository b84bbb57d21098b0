"""One sampling run as ComfyUI tells it: which evaluation this is, who takes part in it, what each call of it shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import torch
from comfy.model_sampling import CONST
from torch import Tensor

from ...toma_core import Evaluation, RunState, Schedule, StepMode, StepPlan, ToMAConfig, decide
from ...toma_core.config import SimilarityFrom
from ...toma_core.decision import without_cache
from ...toma_core.prediction import trusted_below
from ...toma_core.reasons import Message, Reason
from ...toma_core.schedule import RatioSchedule
from ...toma_core.stats import RunStats
from ...toma_core.tiles import TileBatch
from ...toma_core.windows import has_frames
from .contents import Contents
from .sigmas import SigmaTracker

# Less than this share of the highest noise level: a run begins with a picture in it.
_ALL_NOISE = 0.99


def records_gradients() -> bool:
    """Return whether what the model computes now becomes part of a graph of gradients, as in training. Nothing of it
    may be merged or outlive the evaluation."""
    return torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


@dataclass(eq=False)
class SamplingRun:
    """One sampling run: its state, and what the evaluation in progress is to do.

    Attributes:
        run: State of the core.
        step_plan: What the evaluation in progress is to do.
        tracker: Noise levels and steps.
        contents: Which conditions have equal content.
        size: Rows and columns of the latent, frames before them; None if unknown.
        images: Images that each condition is evaluated for; 0 if unknown.
        areas: (height, width, top, left) of each condition that has an area.
        several_devices: Whether the conditions of this evaluation may run on several devices.
        obstacle: Why nothing may be merged in this run; None if it may.
        sigma: Noise level that the model is given; None before the first evaluation.
        patches: Patches of the model in this evaluation, by name.
        counts: Calls in this evaluation, by what was evaluated.
        observed: Calls of `observe` in this run.
        calls: Calls of `observe` in this evaluation.
        merged_calls: Those of them that were merged.
        begun: Evaluations of the sampler so far.
        prediction: Clean image that the last evaluation predicted, (B, C, ..., H, W).
        max_prediction_sigma: Noise level above which a prediction is too poor to plan from.
        tiles: Batches of tiles in this evaluation, by shape and device.
    """

    run: RunState
    step_plan: StepPlan
    tracker: SigmaTracker = field(default_factory=SigmaTracker)
    contents: Contents = field(default_factory=Contents)
    size: tuple[int, ...] | None = None
    images: int = 0
    areas: dict[Hashable, Sequence[int]] = field(default_factory=dict)
    several_devices: bool = False
    obstacle: Message | None = None
    sigma: float | None = None
    patches: Hashable = ()
    counts: Counter[tuple[Hashable, ...]] = field(default_factory=Counter)
    observed: int = 0
    calls: int = 0
    merged_calls: int = 0
    begun: int = 0
    prediction: Tensor | None = None
    max_prediction_sigma: float = float("inf")
    tiles: dict[Hashable, tuple[Hashable, list[TileBatch]]] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    @classmethod
    def start(
        cls,
        config: ToMAConfig,
        model_sampling: Any,
        sigmas: list[float],
        ratio_schedule: RatioSchedule = (),
        frames: int = 1,
    ) -> SamplingRun:
        """A fresh run over noise levels, the last of which is where it ends, for a latent of so many frames.
        bands: see `Schedule`."""
        start = (
            float("inf") if config.start_percent <= 0 else float(model_sampling.percent_to_sigma(config.start_percent))
        )
        end = float("-inf") if config.end_percent >= 1 else float(model_sampling.percent_to_sigma(config.end_percent))
        finishes = bool(sigmas) and sigmas[-1] == 0.0
        goes_on = frames > 1 and bool(sigmas) and sigmas[0] < _ALL_NOISE * float(model_sampling.sigma_max)
        run = RunState(Schedule(config, tuple(sigmas[:-1]), start, end, finishes, goes_on, ratio_schedule))
        run.stats.total_steps = len(sigmas[:-1])
        run.stats.by_profile = bool(ratio_schedule)
        if ratio_schedule and not any(ratio for _, ratios in ratio_schedule for ratio in ratios.values()):
            run.stats.not_merged("model", Reason.PROFILE_MERGES_NOTHING())
        return cls(run, StepPlan(0), max_prediction_sigma=trusted_below(isinstance(model_sampling, CONST)))

    def next(self, timestep: Tensor) -> None:
        """The sampler evaluates the model anew, at this noise level."""
        self.tracker.next(timestep)
        self.begun += 1
        self._begin()

    def predicted(self, picture: Any) -> None:
        """The evaluation is over: this is the clean picture that it gave."""
        self.prediction = picture if isinstance(picture, Tensor) and not records_gradients() else None

    def close(self) -> RunStats:
        """The run is over, however it ended: drop what it held, and hand over its stats."""
        self.prediction = None
        self.tiles.clear()
        return self.run.close()

    def no_memory(self, again: bool = True) -> bool:
        """Memory ran out in the evaluation in progress: drop what is kept, and run it whole, and all that come. False
        where nothing was kept that could go. again: all of it is made anew."""
        run = self.run
        if not (run.kv_cache and run.cache.disable()):
            return False
        run.stats.not_merged("model", Reason.KV_CACHE_DISABLED())
        self.step_plan = self.step_plan.with_mode(StepMode.FULL)
        if again:
            run.stats.take_back(self.step_plan.step, self.calls, self.merged_calls)
            self._begin()
        return True

    @property
    def awaits_prediction(self) -> bool:
        """Whether plans are made from pictures, and the first is still to be predicted."""
        return self.run.config.similarity_from is SimilarityFrom.PREDICTION and self.begun == 1

    def _begin(self) -> None:
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
    ) -> None:
        """Take note of what is evaluated together: the groups of conditions, on one latent of (B, C, ..., H, W)."""
        at = self.tracker.of(timestep)
        if at.model_sigma != self.sigma:
            self.sigma = at.model_sigma
            self._begin()
        self.observed += 1
        if not self.calls:
            self.run.begins()
        if latent is not None:
            self.size, self.images = tuple(latent.shape[2:]), latent.shape[0]
            self.run.cache.limited = has_frames(self.size) and self.size[0] > 1
        options = model_options.get("transformer_options", {})
        frames, self.patches = _frames(options), _patches(options)
        present = [c for group in conds if group is not None for c in group if "uuid" in c]
        for cond in present:
            if cond.get("area") is not None:
                self.areas[cond["uuid"]] = tuple(cond["area"])
        self.contents.note(present)
        active = [c for c in present if _active(c, at.model_sigma)]
        # So it stays until the next evaluation: a call more is compared with those before.
        self.several_devices = self.several_devices or (
            len(active) > 1 and len(model_options.get("multigpu_clones") or ()) > 1
        )
        self.step_plan = decide(
            self.run,
            at.sigma,
            self._signatures(active, frames, at.model_sigma),
            at.step,
            given=at.model_sigma,
            awaits_prediction=self.awaits_prediction,
            gradients=records_gradients(),
        )
        self.run.stats.count_evaluation(self.step_plan.step, self.step_plan.merged_ratio)
        self.calls += 1
        self.merged_calls += self.step_plan.mode.merges

    def _signatures(
        self, active: Sequence[Mapping[str, Any]], frames: Hashable, sigma: float
    ) -> dict[Hashable, Hashable]:
        """Return signature -> state of conditions that are about to be evaluated, see `parts`. A call more for the same
        condition, as perturbed guidance makes it, has another signature."""
        signatures: dict[Hashable, Hashable] = {}
        calls = self.counts.copy()
        for cond in active:
            part = self._key(cond["uuid"], frames)
            calls[part] += 1
            signatures[part, calls[part]] = _controls(cond, sigma)
        return signatures

    def evaluation(self, x: Tensor, transformer_options: Mapping[str, Any]) -> Evaluation:
        """What one call of the model on latents of (B, C, ..., H, W) is to do.

        Conditions of one area share plans, made from the tokens of the first, in one call or in several. Where
        conditions run on several devices none can wait for another's tokens: destinations lie at random there, the
        same for all. And a call that is not about the latent or an area, but about a piece of it, as tiled sampling
        makes them, is planned by what it shows and by nothing else, anew in every evaluation: it may show another then.
        """
        chunks, frames = _chunks(len(x), transformer_options)
        cond_keys = self.cond_keys(len(x), transformer_options)
        pictures = self.predictions(chunks, transformer_options, x)
        content_independent = Reason.SEVERAL_DEVICES() if self.several_devices and not pictures else None
        if not self._is_tile(x, transformer_options):
            plan_keys = self.plan_keys(chunks, frames)
            if self.several_devices:
                device = transformer_options.get("multigpu_thread_device")
                plan_keys = tuple((device, copy) for copy in plan_keys)
            return Evaluation(self.run, self.step_plan, plan_keys, cond_keys, content_independent, pictures=pictures)
        self.run.tiles = True
        step_plan = without_cache(self.run, self.step_plan)
        if self.step_plan.mode.merges and not step_plan.mode.merges and self.merged_calls:
            # The first tile of a run that had none: what was counted as merged is full.
            self.run.stats.take_back(step_plan.step, 0, self.merged_calls)
            self.merged_calls = 0
        return Evaluation(self.run, step_plan, (None,), cond_keys, content_independent, self._tile(x, chunks))

    def _tile(self, x: Tensor, chunks: Hashable) -> TileBatch:
        """What a call shows. Those of other conditions come in any order, if they are calls of their own; all of them
        are compared with those of the conditions that came first, so that many tiles do not cost many comparisons."""
        who = self.observed, chunks
        first, tiles = self.tiles.setdefault((x.shape[1:], x.device), (who, []))
        if who != first:
            return TileBatch(x, tuple(tiles))
        tiles.append(TileBatch(x))
        return tiles[-1]

    def plan_keys(self, chunks: Sequence[Hashable], frames: Hashable) -> tuple[Hashable, ...]:
        """For each condition of a call, which part of the latent it shows: those of one area share plans."""
        return tuple((self.areas.get(chunk), frames) for chunk in chunks)

    def predictions(
        self, chunks: Sequence[Hashable], transformer_options: Mapping[str, Any], x: Tensor
    ) -> tuple[Tensor, ...]:
        """For each condition of a call on latents x, the picture of what it shows, as the step before predicted it;
        nothing where plans are made from tokens, where the picture is not yet to be trusted, or where none is at hand,
        as of windows over a batch."""
        picture = self.prediction
        if (
            picture is None
            # What a poor plan would do is mended where destinations look at all tokens.
            or (self.sigma is not None and self.sigma > self.max_prediction_sigma and not self.run.kv_cache)
            or transformer_options.get("context_window") is not None
            or self.run.config.similarity_from is not SimilarityFrom.PREDICTION
        ):
            return ()
        pictures = [_cut(picture, self.areas.get(chunk)) for chunk in chunks]
        shape = len(x) // len(chunks), *x.shape[1:]
        return tuple(pictures) if all(part.shape == shape for part in pictures) else ()

    def _is_tile(self, x: Tensor, transformer_options: Mapping[str, Any]) -> bool:
        """Whether a call shows something else than the latent, or each condition its area of it."""
        if self.size is None:
            return False
        uuids = transformer_options.get("uuids") or (None,)
        if len(x) != self.images * len(uuids):
            return True
        return any(tuple(x.shape[2:]) != self._size_of(uuid) for uuid in uuids)

    def _size_of(self, uuid: Hashable) -> tuple[int, ...] | None:
        """Rows and columns (frames before them) that a condition is asked about; None if that is not known."""
        area, size = self.areas.get(uuid), self.size
        if area is None or size is None:
            return size
        # An area of a latent of five dimensions tells rows and columns alone: it has all frames, as ComfyUI reads it.
        frames, half = size[: max(0, len(size) - len(area) // 2)], len(area) // 2
        if len(area) % 2 or half > len(size):
            return None
        sides = zip(area[:half], size[len(frames) :], area[half:], strict=True)
        return *frames, *(min(side, whole - at) for side, whole, at in sides)

    def cond_keys(self, batch: int, transformer_options: Mapping[str, Any]) -> tuple[Hashable, ...]:
        """For each chunk of the batch, what tells it from all others in this evaluation: its condition (which has an
        area of its own), the images in it, how the model is patched, as perturbed guidance does, and how many calls
        came before it with the same."""
        chunks, frames = _chunks(batch, transformer_options)
        cond_keys = []
        with self._lock:
            for chunk in chunks:
                part = self._key(chunk, frames)
                self.counts[part] += 1
                cond_keys.append((part, self.counts[part]))
        return tuple(cond_keys)

    def _key(self, condition: Hashable, frames: Hashable) -> tuple[Hashable, ...]:
        """Return what was evaluated: condition, place, shape, and how the model is patched."""
        content = self.contents.of(condition)
        return content, self.areas.get(condition), frames, self.size, self.images, self.patches

    def __deepcopy__(self, memo: dict[int, Any]) -> SamplingRun:
        # Options may be deep-copied by others while sampling; a copy must go on counting in this run.
        return self


def _chunks(batch: int, transformer_options: Mapping[str, Any]) -> tuple[tuple[Hashable, ...], Hashable]:
    """The ids of the conditions in a batch, one per equal chunk, and which images of a longer series it holds."""
    chunks = tuple(transformer_options.get("uuids") or (None,))
    return (chunks if batch % len(chunks) == 0 else (None,)), _frames(transformer_options)


def _cut(picture: Tensor, area: Sequence[int] | None) -> Tensor:
    """An area of (B, C, ..., H, W), told as (height, width, top, left)."""
    if area is None:
        return picture
    half = len(area) // 2
    for side, (size, start) in enumerate(zip(area[:half], area[half:], strict=True), picture.ndim - half):
        picture = picture.narrow(side, start, min(size, picture.shape[side] - start))
    return picture


def _frames(transformer_options: Mapping[str, Any]) -> Hashable:
    """Which images of a longer series are evaluated, None for all."""
    window = transformer_options.get("context_window")
    return None if window is None else tuple(getattr(window, "index_list", ()))


def _patches(transformer_options: Mapping[str, Any]) -> Hashable:
    """What is patched, by the names of the functions: many are made anew for each evaluation."""
    added, replaced = (transformer_options.get(kind) or {} for kind in ("patches", "patches_replace"))
    return (
        *((place, *map(_name, functions)) for place, functions in added.items()),
        *((place, key, _name(f)) for place, functions in replaced.items() for key, f in functions.items()),
    )


def _name(function: Any) -> tuple[str, str]:
    named = function if hasattr(function, "__qualname__") else type(function)
    return str(named.__module__), named.__qualname__


def takes_part(conds: Sequence[Mapping[str, Any]] | None, sigma: float | None) -> bool:
    """Whether any of a group of conditions takes part at this noise level."""
    return sigma is None or any(_active(cond, sigma) for cond in conds or ())


def _active(cond: Mapping[str, Any], sigma: float) -> bool:
    """Whether a condition takes part at this noise level, as ComfyUI sees it."""
    return float(cond.get("timestep_start", sigma)) >= sigma >= float(cond.get("timestep_end", sigma))


def _controls(cond: Mapping[str, Any], sigma: float) -> tuple[bool, ...]:
    """Which of a condition's ControlNets take part: they change what its blocks add, and which of them stay merged."""
    active, control = [], cond.get("control")
    while control is not None:
        within = getattr(control, "timestep_range", None)
        active.append(within is None or float(within[0]) >= sigma >= float(within[1]))
        control = getattr(control, "previous_controlnet", None)
    return tuple(active)
