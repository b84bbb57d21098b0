"""Select the destinations of each window: an objective (`objective`) and a search (`greedy`)."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..windows import Budget, Windows, upload
from .greedy import greedy_facility_location
from .objective import cosine_similarity, in_parts

__all__ = ["cosine_similarity", "in_parts", "select", "select_at_random"]


def select(similarity: Tensor, windows: Windows, budget: Budget) -> Tensor:
    """Return the slots of destinations that represent each window's tokens best, (B, W, K) int64.

    similarity: (B, W, S, S) fp32 from `cosine_similarity`. Slots ascend within a window, so that merged tokens keep the
    reading order; unused slots of the budget repeat the first.
    """
    valid = None if windows.valid is None else windows.valid.repeat(similarity.shape[0], 1)
    slots = greedy_facility_location(similarity.flatten(0, 1), valid, budget.slots)
    return in_reading_order(slots.view(*similarity.shape[:2], budget.slots), windows, budget)


def select_at_random(images: int, windows: Windows, budget: Budget, seed: int) -> Tensor:
    """Return random slots, the same in every image: (B, W, K) int64, as of `select`."""
    slots = upload(random_order(windows.counts, budget.slots, seed), windows.source.device)
    return in_reading_order(slots.expand(images, -1, -1), windows, budget)


def in_reading_order(dest_slots: Tensor, windows: Windows, budget: Budget) -> Tensor:
    """Sort slots of (B, W, K), best first, by position. A window with a smaller budget takes a prefix."""
    if budget.valid is None:
        return dest_slots.sort(-1).values
    dest_slots = dest_slots.masked_fill(~budget.valid, windows.slots).sort(-1).values
    return torch.where(dest_slots == windows.slots, dest_slots[..., :1], dest_slots)


@functools.lru_cache(maxsize=64)
def random_order(counts: tuple[int, ...], number: int, seed: int) -> Tensor:
    """Draw `number` distinct slots of windows of `counts` tokens from a local generator: (W, number) on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    slots = max(*counts, number)
    keys = torch.rand(len(counts), slots, generator=generator)
    keys = keys.masked_fill(torch.arange(slots) >= torch.tensor(counts)[:, None], torch.inf)
    return keys.argsort(1)[:, :number].minimum(torch.tensor(counts)[:, None] - 1)
