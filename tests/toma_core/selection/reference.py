"""The greedy search as one reads it in a textbook: plain loops over one window, the oracle of the fast versions."""

from __future__ import annotations

from itertools import combinations

from torch import Tensor

from toma_core.selection.objective import tie_step


def naive_value(similarity: Tensor, picks: list[int]) -> float:
    """f(A) = sum_i max_{j in A} (1 + S_ij) of one (S, S) window; 0 for the empty set."""
    if not picks:
        return 0.0
    return sum(max(1.0 + float(similarity[i, j]) for j in picks) for i in range(similarity.shape[0]))


def naive_greedy(similarity: Tensor, picks: int) -> list[int]:
    """The greedy picks of one (S, S) window, best first; ties go to the lowest slot, see `tie_step`."""
    slots = similarity.shape[1]
    step = tie_step(slots)
    chosen: list[int] = []
    for _ in range(picks):
        rest = [j for j in range(slots) if j not in chosen]
        chosen.append(max(rest, key=lambda j: naive_value(similarity, [*chosen, j]) - step * j))
    return chosen


def best_value(similarity: Tensor, picks: int) -> float:
    """The optimum over all sets of `picks` destinations, by brute force: small windows only."""
    return max(naive_value(similarity, list(a)) for a in combinations(range(similarity.shape[0]), picks))
