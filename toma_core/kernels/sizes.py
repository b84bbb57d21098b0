"""Sizes in plain integers: Triton's own helpers for them take the host longer than a launch."""

from __future__ import annotations

# Triton's matrix product takes no smaller side.
DOT_MIN = 16


def cdiv(size: int, part: int) -> int:
    """How many parts hold `size`."""
    return -(-size // part)


def padded(size: int) -> int:
    """The power of two that holds `size` and can be a side of a matrix product."""
    return max(DOT_MIN, 1 << (size - 1).bit_length())
