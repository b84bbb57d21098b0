"""Which tokens become destinations: an objective (`objective`), and a search (`greedy`)."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..windows import Budget, Windows, upload
from .greedy import greedy_facility_location
from .objective import cosine_similarity, facility_location, in_parts

__all__ = ["cosine_similarity", "facility_location", "in_parts", "select", "select_at_random"]


def select(similarity: Tensor, windows: Windows, budget: Budget) -> Tensor:
    """Pick the destinations of each window that represent its tokens best.

    similarity: (B, W, S, S) fp32 from `cosine_similarity`. Returns (B, W, K) int64 slots of the window, ascending
    within a window so that reduced tokens keep the reading order; an unused place repeats the window's first
    destination.
    """
    valid = None if windows.valid is None else windows.valid.repeat(similarity.shape[0], 1)
    picks = greedy_facility_location(similarity.flatten(0, 1), valid, budget.slots)
    return in_reading_order(picks.view(*similarity.shape[:2], budget.slots), windows, budget)


def select_at_random(images: int, windows: Windows, budget: Budget, seed: int) -> Tensor:
    """Pick destinations without a look at the tokens, the same in every image. Returns (B, W, K), see `select`."""
    picks = upload(random_order(windows.counts, budget.slots, seed), windows.source.device)
    return in_reading_order(picks.expand(images, -1, -1), windows, budget)


def in_reading_order(picks: Tensor, windows: Windows, budget: Budget) -> Tensor:
    """Sort picks of (B, W, K), best first, by their place. They are as many as the largest budget; a smaller one is a
    prefix of the order."""
    if budget.valid is None:
        return picks.sort(-1).values
    picks = picks.masked_fill(~budget.valid, windows.slots).sort(-1).values
    return torch.where(picks == windows.slots, picks[..., :1], picks)


@functools.lru_cache(maxsize=64)
def random_order(counts: tuple[int, ...], picks: int, seed: int) -> Tensor:
    """Draw distinct slots for windows of `counts` tokens, from an own generator. (W, picks), CPU."""
    generator = torch.Generator().manual_seed(seed)
    slots = max(*counts, picks)
    keys = torch.rand(len(counts), slots, generator=generator)
    keys = keys.masked_fill(torch.arange(slots) >= torch.tensor(counts)[:, None], torch.inf)
    return keys.argsort(1)[:, :picks].minimum(torch.tensor(counts)[:, None] - 1)
