"""Greedy search for the facility-location objective, all windows of all images at once (paper, section 4.1)."""

from __future__ import annotations

import torch
from torch import Tensor

from .objective import tie_step


def greedy_facility_location(similarity: Tensor, valid: Tensor | None, picks: int) -> Tensor:
    """The first `picks` greedy picks of every window, best first.

    similarity: (G, S, S) fp32, S_ij = cos(x_i, x_j); valid: (G, S) bool, False in padding slots, None if there are
    none. Returns (G, picks) int64 slots. A window with fewer valid slots than `picks` repeats a pick at the end.
    Ties go to the lowest slot, see `tie_step`. No host sync.

    Each round picks argmax_j of the gain sum_i relu(S_ij - m_i), where m_i = max over picked j of S_ij is how well
    token i is represented so far; m starts at -1, the smallest cosine.
    """
    slots = similarity.shape[1]
    # Added to the gains, which are never negative: picked slots lose to open ones, padding loses to everything.
    place = torch.arange(slots, dtype=similarity.dtype, device=similarity.device)
    penalty = (-tie_step(slots) * place).expand(similarity.shape[:2])
    if valid is not None:
        # A padding token must add nothing to any gain either.
        similarity = similarity.masked_fill(~valid[:, :, None], -1.0)
        penalty = penalty.masked_fill(~valid, -torch.inf)
    represented = similarity.new_full(similarity.shape[:2], -1.0)
    order = []
    for _ in range(picks):
        gain = (similarity - represented[:, :, None]).relu_().sum(1)
        pick = (gain + penalty).argmax(1)
        order.append(pick)
        penalty = penalty.scatter(1, pick[:, None], -1.0)
        picked = similarity.gather(2, pick[:, None, None].expand(-1, slots, 1)).squeeze(2)
        represented = torch.maximum(represented, picked)
    return torch.stack(order, 1)
