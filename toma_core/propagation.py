"""Store a block's updates, keys and values in a refresh; propagate the stored ones in a merged step.

The paper has no caches. A block's update changes slowly from step to step, above all in its fine structure, which
merging loses. With a KV cache, a merged step propagates the cached tensors and stores the results. Without a KV cache,
it only reads cached updates, see `unmerge_residual_cached`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .cache import Cache, Keys
from .coverage import Coverage
from .latent_regression import LatentChange, Rotation
from .merge import MergePlan, add_unmerged, gather_destinations, unmerge_residual

# Weight of the change at destinations if the cached update still fits fully (p = 1 in `unmerge_residual_cached`). It is
# below 1 because part of the change comes from the merge, not from the step ("The residual cache" in
# benchmarks/results/fidelity/trials.md). If the cached update no longer fits at all (p = 0), the weight is 1, as
# without a cache.
DELTA_WEIGHT = 0.5


@dataclass(frozen=True, eq=False)
class Refresh:
    """A chain's update, or a block's keys or values, in an evaluation that caches it."""

    coverage: Coverage
    keys: Keys  # one for each equal chunk of the batch
    quantized: bool = False  # cached in four bits per element
    kv: bool = False  # keys or values

    def store(self, update: Tensor) -> None:
        """Cache an update, (B, N, C)."""
        self.coverage.store(self.keys, update, self.quantized, self.kv)


@dataclass(frozen=True, eq=False)
class Cached:
    """A chain's update, or a block's keys or values, in a merged evaluation that begins with the cached tensor."""

    cache: Cache
    keys: Keys  # one for each equal chunk of the batch
    update: Tensor  # (B, N, C), as cached
    quantized: bool = False  # cached in four bits per element
    kv: bool = False  # keys or values
    change: LatentChange | None = None  # change of the latent; None if unknown, and for tokens of reference images

    def propagate(self, fresh: Tensor, plan: MergePlan, rotation: Rotation | None = None) -> Tensor:
        """Propagate the update by the change at destinations (see `latent_regression`); cache and return the result,
        (B, N, C). Where the change of the latent is unknown, the result is update + unmerge(fresh - update at
        destinations).

        fresh: (B, D, C), the new values at destinations. rotation: the rotary matrices, if the update holds keys.
        Raises `torch.OutOfMemoryError`.
        """
        regression = None if self.change is None else self.change.regression(plan)
        if regression is not None:
            propagated = regression.propagate(self.update, fresh, rotation)
        else:
            propagated = unmerge_residual(fresh, gather_destinations(self.update, plan), self.update, plan)
        if propagated.dtype is torch.float16:
            # Clamp, because the next step would subtract an infinity from itself and get NaN.
            propagated = propagated.clamp_(-65504, 65504)
        self.cache.put(self.keys, propagated, self.quantized, self.kv)
        return propagated


def unmerge_residual_cached(out: Tensor, reduced: Tensor, x: Tensor, cached: Tensor, plan: MergePlan) -> Tensor:
    """Return x + p * cached + unmerge(w * (out - reduced - p * cached at destinations)), (B, N, C).

    p: the projection coefficient; w = 1 - (1 - DELTA_WEIGHT) * p. out, reduced: (B, D, C); x, cached: (B, N, C).
    """
    fresh, old = out - reduced, gather_destinations(cached, plan)
    p = _projection_coefficient(fresh, old).to(x.dtype)
    change = torch.addcmul(fresh, p, old, value=-1)
    weighted = torch.addcmul(change, p, change, value=DELTA_WEIGHT - 1)  # w * change
    return add_unmerged(torch.addcmul(x, p, cached), weighted, plan)


def _projection_coefficient(fresh: Tensor, old: Tensor) -> Tensor:
    """Return the least-squares share of an image's old update in the fresh one, within [0, 1]: (B, 1, 1) fp32.

    The share is close to 1 between neighbouring steps of a run of 20 steps, and close to 0 in a run of 4 steps, whose
    noise levels lie far apart.
    """
    old = old.float()
    common, norm = ((t * old).sum((1, 2), keepdim=True) for t in (fresh, old))
    return (common / norm.clamp_min(torch.finfo(norm.dtype).tiny)).clamp(0, 1)
