"""Identify the images of a call on tiles. Tiled sampling passes tiles in any order and without names. Images with equal
elements show the same tile under different conditions."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .merge import MergePlan


@dataclass(eq=False)
class TileBatch:
    """The images of one call of the model, each of which may be a tile."""

    latent: Tensor  # (B, ...), the latents that are evaluated
    earlier: tuple[TileBatch, ...] = ()  # earlier calls of the same evaluation, which may show the same tiles
    plans: dict[Hashable, MergePlan] = field(default_factory=dict)
    first: Tensor = field(init=False)  # (B,) int64, for each image, the first image that equals it

    def __post_init__(self) -> None:
        # Fill the diagonal, because an image that holds NaN does not equal itself.
        self.first = _same(self.latent, self.latent).fill_diagonal_(True).int().argmax(1)

    def resolve(self, key: Hashable, plan: MergePlan) -> MergePlan:
        """Store and return the plan of the blocks that share `key`; images of earlier calls keep their plans."""
        before = [batch for batch in self.earlier if key in batch.plans]
        if before:
            same = _same(self.latent, torch.cat([batch.latent for batch in before]))
            known = same.any(1)
            where = same.int().argmax(1)

            def chosen(name: str, new: Tensor) -> Tensor:
                old = torch.cat([getattr(batch.plans[key], name) for batch in before]).index_select(0, where)
                return torch.where(known.view(-1, *[1] * (new.ndim - 1)), old, new)

            plan = plan.changed(chosen)
        self.plans[key] = plan
        return plan


def _same(a: Tensor, b: Tensor) -> Tensor:
    """Return which images are equal in every number: (B, ...), (B', ...) -> (B, B') bool."""
    return (a.flatten(1)[:, None] == b.flatten(1)[None]).all(-1)
