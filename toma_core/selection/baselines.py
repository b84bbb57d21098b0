"""Rivals of greedy facility location, for comparison at equal budgets. Same contract: (G, picks) int64 slots."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def farthest_point(similarity: Tensor, valid: Tensor | None, picks: int) -> Tensor:
    """Start at the most central token, then always take the token least represented so far.

    similarity: (G, S, S) fp32; valid: (G, S) bool or None.
    """
    padding = torch.zeros_like(similarity[..., 0], dtype=torch.bool) if valid is None else ~valid
    centrality = similarity.masked_fill(padding[:, :, None], 0.0).sum(1).masked_fill(padding, -torch.inf)
    represented = similarity.new_full(similarity.shape[:2], -2.0).masked_fill(padding, torch.inf)
    order: list[Tensor] = []
    for _ in range(picks):
        pick = represented.argmin(1) if order else centrality.argmax(1)
        order.append(pick)
        picked = similarity.gather(2, pick[:, None, None].expand(-1, similarity.shape[1], 1)).squeeze(2)
        represented = torch.maximum(represented, picked).scatter(1, pick[:, None], torch.inf)
    return torch.stack(order, 1)


def tome_matching(similarity: Tensor, valid: Tensor | None, picks: int) -> Tensor:
    """ToMe's bipartite soft matching (Bolya & Hoffman 2023): every fourth token is a destination candidate, the
    others are sources, and the sources most similar to a candidate are merged away until `picks` tokens are left.

    similarity: (G, S, S) fp32; valid: (G, S) bool or None. Below a quarter of the tokens the candidates themselves
    are thinned evenly, which ToMe does not define.
    """
    slots = similarity.shape[1]
    candidate = torch.arange(slots, device=similarity.device) % 4 == 0
    best = similarity.masked_fill(~candidate, -torch.inf)
    if valid is not None:
        best = best.masked_fill(~valid[:, None, :], -torch.inf)
    closeness = best.amax(2)
    # Kept first: candidates, then the sources that would lose most by merging; padding slots last.
    cost = torch.where(candidate, closeness.new_full((), -3.0), closeness)
    if valid is not None:
        cost = cost.masked_fill(~valid, torch.inf)
    if picks < -(-slots // 4):
        last = slots - 1 if valid is None else valid.sum(1, keepdim=True) - 1
        thinned = (torch.linspace(0, 1, picks, device=cost.device) * last).round().long()
        cost = cost.scatter(1, thinned.expand(len(cost), -1), -4.0)
    return cost.argsort(dim=1, stable=True)[:, :picks]


@functools.lru_cache(maxsize=64)
def random_order(counts: tuple[int, ...], picks: int, seed: int) -> Tensor:
    """Distinct random slots for windows of `counts` tokens, from an own generator. (W, picks), CPU."""
    generator = torch.Generator().manual_seed(seed)
    slots = max(*counts, picks)
    keys = torch.rand(len(counts), slots, generator=generator)
    keys = keys.masked_fill(torch.arange(slots) >= torch.tensor(counts)[:, None], torch.inf)
    return keys.argsort(1)[:, :picks].minimum(torch.tensor(counts)[:, None] - 1)


def strided_grid(counts: tuple[int, ...], kept: tuple[int, ...], picks: int) -> Tensor:
    """Evenly spaced slots for windows of `counts` tokens of which `kept` stay. (W, picks), CPU."""
    index = torch.arange(picks)
    places = (index + 0.5) * torch.tensor(counts)[:, None] / torch.tensor(kept)[:, None]
    return places.long().minimum(torch.tensor(counts)[:, None] - 1)
