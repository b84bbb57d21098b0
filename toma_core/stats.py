"""Count what a run does as plain numbers while sampling, and report it as messages at its end."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from .merge import MergeMap
from .reasons import CHOSEN, Message, MessageId, Reason
from .windows import Grid


class Line(MessageId):
    """The lines of a report."""

    NOTHING_MERGED = "nothing_merged"  # reason
    ON = "on"  # share, merged_blocks, blocks, merged_steps, steps
    ON_OTHERS = "on_others"  # line, reason
    WORK = "work"  # percent
    SENTENCE = "sentence"  # sentence
    INDENTED = "indented"  # line
    PERCENT = "percent"  # value
    UP_TO = "up_to"  # share
    # titles of sections
    WHERE = "where"
    WHEN = "when"
    NOT_MERGED = "not_merged"
    HOW = "how"
    # what sections say
    TOKENS = "tokens"  # sizes
    MERGED_BLOCKS = "merged_blocks"  # blocks
    MERGED_STEPS = "merged_steps"  # steps, ratios
    FULL_STEPS = "full_steps"  # steps
    FULL_STEPS_BY = "full_steps_by"  # steps, by: messages
    FULL_BY_NEED = "full_by_need"  # steps, reason
    EVALUATIONS = "evaluations"  # total, merged
    UNMERGED = "unmerged"  # reason, blocks
    UNMERGED_CALLS = "unmerged_calls"  # reason
    PLANS = "plans"  # selections, weightings
    RESIDUAL_CACHE = "residual_cache"  # size: MB
    RESIDUAL_CACHE_DISABLED = "residual_cache_disabled"
    NO_KV_CACHE = "no_kv_cache"  # reason
    KV_PLACE = "kv_place"  # card, main: GB
    KV_NOT_PINNED = "kv_not_pinned"
    KV_FEWER_BLOCKS = "kv_fewer_blocks"  # percent
    ATTENTION_LEFT = "attention_left"
    KERNELS = "kernels"  # names
    COMFYUI = "comfyui"  # version
    UNTRIED_COMFYUI = "untried_comfyui"  # version, tried


class Unmerged(NamedTuple):
    """Something that ran on all tokens."""

    block: str | None  # None for what is no block, as a reference image
    part: str = ""  # of the block, "" for all of it

    def __str__(self) -> str:
        """Return its name in the report."""
        return " ".join(filter(None, self))


@dataclass
class RunStats:
    """Counters of one sampling run."""

    evaluations: int = 0
    merged_evaluations: int = 0
    steps: set[int] = field(default_factory=set)
    merged_steps: dict[int, float] = field(default_factory=dict)  # ratio of each step that is merged
    total_steps: int = 0  # steps that the run was to make
    grids: dict[Grid, int] = field(default_factory=dict)  # destinations of each token grid
    merged_at: dict[str, set[int]] = field(default_factory=dict)  # steps in which a block was merged, by block
    blocks: set[str] = field(default_factory=set)
    unmerged: dict[Message, set[Unmerged]] = field(default_factory=dict)  # by reason
    unmerged_calls: dict[Message, None] = field(default_factory=dict)  # why calls of the model ran on all tokens
    selections: int = 0
    weighings: int = 0
    kernels: set[Message] = field(default_factory=set)  # kernels that made plans, or why plain PyTorch did
    full_by: tuple[Message, ...] = ()  # settings that make steps full
    full_reasons: dict[Message, set[int]] = field(default_factory=dict)  # full steps that the schedule merges
    by_profile: bool = False  # whether ratios differ by block: grids and merged_steps then hold the largest of them
    cache_bytes: int = 0  # largest size of the residual cache
    cache_disabled: bool = False
    without_kv_cache: Message | None = None  # why the KV cache was not used
    kv_place: tuple[int, int] = (0, 0)  # bytes of keys and values on the card and in main memory, if any lie there
    kv_pinned: bool = True  # whether that main memory could be pinned
    kv_skipped: float = 0.0  # share of the first blocks that are not merged, because memory is short
    # Of attentions that another node overrides: whether of merged tokens, and whether it left them to ComfyUI.
    attentions: set[tuple[bool, bool]] = field(default_factory=set)
    times_less_work: float | None = None  # FLOPs of the unmerged run over those of this one; None if unknown
    comfyui: tuple[Message, ...] = ()  # which ComfyUI the run is in
    maps: dict[Grid, MergeMap] = field(default_factory=dict)
    merged_in: Counter[int] = field(default_factory=Counter)  # merged evaluations of each step
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)  # several devices may share a run

    def count_evaluation(self, step: int, ratio: float) -> None:
        """Count a model evaluation that begins at this step and ratio, 0 if it is full."""
        with self.lock:
            self.evaluations += 1
            self.steps.add(step)
            if ratio:
                self.merged_evaluations += 1
                self.merged_steps[step] = ratio
                self.merged_in[step] += 1

    def discard_evaluations(self, step: int, evaluations: int, merged: int) -> None:
        """Subtract evaluations of a step that broke off and will be repeated; `merged` of them were merged."""
        with self.lock:
            self.evaluations -= evaluations
            self.merged_evaluations -= merged
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
        """Count a plan for a grid. selected: whether destinations were selected, not weights alone computed."""
        with self.lock:
            fewest = min(destinations, self.grids.get(grid, destinations))
            self.grids[grid] = fewest if self.by_profile else destinations
            self.selections += selected
            self.weighings += 1

    def merged(self, block: str, step: int) -> None:
        """Record that a block ran on merged tokens in a step, at least in part."""
        self.blocks.add(block)
        self.merged_at.setdefault(block, set()).add(step)

    @property
    def merged_blocks(self) -> set[str]:
        """The blocks that were merged in some step."""
        return {block for block, steps in self.merged_at.items() if steps}

    @property
    def ratios_in_blocks(self) -> dict[int, float]:
        """The ratio of each step in which some block was merged. A merged step has none where every block had a reason
        against it, or where a step cache skipped them."""
        found = set[int]().union(*self.merged_at.values())
        return {step: ratio for step, ratio in self.merged_steps.items() if step in found}

    def not_merged(self, block: str, reason: Message, part: str = "") -> None:
        """Record why a block, or a named part of it, ran on all tokens."""
        self.blocks.add(block)
        self.unmerged.setdefault(reason, set()).add(Unmerged(block, part))

    def reference_not_merged(self, number: int, reason: Message) -> None:
        """Record why a reference image is not merged. number: from 1."""
        self.unmerged.setdefault(reason, set()).add(Unmerged(None, f"reference {number}"))

    def call_not_merged(self, reason: Message) -> None:
        """Record why a call of the model ran on all tokens, whatever its blocks."""
        self.unmerged_calls[reason] = None

    def unmerged_names(self) -> dict[Message, set[str]]:
        """Return the names of what was not merged, by reason."""
        return {reason: set(map(str, each)) for reason, each in self.unmerged.items()}

    def headline(self) -> Message:
        """Return the verdict."""
        reasons, total, ratios = self.unmerged_reasons(), len(self.blocks), self.ratios_in_blocks
        if not ratios:
            return Line.NOTHING_MERGED(reason=next((why for why in (*self.unmerged_calls, *reasons)), self._why_full()))
        steps = len(ratios)
        # Blocks that merge in some of these steps count for their share.
        merged = max(1, round(sum(len(at & ratios.keys()) for at in self.merged_at.values()) / steps))
        share = self._at_most(Line.PERCENT(value=100 * sum(ratios.values()) / steps))
        every = max(self.total_steps, len(self.steps))
        line = Line.ON(share=share, merged_blocks=merged, blocks=total, merged_steps=steps, steps=every)
        others = [reason for reason in reasons if reason.id not in CHOSEN]
        return Line.ON_OTHERS(line=line, reason=others[0]) if others and 2 * merged < total else line

    def work(self) -> list[Message]:
        """Return how much less work the run was, counted; nothing if that is unknown."""
        times = self.times_less_work
        return [] if times is None or times < 1.05 else [Line.WORK(percent=100 - 100 / times)]

    def details(self) -> list[Message]:
        """Return the facts behind the headline, a line each."""
        return [line for lines in self._sections().values() for line in lines]

    def summary(self) -> str:
        """Return the headline and the details as one English line for the log."""
        return "; ".join(map(str, [self.headline(), *self.work(), *self.details()]))

    def report(self) -> list[Message | str]:
        """Return the headline and the details in titled sections: a message or an empty string for each line."""
        found: list[Message | str] = [Line.SENTENCE(sentence=line) for line in (self.headline(), *self.work())]
        for title, lines in self._sections().items():
            if lines:
                found += ["", title(), *(Line.INDENTED(line=line) for line in lines)]
        return found

    def text(self) -> str:
        """Return the report in English."""
        return "\n".join(map(str, self.report()))

    def _sections(self) -> dict[Line, list[Message]]:
        merged = self.ratios_in_blocks
        where, when = list[Message](), list[Message]()
        if merged:
            more = "+" if self.by_profile else ""
            sizes = tuple(
                f"{math.prod(grid)} -> {destinations}{more} ({' x '.join(map(str, grid))})"
                for grid, destinations in sorted(self.grids.items(), reverse=True)
            )
            where = [Line.TOKENS(sizes=sizes), Line.MERGED_BLOCKS(blocks=_names(self.merged_blocks))]
            ratios = tuple(dict.fromkeys(self._at_most(float(f"{ratio:.3g}")) for ratio in merged.values()))
            when.append(Line.MERGED_STEPS(steps=_steps(merged), ratios=ratios))
        if full := _steps(self.steps - set(self.merged_steps if merged else ())):
            by = self.full_by
            when.append(Line.FULL_STEPS_BY(steps=full, by=by) if by else Line.FULL_STEPS(steps=full))
        when += [Line.FULL_BY_NEED(steps=_steps(steps), reason=why) for why, steps in self.full_reasons.items()]
        when.append(Line.EVALUATIONS(total=self.evaluations, merged=sum(self.merged_in[step] for step in merged)))
        names = self.unmerged_names()
        not_merged = [Line.UNMERGED(reason=why, blocks=_names(names[why])) for why in self.unmerged_reasons()]
        not_merged += [Line.UNMERGED_CALLS(reason=why) for why in self.unmerged_calls]
        return {Line.WHERE: where, Line.WHEN: when, Line.NOT_MERGED: not_merged, Line.HOW: self._how()}

    def unmerged_reasons(self) -> list[Message]:
        """Return why blocks and reference images were not merged, the reason of most of them first."""
        # A profile's choice is no reason in a run that would not have merged anyway.
        found = [reason for reason in self.unmerged if self.merged_steps or reason.id is not Reason.PROFILE_SKIPS_BLOCK]
        return sorted(found, key=lambda reason: -len(self.unmerged[reason]))

    def _why_full(self) -> Message:
        """Return why no step was merged."""
        if self.full_reasons:
            return max(self.full_reasons, key=lambda reason: len(self.full_reasons[reason]))
        if Reason.TOO_FEW_STEPS() in self.full_by:
            return Reason.TOO_FEW_STEPS()
        return Reason.EVERY_STEP_FULL_BY(by=self.full_by) if self.full_by else Reason.EVERY_STEP_FULL()

    def _at_most(self, share: Message | float) -> Message | float:
        return Line.UP_TO(share=share) if self.by_profile else share

    def _how(self) -> list[Message]:
        names = tuple(sorted(self.kernels, key=str))
        lines = [
            self.merged_blocks and Line.PLANS(selections=self.selections, weightings=self.weighings),
            self.cache_bytes and Line.RESIDUAL_CACHE(size=self.cache_bytes / 1e6),
            self.cache_disabled and Line.RESIDUAL_CACHE_DISABLED(),
            self.without_kv_cache and Line.NO_KV_CACHE(reason=self.without_kv_cache),
            self.kv_place[1] and Line.KV_PLACE(card=self.kv_place[0] / 1e9, main=self.kv_place[1] / 1e9),
            not self.kv_pinned and Line.KV_NOT_PINNED(),
            self.kv_skipped and Line.KV_FEWER_BLOCKS(percent=100 * self.kv_skipped),
            self.attentions >= {(False, False), (True, True)} and Line.ATTENTION_LEFT(),
            names and Line.KERNELS(names=names),
            *self.comfyui,
        ]
        return [line for line in lines if isinstance(line, Message)]


def natural_order(name: str) -> list[tuple[int, int | str]]:
    """Return a sorting key for names with numbers in them: block 2 before block 10."""
    parts = name.replace(".", " ").split()
    return [(0, int(part)) if part.isdigit() else (1, part) for part in parts]


def _names(blocks: set[str]) -> str:
    """Return the names of blocks, consecutive ones of a stack as a range: double.0-18, single.0."""
    stacks: dict[str, list[int]] = {}
    for name in sorted(blocks, key=natural_order):
        stack, dot, number = name.rpartition(".")
        if number.isdigit():
            stacks.setdefault(stack + dot, []).append(int(number))
        else:
            stacks[name] = []
    return ", ".join(_ranges(numbers, stack) if numbers else stack for stack, numbers in stacks.items())


def _steps(steps: Iterable[int]) -> str:
    """Return steps counted from 1, consecutive ones as a range."""
    return _ranges([step + 1 for step in sorted(steps)])


def _ranges(numbers: Iterable[int], prefix: str = "") -> str:
    # The difference between a number and its place is the same in a run of consecutive numbers.
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{prefix}{run[0]}" + (f"-{run[-1]}" if len(run) > 1 else "") for run in runs)
