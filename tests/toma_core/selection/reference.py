"""Provide the greedy search in plain loops over one window, as a reference for the fast versions."""

from __future__ import annotations

from itertools import combinations

from torch import Tensor

from toma_core.selection import tie_step


def naive_value(similarity: Tensor, dest_slots: list[int]) -> float:
    """Return f(A) = sum_i max_{j in A} (1 + S_ij) for the slots A of one window, and 0 if A is empty."""
    if not dest_slots:
        return 0.0
    return sum(max(1.0 + float(similarity[i, j]) for j in dest_slots) for i in range(similarity.shape[0]))


def naive_greedy(similarity: Tensor, dest_slots: int) -> list[int]:
    """Return the slots that a greedy search selects in one window, best first. Of slots with equal gains (see
    `tie_step`), the lowest is selected."""
    slots = similarity.shape[1]
    step = tie_step(slots)
    chosen: list[int] = []
    for _ in range(dest_slots):
        rest = [j for j in range(slots) if j not in chosen]
        chosen.append(max(rest, key=lambda j: naive_value(similarity, [*chosen, j]) - step * j))
    return chosen


def best_value(similarity: Tensor, dest_slots: int) -> float:
    """Return the largest value that any set of `dest_slots` destinations has in a small window, by brute force."""
    return max(naive_value(similarity, list(a)) for a in combinations(range(similarity.shape[0]), dest_slots))
