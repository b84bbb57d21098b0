"""What a call of the model shows, where nobody tells: the latents themselves are compared, on the device.

Tiled sampling cuts the latent into pieces, several to a call and in any order, and hands them over without a name. Of
two images that show the same under different conditions every number is the same; no two others are.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from .merge import MergePlan


@dataclass(eq=False)
class TileBatch:
    """The images of one call. latent: (B, ...), what they are evaluated on. earlier: calls of the same evaluation, of
    images of this size, any of which may have shown the same."""

    latent: Tensor
    earlier: tuple[TileBatch, ...] = ()
    plans: dict[Hashable, MergePlan] = field(default_factory=dict)
    _first: Tensor = field(init=False)

    def __post_init__(self) -> None:
        # An image with NaN in it equals nothing, and goes by its own tokens all the same.
        self._first = _same(self.latent, self.latent).fill_diagonal_(True).int().argmax(1)

    def tokens(self, x: Tensor) -> Tensor:
        """For each image the tokens of the first that shows the same. (B, N, C) -> (B, N, C)"""
        return x.index_select(0, self._first)

    def settled(self, key: Hashable, plan: MergePlan) -> MergePlan:
        """The plan for these images, each as an earlier call had it if one showed the same; it is kept for later
        ones. key: which blocks share it."""
        before = [(piece.latent, piece.plans[key]) for piece in self.earlier if key in piece.plans]
        if before:
            same = _same(self.latent, torch.cat([latent for latent, _ in before]))
            known, where = same.any(1), same.int().argmax(1)

            def chosen(name: str) -> Tensor:
                old = torch.cat([getattr(plan, name) for _, plan in before]).index_select(0, where)
                new = getattr(plan, name)
                return torch.where(known.view(-1, *[1] * (new.ndim - 1)), old, new)

            names = "picks", "merge_weights", "unmerge_weights"
            plan = replace(plan, **{name: chosen(name) for name in names})  # type: ignore[arg-type]
        self.plans[key] = plan
        return plan


def _same(a: Tensor, b: Tensor) -> Tensor:
    """Which images are equal in every number. (B, ...), (B', ...) -> (B, B') bool"""
    return (a.flatten(1)[:, None] == b.flatten(1)[None]).all(-1)
