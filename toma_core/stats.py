"""What a run did: counted as plain numbers while sampling, told once at its end."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field

import torch

from .clock import StepClock
from .maps import MergeMap


@dataclass
class RunStats:
    """Counters of one sampling run. `lock` guards them: several devices may share a run."""

    evaluations: int = 0
    merged_evaluations: int = 0
    steps: set[int] = field(default_factory=set)
    merged_steps: dict[int, float] = field(default_factory=dict)
    total_steps: int = 0
    grids: dict[tuple[int, int], int] = field(default_factory=dict)
    merged_blocks: set[str] = field(default_factory=set)
    blocks: set[str] = field(default_factory=set)
    left_whole: dict[str, set[str]] = field(default_factory=dict)
    selections: int = 0
    weighings: int = 0
    kernels: set[str] = field(default_factory=set)
    blind: set[str] = field(default_factory=set)
    attention: str = ""
    detail_bytes: int = 0
    maps: dict[tuple[int, int], MergeMap] = field(default_factory=dict)
    clock: StepClock = field(default_factory=StepClock)
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def count_evaluation(self, step: int, ratio: float, device: torch.device | None = None) -> None:
        """One model evaluation at this step and ratio (0: whole) begins on a device, None for the CPU."""
        with self.lock:
            self.clock.tick(step, device)
            self.evaluations += 1
            self.steps.add(step)
            if ratio:
                self.merged_evaluations += 1
                self.merged_steps[step] = ratio

    def count_plan(self, grid: tuple[int, int], kept: int, selected: bool) -> None:
        """One plan made for `grid`: with new destinations, or with new weights only."""
        with self.lock:
            self.grids[grid] = kept
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

    def speedup(self) -> float | None:
        """How many times faster the run was than whole steps alone, where it had whole steps to compare with and they
        did nothing but run."""
        return self.clock.speedup(self.merged_steps) if self.merged_blocks and not self.detail_bytes else None

    def headline(self) -> str:
        """The shortest line that tells what happened, for the node."""
        if not self.merged_blocks:
            return self.summary()
        grids = ", ".join(f"{h * w} -> {kept}" for (h, w), kept in sorted(self.grids.items())[::-1])
        line = f"{grids} tokens {self._extent()}"
        speedup = self.speedup()
        return line if speedup is None else f"{line}, {speedup:.2f}x measured"

    def _extent(self) -> str:
        steps = max(self.total_steps, len(self.steps))
        return f"in {len(self.merged_blocks)}/{len(self.blocks)} blocks, {len(self.merged_steps)}/{steps} steps"

    def summary(self) -> str:
        """One line for the log."""
        if not self.merged_blocks:
            settings = "start percent, end percent, whole every, plan from"
            reasons = "; ".join(self.left_whole) or f"every step ran whole ({settings})"
            return f"nothing was merged: {reasons}"
        grids = ", ".join(f"{h * w} -> {kept} tokens ({h}x{w})" for (h, w), kept in sorted(self.grids.items())[::-1])
        line = f"{grids} {self._extent()}, {self.selections} selections, {self.weighings} weighings"
        if self.detail_bytes:
            line += f", {self.detail_bytes / 1e6:.3g} MB of detail held"
        for reason, parts in self.left_whole.items():
            line += f"; left whole ({reason}): {_shortened(sorted(parts))}"
        if self.blind:
            line += f"; destinations at random ({', '.join(sorted(self.blind))})"
        if self.kernels:
            line += f"; kernels: {', '.join(sorted(self.kernels))}"
        return line

    def text(self) -> str:
        """Several lines for a reader: what was merged, where, when, and what was left whole."""
        lines = [self.summary(), ""]
        # A step inside the active range merged nothing if every block had a reason to stay whole.
        merged_steps = self.merged_steps if self.merged_blocks else {}
        if merged_steps:
            ratios = Counter(f"{ratio:.3g}" for ratio in merged_steps.values())
            lines.append(f"merged steps: {_ranges(merged_steps)}, at ratio {', '.join(ratios)}")
        whole_steps = self.steps - set(merged_steps)
        if whole_steps:
            lines.append(f"whole steps: {_ranges(whole_steps)}")
        merged_evaluations = self.merged_evaluations if self.merged_blocks else 0
        lines.append(f"model evaluations: {self.evaluations}, merged: {merged_evaluations}")
        lines.append(f"merged blocks: {', '.join(sorted(self.merged_blocks, key=natural_order)) or 'none'}")
        for reason, parts in self.left_whole.items():
            lines.append(f"left whole ({reason}): {', '.join(sorted(parts, key=natural_order))}")
        if self.attention:
            lines.append(f"attention: {self.attention}")
        return "\n".join(lines)


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
