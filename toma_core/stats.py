"""Count what a run does, as plain numbers and reasons."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field

from .merge import MergeMap
from .reasons import Message, Reason
from .windows import Grid


@dataclass
class RunStats:
    """Counters of one sampling run."""

    evaluations: int = 0
    steps: set[int] = field(default_factory=set)
    merged_steps: dict[int, float] = field(default_factory=dict)  # ratio of each step that is merged
    total_steps: int = 0  # in the run's schedule
    grids: dict[Grid, int] = field(default_factory=dict)  # number of destinations of each token grid
    merged_at: dict[str, set[int]] = field(default_factory=dict)  # by block, the steps in which it was merged
    blocks: set[str] = field(default_factory=set)
    # What ran on all tokens, by reason: (block, part). An entire block has the part "", a reference image the block
    # None.
    unmerged: dict[Message, set[tuple[str | None, str]]] = field(default_factory=dict)
    unmerged_calls: dict[Message, None] = field(default_factory=dict)  # why calls of the model ran on all tokens
    selections: int = 0
    weighings: int = 0
    kernels: set[Message] = field(default_factory=set)  # kernels that made plans, or why plain PyTorch made them
    full_by: tuple[Message, ...] = ()  # settings that make steps full
    full_reasons: dict[Message, set[int]] = field(default_factory=dict)  # full steps that the schedule merges
    by_profile: bool = False  # whether ratios differ by block: grids and merged_steps are then for the largest ratio
    cache_bytes: int = 0  # largest size of the residual and KV caches
    kv_place: tuple[int, int] = (0, 0)  # peak bytes of keys and values, on the card and in main memory
    kv_pinned: bool = True  # whether main memory for keys and values could be pinned
    kv_skipped: float = 0.0  # share of blocks, counted from the first, that run unmerged because memory is short
    # Where another node overrides attention: (whether tokens are merged, whether ComfyUI's attention is called).
    attentions: set[tuple[bool, bool]] = field(default_factory=set)
    times_less_work: float | None = None  # FLOPs of an unmerged run divided by the FLOPs of this run; None if unknown
    comfyui: tuple[Message, ...] = ()  # messages on the installed ComfyUI
    maps: dict[Grid, MergeMap] = field(default_factory=dict)
    merged_in: Counter[int] = field(default_factory=Counter)  # merged evaluations of each step
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)  # several devices may share a run

    def count_evaluation(self, step: int, ratio: float) -> None:
        """Count an evaluation of this step; the evaluation is full if the ratio is 0."""
        with self.lock:
            self.evaluations += 1
            self.steps.add(step)
            if ratio:
                self.merged_steps[step] = ratio
                self.merged_in[step] += 1

    def discard_evaluations(self, step: int, evaluations: int, merged: int) -> None:
        """Subtract a step's evaluations that broke off and will be repeated. merged: how many of these were merged."""
        with self.lock:
            self.evaluations -= evaluations
            self.merged_in[step] -= merged
            if not self.merged_in[step]:
                self.merged_steps.pop(step, None)
                for steps in list(self.merged_at.values()):
                    steps.discard(step)

    def full_because(self, step: int, reason: Message) -> None:
        """Record why an evaluation of this step is full although the schedule merges it."""
        with self.lock:
            self.full_reasons.setdefault(reason, set()).add(step)

    def count_plan(self, grid: Grid, destinations: int, selected: bool) -> None:
        """Count a plan for a grid. selected: whether destinations were selected; if not, only weights were computed."""
        with self.lock:
            fewest = min(destinations, self.grids.get(grid, destinations))
            self.grids[grid] = fewest if self.by_profile else destinations
            self.selections += selected
            self.weighings += 1

    def merged(self, block: str, step: int) -> None:
        """Record that a block ran at least in part on merged tokens in a step."""
        self.blocks.add(block)
        self.merged_at.setdefault(block, set()).add(step)

    @property
    def merged_blocks(self) -> set[str]:
        return {block for block, steps in self.merged_at.items() if steps}

    @property
    def ratios_in_blocks(self) -> dict[int, float]:
        """The ratio of each step in which some block was merged."""
        found = set[int]().union(*self.merged_at.values())
        return {step: ratio for step, ratio in self.merged_steps.items() if step in found}

    def not_merged(self, block: str | None, reason: Message, part: str = "") -> None:
        """Record why a block, or a part of it, ran on all tokens. If block is None, part names a reference image."""
        if block is not None:
            self.blocks.add(block)
        self.unmerged.setdefault(reason, set()).add((block, part))

    def call_not_merged(self, reason: Message) -> None:
        self.unmerged_calls[reason] = None

    def unmerged_names(self) -> dict[Message, set[str]]:
        """Return the names of blocks and reference images that were not merged, by reason."""
        return {reason: {" ".join(filter(None, names)) for names in each} for reason, each in self.unmerged.items()}

    def unmerged_reasons(self) -> list[Message]:
        """Return why blocks and reference images were not merged, the most frequent reason first."""
        # If no step is merged, leave out blocks that the profile skips: they would not merge without the profile
        # either.
        found = [reason for reason in self.unmerged if self.merged_steps or reason.id is not Reason.PROFILE_SKIPS_BLOCK]
        return sorted(found, key=lambda reason: -len(self.unmerged[reason]))
