"""Sizes in plain integers: Triton's own helpers for them take the host longer than a launch."""

from __future__ import annotations

from collections.abc import Hashable

from ..windows import Budget, Windows

# Triton's matrix product takes no smaller side.
DOT_MIN = 16


def cdiv(size: int, part: int) -> int:
    """How many parts hold `size`."""
    return -(-size // part)


def padded(size: int) -> int:
    """The power of two that holds `size` and can be a side of a matrix product."""
    return max(DOT_MIN, 1 << (size - 1).bit_length())


def variant(channels: int, windows: Windows, budget: Budget) -> Hashable:
    """What tells the binaries apart that tokens of so many channels need in this layout. Others than these share them:
    how many windows there are, of how many tokens within the same padded size, is told to a kernel when it runs."""
    slots = tuple((padded(size), cdiv(size, 32)) for size in (windows.slots, budget.slots))
    ragged = windows.valid is not None, 0 if budget.valid is None else budget.valid.ndim
    return slots, ragged, min(128, padded(channels)), channels % 16 == 0
