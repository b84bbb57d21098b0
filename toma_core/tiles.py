"""Identify the images of a call by comparing latents on the device.

Tiled sampling cuts the latent into tiles, several to a call, in any order and without a name. Two images are the same
tile under different conditions if all their numbers are equal.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from .merge import MergePlan


@dataclass(eq=False)
class TileBatch:
    """The images of one call."""

    latent: Tensor  # (B, ...), the latents that are evaluated
    # Calls of the same evaluation with images of this size, which may show the same tiles.
    earlier: tuple[TileBatch, ...] = ()
    plans: dict[Hashable, MergePlan] = field(default_factory=dict)
    _first: Tensor = field(init=False)  # (B,) int64, the first image equal to each

    def __post_init__(self) -> None:
        # An image that holds NaN equals nothing, not even itself.
        self._first = _same(self.latent, self.latent).fill_diagonal_(True).int().argmax(1)

    def tokens(self, x: Tensor) -> Tensor:
        """Return for each image the tokens of the first equal one, (B, N, C)."""
        return x.index_select(0, self._first)

    def resolve(self, key: Hashable, plan: MergePlan) -> MergePlan:
        """Store and return the plan, with the weights of an earlier call for images that it had. key: which blocks
        share the plan."""
        before = [(batch.latent, batch.plans[key]) for batch in self.earlier if key in batch.plans]
        if before:
            same = _same(self.latent, torch.cat([latent for latent, _ in before]))
            known, where = same.any(1), same.int().argmax(1)

            def chosen(name: str) -> Tensor:
                old = torch.cat([getattr(plan, name) for _, plan in before]).index_select(0, where)
                new = getattr(plan, name)
                return torch.where(known.view(-1, *[1] * (new.ndim - 1)), old, new)

            names = "dest_slots", "merge_weights", "unmerge_weights"
            plan = replace(plan, **{name: chosen(name) for name in names})  # type: ignore[arg-type]
        self.plans[key] = plan
        return plan


# Two latents show different pictures if they are farther apart than this share of their norm. Two of other noise are
# 1.4 apart; what samplers add to one latent within a step is less.
_ANOTHER = 0.7


@dataclass(eq=False)
class Turns:
    """Notices latents of one size that a sampler evaluates by turns, as it may the tiles or the pictures of a batch."""

    found: bool = False  # whether there were any
    # Where in the run the evaluation before was, and the last latent there of each kind of evaluation.
    _place: Hashable = None
    _latents: dict[Hashable, Tensor] = field(default_factory=dict)

    def note(self, place: Hashable, kind: Hashable, latent: Tensor | None) -> None:
        """Note an evaluation of a latent of (B, ...). Waits for the device if the one before of this kind was at the
        same place."""
        if place != self._place:
            self.close()
        before = self._latents.get(kind)
        if latent is None or self.found:
            return
        self._place, self._latents[kind] = place, latent
        if before is not None and before.shape == latent.shape:
            apart = torch.linalg.vector_norm(latent - before)
            self.found = bool(apart > _ANOTHER * torch.linalg.vector_norm(latent))

    def close(self) -> None:
        """Drop the latents."""
        self._latents.clear()


def _same(a: Tensor, b: Tensor) -> Tensor:
    """Return which images are equal in every number: (B, ...), (B', ...) -> (B, B') bool."""
    return (a.flatten(1)[:, None] == b.flatten(1)[None]).all(-1)
