"""What a run did: counted as plain numbers while sampling, reported as messages at its end."""

from __future__ import annotations

import math
import threading
from collections import Counter
from dataclasses import dataclass, field

from .maps import MergeMap
from .reasons import Message, MessageId, Reason
from .windows import Grid


class Line(MessageId):
    """The lines of a report."""

    NOTHING_MERGED = "nothing_merged"  # reason
    ON = "on"  # share, blocks, steps
    ON_OTHERS = "on_others"  # line, reason
    SENTENCE = "sentence"  # sentence
    INDENTED = "indented"  # line
    # Shares of the tokens, blocks and steps.
    QUARTER = "quarter"
    THIRD = "third"
    HALF = "half"
    TWO_THIRDS = "two_thirds"
    THREE_QUARTERS = "three_quarters"
    PERCENT = "percent"  # value
    UP_TO = "up_to"  # share
    ALL_BLOCKS = "all_blocks"  # total
    SOME_BLOCKS = "some_blocks"  # part, total
    ALL_STEPS = "all_steps"  # total
    SOME_STEPS = "some_steps"  # part, total
    # Titles of sections.
    WHERE = "where"
    WHEN = "when"
    NOT_MERGED = "not_merged"
    HOW = "how"
    # What sections say.
    TOKENS = "tokens"  # sizes
    MERGED_BLOCKS = "merged_blocks"  # blocks
    NO_MERGED_BLOCKS = "no_merged_blocks"
    MERGED_STEPS = "merged_steps"  # steps
    MERGED_STEPS_AT = "merged_steps_at"  # steps, ratios
    FULL_STEPS = "full_steps"  # steps
    FULL_STEPS_BY = "full_steps_by"  # steps, by: messages
    FULL_BY_NEED = "full_by_need"  # steps, reason
    EVALUATIONS = "evaluations"  # total, merged
    UNMERGED = "unmerged"  # reason, blocks
    UNMERGED_PARTS = "unmerged_parts"  # count, reason
    MORE = "more"  # count
    PLANS = "plans"  # selections, weightings
    PLANS_AND_CACHE = "plans_and_cache"  # plans, size: MB
    RANDOM_DESTINATIONS = "random_destinations"  # reasons
    RESIDUAL_CACHE_DISABLED = "residual_cache_disabled"
    NO_KV_CACHE = "no_kv_cache"  # reason
    KERNELS = "kernels"  # names


@dataclass
class RunStats:
    """Counters of one sampling run. `lock` guards them: several devices may share a run."""

    evaluations: int = 0
    merged_evaluations: int = 0
    steps: set[int] = field(default_factory=set)
    merged_steps: dict[int, float] = field(default_factory=dict)
    total_steps: int = 0
    grids: dict[Grid, int] = field(default_factory=dict)
    merged_blocks: set[str] = field(default_factory=set)
    blocks: set[str] = field(default_factory=set)
    unmerged: dict[Message, set[str]] = field(default_factory=dict)
    selections: int = 0
    weighings: int = 0
    kernels: set[Message] = field(default_factory=set)
    content_independent: set[Message] = field(default_factory=set)
    full_by: tuple[Message, ...] = ()
    full_reasons: dict[Message, set[int]] = field(default_factory=dict)
    by_profile: bool = False
    cache_bytes: int = 0
    cache_disabled: bool = False
    without_kv_cache: Message | None = None
    maps: dict[Grid, MergeMap] = field(default_factory=dict)
    _merged_in: Counter[int] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def count_evaluation(self, step: int, ratio: float) -> None:
        """One model evaluation at this step and ratio (0: whole) begins."""
        with self.lock:
            self.evaluations += 1
            self.steps.add(step)
            if ratio:
                self.merged_evaluations += 1
                self.merged_steps[step] = ratio
                self._merged_in[step] += 1

    def discard_evaluations(self, step: int, evaluations: int, merged: int) -> None:
        """So many evaluations of this step, of which so many were merged, broke off and are made again, and counted."""
        with self.lock:
            self.evaluations -= evaluations
            self.merged_evaluations -= merged
            self._merged_in[step] -= merged
            if not self._merged_in[step]:
                self.merged_steps.pop(step, None)
            if not self.merged_steps:
                self.merged_blocks.clear()

    def full_because(self, step: int, reason: Message) -> None:
        """Note why an evaluation of this step is full although the schedule merges it."""
        with self.lock:
            self.full_reasons.setdefault(reason, set()).add(step)

    def count_plan(self, grid: Grid, kept: int, selected: bool) -> None:
        """One plan made for `grid`: with new destinations, or with new weights only."""
        with self.lock:
            # By a profile blocks differ: the fewest are told.
            self.grids[grid] = min(kept, self.grids.get(grid, kept)) if self.by_profile else kept
            self.selections += selected
            self.weighings += 1

    def computed_by(self, kernels: Message) -> None:
        """Plans were made by these kernels, or by plain PyTorch because of a reason."""
        with self.lock:
            self.kernels.add(kernels)

    def random_because(self, reason: Message) -> None:
        """Destinations lie at random, not where they represent most, because of `reason`."""
        with self.lock:
            self.content_independent.add(reason)

    def merged(self, block: str) -> None:
        """`block` ran on merged tokens, at least in part."""
        self.blocks.add(block)
        self.merged_blocks.add(block)

    def not_merged(self, block: str, reason: Message) -> None:
        """`block`, or the named part of it, ran on all tokens because of `reason`."""
        self.blocks.add(block.split(" ", 1)[0])
        self.unmerged.setdefault(reason, set()).add(block)

    def reference_not_merged(self, number: int, reason: Message) -> None:
        """The reference image of this number, from 1, is not merged because of `reason`."""
        self.unmerged.setdefault(reason, set()).add(f"reference {number}")

    def headline(self) -> Message:
        """The verdict."""
        if not self.merged_blocks:
            return Line.NOTHING_MERGED(reason=self._reasons()[0])
        share = sum(self.merged_steps.values()) / max(len(self.merged_steps), 1)
        merged, total, steps = len(self.merged_blocks), len(self.blocks), len(self.merged_steps)
        line = Line.ON(
            share=self._at_most(_share(share)),
            blocks=Line.ALL_BLOCKS(total=total) if merged == total else Line.SOME_BLOCKS(part=merged, total=total),
            steps=Line.ALL_STEPS(total=steps)
            if steps == self._step_count()
            else Line.SOME_STEPS(part=steps, total=self._step_count()),
        )
        others = [reason for reason in self._reasons() if self.unmerged and not reason.id.chosen]
        small = 2 * merged < total
        return Line.ON_OTHERS(line=line, reason=others[0]) if small and others else line

    def numbers(self) -> list[Message]:
        """The details of the headline, a line each."""
        lines = []
        if self.merged_blocks:
            lines += [Line.TOKENS(sizes=self._sizes()), Line.MERGED_STEPS(steps=_ranges(self.merged_steps))]
            lines += self._full_steps(self.steps - set(self.merged_steps))
        reasons = self._reasons() if self.unmerged else []
        return lines + [Line.UNMERGED_PARTS(count=len(self.unmerged[reason]), reason=reason) for reason in reasons]

    def summary(self) -> str:
        """One line in English for the log."""
        where = [Line.TOKENS(sizes=self._sizes()), self._work()] if self.merged_blocks else []
        unmerged = [
            Line.UNMERGED(reason=reason, blocks=_shortened(sorted(parts))) for reason, parts in self.unmerged.items()
        ]
        return "; ".join(map(str, [self.headline(), *where, *unmerged, *self._notes()]))

    def report(self) -> list[Message | str]:
        """The verdict, and then in sections where and when was merged, what was not merged and why, and how it was
        computed: a message or an empty string for each line."""
        # A step inside the active range merged nothing if every block had a reason against it.
        merged = self.merged_steps if self.merged_blocks else {}
        blocks = _by_number(self.merged_blocks)
        ratios = tuple(Counter(self._at_most(float(f"{ratio:.3g}")) for ratio in merged.values()))
        sections: dict[Message, list[Message]] = {
            Line.WHERE(): [
                *([Line.TOKENS(sizes=self._sizes())] if merged else []),
                Line.MERGED_BLOCKS(blocks=blocks) if blocks else Line.NO_MERGED_BLOCKS(),
            ],
            Line.WHEN(): [
                *([Line.MERGED_STEPS_AT(steps=_ranges(merged), ratios=ratios)] if merged else []),
                *self._full_steps(self.steps - set(merged)),
                *(Line.FULL_BY_NEED(steps=_ranges(steps), reason=why) for why, steps in self.full_reasons.items()),
                Line.EVALUATIONS(total=self.evaluations, merged=self.merged_evaluations if merged else 0),
            ],
            Line.NOT_MERGED(): [
                Line.UNMERGED(reason=reason, blocks=_by_number(self.unmerged[reason]))
                for reason in (self._reasons() if self.unmerged else [])
            ],
            Line.HOW(): [
                *([self._work()] if merged else []),
                *self._notes(),
            ],
        }
        found: list[Message | str] = [Line.SENTENCE(sentence=self.headline())]
        for title, lines in sections.items():
            if lines:
                found += ["", title, *(Line.INDENTED(line=line) for line in lines)]
        return found

    def text(self) -> str:
        """`report` in English."""
        return "\n".join(map(str, self.report()))

    def _reasons(self) -> list[Message]:
        """Why blocks were not merged, the reason of most blocks first."""
        # A profile's choice is no reason in a run that would not have merged anyway.
        told = [reason for reason in self.unmerged if self.merged_steps or reason.id is not Reason.PROFILE_SKIPS_BLOCK]
        found = sorted(told, key=lambda reason: -len(self.unmerged[reason]))
        found += [] if found else sorted(self.full_reasons, key=lambda reason: -len(self.full_reasons[reason]))
        return found or [self._every_step_full()]

    def _every_step_full(self) -> Message:
        if any(message.id is Reason.TOO_FEW_STEPS for message in self.full_by):
            return Reason.TOO_FEW_STEPS()
        return Reason.EVERY_STEP_FULL_BY(by=self.full_by) if self.full_by else Reason.EVERY_STEP_FULL()

    def _full_steps(self, full: set[int]) -> list[Message]:
        if not full:
            return []
        steps = _ranges(full)
        return [Line.FULL_STEPS_BY(steps=steps, by=self.full_by) if self.full_by else Line.FULL_STEPS(steps=steps)]

    def _at_most(self, share: Message | float) -> Message | float:
        """With a profile ratios differ by block: the largest of a step is shown."""
        return Line.UP_TO(share=share) if self.by_profile else share

    def _step_count(self) -> int:
        return max(self.total_steps, len(self.steps))

    def _sizes(self) -> tuple[str, ...]:
        """Tokens before and after, and the grid, the finest first."""
        more = "+" if self.by_profile else ""
        return tuple(
            f"{math.prod(grid)} -> {kept}{more} ({' x '.join(map(str, grid))})"
            for grid, kept in sorted(self.grids.items(), reverse=True)
        )

    def _work(self) -> Message:
        work = Line.PLANS(selections=self.selections, weightings=self.weighings)
        return Line.PLANS_AND_CACHE(plans=work, size=self.cache_bytes / 1e6) if self.cache_bytes else work

    def _notes(self) -> list[Message]:
        notes = (
            [Line.RANDOM_DESTINATIONS(reasons=_in_order(self.content_independent))] if self.content_independent else []
        )
        if self.cache_disabled:
            notes.append(Line.RESIDUAL_CACHE_DISABLED())
        if self.without_kv_cache is not None:
            notes.append(Line.NO_KV_CACHE(reason=self.without_kv_cache))
        return notes + ([Line.KERNELS(names=_in_order(self.kernels))] if self.kernels else [])


# Shares of the tokens that have a name.
_NAMED = {
    0.25: Line.QUARTER,
    1 / 3: Line.THIRD,
    0.5: Line.HALF,
    2 / 3: Line.TWO_THIRDS,
    0.75: Line.THREE_QUARTERS,
}


def _share(share: float) -> Message:
    nearest = min(_NAMED, key=lambda named: abs(named - share))
    return _NAMED[nearest]() if abs(nearest - share) < 0.01 else Line.PERCENT(value=100 * share)


def _in_order(messages: set[Message]) -> tuple[Message, ...]:
    return tuple(sorted(messages, key=str))


def _shortened(names: list[str], most: int = 3) -> tuple[Message | str, ...]:
    more = (Line.MORE(count=len(names) - most),) if len(names) > most else ()
    return (*names[:most], *more)


def natural_order(name: str) -> list[tuple[int, int | str]]:
    """Sorting key for names with numbers in them: block 2 before block 10."""
    parts = name.replace(".", " ").split()
    return [(0, int(part)) if part.isdigit() else (1, part) for part in parts]


def _by_number(names: set[str]) -> tuple[str, ...]:
    return tuple(sorted(names, key=natural_order))


def _ranges(steps: set[int] | dict[int, float]) -> str:
    pieces: list[list[int]] = []
    for step in sorted(steps):
        if pieces and step == pieces[-1][1] + 1:
            pieces[-1][1] = step
        else:
            pieces.append([step, step])
    return ", ".join(str(a + 1) if a == b else f"{a + 1}-{b + 1}" for a, b in pieces)
