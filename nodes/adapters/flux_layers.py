"""Layers inside a double block of Flux on merged tokens: what granularity `module` puts around each of them.

A layer sees [image | references]; only the image is merged. Whoever installs a hook of these gives it a plan first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...toma_core import MergePlan
from .hooks import Hook, merge, outside_graph, unmerge


class Layer(Hook):
    """A layer of which the image tokens are merged by `plan`, as long as it is installed."""

    plan: MergePlan

    def release(self) -> None:
        del self.plan


class MergeIn(Layer):
    """qkv of merged tokens."""

    @outside_graph
    def __call__(self, x: Tensor, /) -> Tensor:
        return self.original(_merged_image(x, self.plan))


class UnmergeOut(Layer):
    """The output projection of merged tokens, spread over all."""

    @outside_graph
    def __call__(self, x: Tensor, /) -> Tensor:
        return _unmerged_image(self.original(x), self.plan)


class MergedLayer(Layer):
    """The MLP on merged tokens."""

    @outside_graph
    def __call__(self, x: Tensor, /) -> Tensor:
        return _unmerged_image(self.original(_merged_image(x, self.plan)), self.plan)


def _merged_image(x: Tensor, plan: MergePlan) -> Tensor:
    """(B, N + R, C) -> (B, D + R, C): merge the image, keep the references."""
    return torch.cat([merge(x[:, : plan.tokens], plan), x[:, plan.tokens :]], 1)


def _unmerged_image(y: Tensor, plan: MergePlan) -> Tensor:
    """(B, D + R, C) -> (B, N + R, C)."""
    return torch.cat([unmerge(y[:, : plan.kept], plan), y[:, plan.kept :]], 1)
