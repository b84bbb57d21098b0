"""Search greedily for the facility-location objective, in all windows of all images at once (paper, section 4.1)."""

from __future__ import annotations

import torch
from torch import Tensor

from .objective import tie_step


def greedy_facility_location(similarity: Tensor, valid: Tensor | None, number: int) -> Tensor:
    """Return the first `number` slots of every window that a greedy search picks, best first: (G, number) int64.

    similarity: (G, S, S) fp32, S_ij = cos(x_i, x_j); valid: (G, S) bool, False in padding slots, None without padding.
    A window with fewer valid slots repeats one at the end. Ties go to the lowest slot, see `tie_step`. No host sync.

    Each round picks argmax_j of the gain sum_i relu(S_ij - m_i), where m_i = max over picked j of S_ij is how well
    token i is represented so far; m starts at -1, the smallest cosine.
    """
    slots = similarity.shape[1]
    # Gains are never negative: picked slots lose to open ones, padding to all.
    slot = torch.arange(slots, dtype=similarity.dtype, device=similarity.device)
    penalty = (-tie_step(slots) * slot).expand(similarity.shape[:2])
    if valid is not None:
        # Padding tokens add nothing to any gain.
        similarity = similarity.masked_fill(~valid[:, :, None], -1.0)
        penalty = penalty.masked_fill(~valid, -torch.inf)
    represented = similarity.new_full(similarity.shape[:2], -1.0)
    order = []
    for _ in range(number):
        gain = (similarity - represented[:, :, None]).relu_().sum(1)
        pick = (gain + penalty).argmax(1)
        order.append(pick)
        penalty = penalty.scatter(1, pick[:, None], -1.0)
        picked = similarity.gather(2, pick[:, None, None].expand(-1, slots, 1)).squeeze(2)
        represented = torch.maximum(represented, picked)
    return torch.stack(order, 1)
