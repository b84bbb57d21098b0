"""What a run did: counted as plain numbers while sampling, told once at its end."""

from __future__ import annotations

import math
import threading
from collections import Counter
from dataclasses import dataclass, field

from .maps import MergeMap
from .reasons import Message
from .windows import Grid

# Why a block runs whole in an evaluation that merges others.
PROFILED = "unmerged by the profile"


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
    left_whole: dict[str, set[str]] = field(default_factory=dict)
    selections: int = 0
    weighings: int = 0
    kernels: set[str] = field(default_factory=set)
    blind: set[str] = field(default_factory=set)
    full_by: str = ""
    full_reasons: dict[Message, set[int]] = field(default_factory=dict)
    by_profile: bool = False
    detail_bytes: int = 0
    detail_given_up: bool = False
    without_keys: str = ""
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

    def take_back(self, step: int, evaluations: int, merged: int) -> None:
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

    def computed_by(self, kernels: str) -> None:
        """Plans were made by these kernels, or by plain PyTorch because of a reason."""
        with self.lock:
            self.kernels.add(kernels)

    def chosen_blindly(self, reason: str) -> None:
        """Destinations lie at random, not where they represent most, because of `reason`."""
        with self.lock:
            self.blind.add(reason)

    def merged(self, block: str) -> None:
        """`block` ran on merged tokens, at least in part."""
        self.blocks.add(block)
        self.merged_blocks.add(block)

    def whole(self, block: str, reason: str) -> None:
        """`block`, or the named part of it, ran on all tokens because of `reason`."""
        self.blocks.add(block.split(" ", 1)[0])
        self.left_whole.setdefault(reason, set()).add(block)

    def headline(self) -> str:
        """One sentence that tells what happened, for the node. web/said has it in other languages."""
        if not self.merged_blocks:
            return f"Nothing was merged: {self._reasons()[0]}"
        share = sum(self.merged_steps.values()) / max(len(self.merged_steps), 1)
        blocks = _of(len(self.merged_blocks), len(self.blocks), "blocks")
        steps = _of(len(self.merged_steps), self._step_count(), "steps")
        line = f"On: {self._at_most(_share(share))} of the tokens merged, {blocks}, {steps}"
        wanted = "whole_", PROFILED
        hindered = [why for why in self._reasons() if self.left_whole and not why.startswith(wanted)]
        small = 2 * len(self.merged_blocks) < len(self.blocks)
        return f"{line}. The other blocks: {hindered[0]}" if small and hindered else line

    def numbers(self) -> str:
        """What stands behind the headline, a line for each thing."""
        lines = []
        if self.merged_blocks:
            grids = [(math.prod(grid), " x ".join(map(str, grid)), kept) for grid, kept in self._grids()]
            sizes = [f"{tokens} -> {kept}{self._or_more} ({size})" for tokens, size, kept in grids]
            lines += [f"Tokens: {', '.join(sizes)}", f"Merged steps: {_ranges(self.merged_steps)}"]
            if full := self.steps - set(self.merged_steps):
                lines.append(f"Full steps: {_ranges(full)}{self._because()}")
        if self.left_whole:
            lines += [f"Unmerged parts: {len(self.left_whole[reason])}, {reason}" for reason in self._reasons()]
        return "\n".join(lines)

    def summary(self) -> str:
        """One line for the log."""
        if not self.merged_blocks:
            return f"nothing was merged: {'; '.join(self._reasons())}"
        extent = f"{len(self.merged_blocks)}/{len(self.blocks)} blocks"
        extent += f", {len(self.merged_steps)}/{self._step_count()} steps"
        unmerged = [f"unmerged ({why}): {_shortened(sorted(parts))}" for why, parts in self.left_whole.items()]
        return "; ".join([f"{self._sizes()} in {extent}, {self._work()}", *unmerged, *self._notes()])

    def text(self) -> str:
        """For a reader: the verdict first, and then in sections where and when was merged, what stayed unmerged and
        why, and how it was computed."""
        # A step inside the active range merged nothing if every block had a reason to stay whole.
        merged = self.merged_steps if self.merged_blocks else {}
        full = self.steps - set(merged)
        ratios = ", ".join(Counter(self._at_most(f"{ratio:.3g}") for ratio in merged.values()))
        sections = {
            "Where": [
                *([f"tokens: {self._sizes()}"] if merged else []),
                f"merged blocks: {', '.join(sorted(self.merged_blocks, key=natural_order)) or 'none'}",
            ],
            "When": [
                *([f"merged steps: {_ranges(merged)}, at ratio {ratios}"] if merged else []),
                *([f"full steps: {_ranges(full)}{self._because()}"] if full else []),
                *(f"full by need: {_ranges(steps)} ({why})" for why, steps in self.full_reasons.items()),
                f"model evaluations: {self.evaluations}, merged: {self.merged_evaluations if merged else 0}",
            ],
            "Unmerged": [
                f"unmerged ({why}): {', '.join(sorted(self.left_whole[why], key=natural_order))}"
                for why in (self._reasons() if self.left_whole else [])
            ],
            "How": [
                *([self._work()] if merged else []),
                *self._notes(),
            ],
        }
        told = ["\n".join([title, *(f"  {line}" for line in lines)]) for title, lines in sections.items() if lines]
        return "\n\n".join([f"{self.headline()}.", *told])

    def _reasons(self) -> list[str]:
        """Why parts stayed unmerged, what concerns most of them first."""
        settings = "start percent, end percent, full step every, compare tokens by, profile"
        # What a profile leaves whole is no reason where nothing was to be merged anyhow.
        told = [reason for reason in self.left_whole if self.merged_steps or reason != PROFILED]
        found = sorted(told, key=lambda reason: -len(self.left_whole[reason]))
        found += [] if found else map(str, sorted(self.full_reasons, key=lambda why: -len(self.full_reasons[why])))
        return found or [f"every step ran in full ({settings})"]

    def _because(self) -> str:
        return f" ({self.full_by})" if self.full_by else ""

    @property
    def _or_more(self) -> str:
        return "+" if self.by_profile else ""

    def _at_most(self, share: str) -> str:
        """By a profile blocks differ: what is known of a step is the most."""
        return f"up to {share}" if self.by_profile else share

    def _step_count(self) -> int:
        return max(self.total_steps, len(self.steps))

    def _grids(self) -> list[tuple[Grid, int]]:
        return sorted(self.grids.items())[::-1]

    def _sizes(self) -> str:
        sizes = [(math.prod(grid), "x".join(map(str, grid)), kept) for grid, kept in self._grids()]
        return ", ".join(f"{tokens} -> {kept}{self._or_more} tokens ({size})" for tokens, size, kept in sizes)

    def _work(self) -> str:
        work = f"{self.selections} selections, {self.weighings} weighings"
        return f"{work}, {self.detail_bytes / 1e6:.3g} MB of detail held" if self.detail_bytes else work

    def _notes(self) -> list[str]:
        notes = [f"destinations at random ({', '.join(sorted(self.blind))})"] if self.blind else []
        if self.detail_given_up:
            notes.append("detail was given up: no room for it")
        if self.without_keys:
            notes.append(f"merged blocks do not look at all tokens: {self.without_keys}")
        return notes + ([f"kernels: {', '.join(sorted(self.kernels))}"] if self.kernels else [])


# Shares of the tokens that have a name.
_NAMED = {0.25: "a quarter", 1 / 3: "a third", 0.5: "half", 2 / 3: "two thirds", 0.75: "three quarters"}


def _share(share: float) -> str:
    nearest = min(_NAMED, key=lambda named: abs(named - share))
    return _NAMED[nearest] if abs(nearest - share) < 0.01 else f"{share * 100:.0f} %"


def _of(part: int, total: int, things: str) -> str:
    return f"all {total} {things}" if part == total else f"{part} of {total} {things}"


def _shortened(names: list[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def natural_order(name: str) -> list[tuple[int, int | str]]:
    """Sorting key for names with numbers in them: block 2 before block 10."""
    parts = name.replace(".", " ").split()
    return [(0, int(part)) if part.isdigit() else (1, part) for part in parts]


def _ranges(steps: set[int] | dict[int, float]) -> str:
    pieces: list[list[int]] = []
    for step in sorted(steps):
        if pieces and step == pieces[-1][1] + 1:
            pieces[-1][1] = step
        else:
            pieces.append([step, step])
    return ", ".join(str(a + 1) if a == b else f"{a + 1}-{b + 1}" for a, b in pieces)
