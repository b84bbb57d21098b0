"""Provide greedy searches in one window, as references for the fast versions."""

from itertools import combinations

import torch
from torch import Tensor

from toma_core.selection import tie_step


def naive_value(similarity: Tensor, dest_slots: list[int]) -> float:
    """Return f(A) = sum_i max_{j in A} (1 + S_ij) for the slots A of one window, and 0 if A is empty."""
    if not dest_slots:
        return 0.0
    return sum(max(1.0 + float(similarity[i, j]) for j in dest_slots) for i in range(similarity.shape[0]))


def naive_greedy(similarity: Tensor, dest_slots: int) -> list[int]:
    """Return the slots that a greedy search selects in one window, best first. Of slots with equal gains it takes the
    lowest."""
    slots = similarity.shape[1]
    step = tie_step(slots)
    chosen: list[int] = []
    for _ in range(dest_slots):
        rest = [j for j in range(slots) if j not in chosen]
        chosen.append(max(rest, key=lambda j: naive_value(similarity, [*chosen, j]) - step * j))
    return chosen


def exact_greedy(similarity: Tensor, dest_slots: int, step: float) -> tuple[list[int], float]:
    """Return the slots that a greedy search in fp64 selects in one window, best first, and the smallest lead of a slot.

    A lead is the difference between the two largest gains at a selection, divided by the largest if that is above 1.
    """
    similarity = similarity.double()
    penalty = -step * torch.arange(len(similarity), dtype=torch.float64, device=similarity.device)
    represented = torch.full_like(penalty, -1.0)
    order, leads = list[int](), [float("inf")]
    for _ in range(dest_slots):
        gain = (similarity - represented[:, None]).clamp_min(0).sum(0)
        best = (gain + penalty).topk(min(2, len(gain)))
        if len(gain) - len(order) > 1:
            leads.append(float((best.values[0] - best.values[1]) / gain.amax().clamp_min(1.0)))
        order.append(int(best.indices[0]))
        penalty[order[-1]] = -float("inf")
        represented = torch.maximum(represented, similarity[:, order[-1]])
    return order, min(leads)


def best_value(similarity: Tensor, dest_slots: int) -> float:
    """Return the largest value that any set of `dest_slots` destinations has in a small window, by brute force."""
    return max(naive_value(similarity, list(a)) for a in combinations(range(similarity.shape[0]), dest_slots))
