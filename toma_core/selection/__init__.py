"""Which tokens become destinations: an objective (`objective`), a search (`greedy`), and rivals (`baselines`)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..config import SelectorKind
from ..windows import Budget, Windows, upload
from .baselines import farthest_point, random_order, strided_grid, tome_matching
from .greedy import greedy_facility_location
from .objective import cosine_similarity, facility_location, in_parts

__all__ = ["SEARCHES", "SEES_NOTHING", "cosine_similarity", "facility_location", "in_parts", "select"]

# Destinations by these are the same whatever a picture shows.
SEES_NOTHING = (SelectorKind.GRID, SelectorKind.RANDOM)
# Picks by these are an order, of which a window may take as many as it likes.
SEARCHES = (SelectorKind.FACILITY_LOCATION, SelectorKind.FARTHEST_POINT)


def select(similarity: Tensor, windows: Windows, budget: Budget, kind: SelectorKind, seed: int = 0) -> Tensor:
    """Pick each window's destinations.

    similarity: (B, W, S, S) fp32 from `cosine_similarity`. Returns (B, W, K) int64 slots of the window, ascending
    within a window so that reduced tokens keep the reading order; an unused place repeats the window's first
    destination.
    """
    batch, count, slots = similarity.shape[:3]
    flat = similarity.flatten(0, 1)
    valid = None if windows.valid is None else windows.valid.repeat(batch, 1)
    if kind is SelectorKind.FACILITY_LOCATION:
        picks = greedy_facility_location(flat, valid, budget.slots)
    elif kind is SelectorKind.FARTHEST_POINT:
        picks = farthest_point(flat, valid, budget.slots)
    elif kind is SelectorKind.TOME:
        picks = tome_matching(flat, valid, budget.slots)
    elif kind is SelectorKind.RANDOM:
        picks = upload(random_order(windows.counts, budget.slots, seed), flat.device).repeat(batch, 1)
    else:
        picks = upload(strided_grid(windows.counts, budget.counts, budget.slots), flat.device).repeat(batch, 1)

    picks = picks.view(batch, count, budget.slots)
    if budget.valid is None:
        return picks.sort(-1).values
    # Searches pick for the largest budget; a smaller one is a prefix of the order, because greedy picks are nested.
    picks = picks.masked_fill(~budget.valid, slots).sort(-1).values
    return torch.where(picks == slots, picks[..., :1], picks)
