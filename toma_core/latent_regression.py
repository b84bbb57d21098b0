"""Propagate cached tensors by the change of the latent, which is known at every token.

The paper has no such regression. A merged step knows how keys, values and updates have changed at its D destinations.
Part of this change comes from the destinations' own noise, which no other token shares. If the sampler draws new noise
in each step, this is the larger part of the change. But the change depends on the latent in the same way for all
tokens. So the change is regressed on the latents of destinations, with a small ridge and a constant. Each token gets
the part of the change that its own latent explains. Only the residual of the regression is shared among tokens.

    A = (f'f + 0.1 F / D * mean diag(f'f))^-1 f' c  =  fit c
    cached + G A + U (c - f A)                  =  cached + U c + (G - U f) A  =  cached + U c + spread A

    f  (D, F)  features of destinations
    G  (N, F)  features of all tokens
    c  (D, C)  the change of a cached tensor at destinations
    A  (F, C)  the coefficients of the regression ("answer"): the change per unit of each feature
    U  (N, D)  unmerge weights: a destination keeps its own value, any other token gets `REST_WEIGHT` times a weighted
               mean of the destinations

`fit` and `spread` are computed once per plan and call, and shared by all blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from .kernels.layout import room
from .merge import MergePlan, add_unmerged, gather_destinations, kernels_for, unmerge
from .prediction import picture_tokens

# Share of the regression's residual at destinations that other tokens get. A larger share would add the destinations'
# noise, a smaller share would lose change that tokens have in common (benchmarks/results/fidelity/trials.md).
REST_WEIGHT = 0.7
_RIDGE = 0.1  # factor on the textbook's ridge F / D, which would add bias: latents explain most of the change
_LEAST_DESTINATIONS = 2  # per feature; with fewer, the regression would overfit to the destinations


@dataclass(frozen=True, eq=False)
class Rotation:
    """The rotary matrices of keys, contiguous for each token, for the P pairs of adjacent channels of a head. The
    change of keys is regressed and shared before rotation, because rotation depends on a token's position."""

    tokens: Tensor  # (B or 1, N, 1, P, 2, 2)
    destinations: Tensor  # (B or 1, D, 1, P, 2, 2)
    dtype: torch.dtype  # of the keys

    @classmethod
    def of(cls, tokens: Tensor, destinations: Tensor, like: Tensor) -> Rotation | None:
        """Return the rotation of keys like `like`, (B, T, C). tokens, destinations: (B or 1, T, ..., P, 2, 2). Return
        None if an axis in place of `...` is longer than 1, or if C is no multiple of a head's channels, 2 P."""
        if any(t.shape[2:-3].numel() != 1 for t in (tokens, destinations)) or like.shape[2] % (2 * tokens.shape[-3]):
            return None
        tokens, destinations = (t.reshape(*t.shape[:2], 1, *t.shape[-3:]) for t in (tokens, destinations))
        tokens, destinations = (t if t[0, 0].is_contiguous() else t.contiguous() for t in (tokens, destinations))
        return cls(tokens, destinations, like.dtype)

    @cached_property
    def _in_dtype(self) -> tuple[Tensor, Tensor]:
        return self.tokens.to(self.dtype), self.destinations.to(self.dtype)

    def undo(self, x: Tensor) -> Tensor:
        """Undo the rotation of x, (B, D, C), at destinations."""
        inverse = self._in_dtype[1].mT
        x = x.unflatten(2, (-1, inverse.shape[3], 1, 2))
        return (inverse[..., 0] * x[..., 0]).addcmul_(inverse[..., 1], x[..., 1]).flatten(2)

    def add(self, cached: Tensor, x: Tensor) -> Tensor:
        """Return cached + rotated x, both (B, N, C)."""
        R = self._in_dtype[0]
        pairs = -1, R.shape[3], 2
        x = x.unflatten(2, pairs).unsqueeze(4)
        turned = torch.addcmul(cached.unflatten(2, pairs), R[..., 0], x[..., 0])
        return turned.addcmul_(R[..., 1], x[..., 1]).flatten(2)


@dataclass(frozen=True, eq=False)
class Regression:
    """The matrices by which one call propagates cached tensors, see the formula at the top of the module."""

    plan: MergePlan  # its unmerge weights are U
    fit: Tensor  # (B, F, D), in the dtype of the plan's weights
    spread: Tensor  # (B, N, F), in the dtype of `fit`

    def propagate(self, cached: Tensor, fresh: Tensor, rotation: Rotation | None = None) -> Tensor:
        """Return the cached values of all tokens, (B, N, C), propagated by the change at destinations. fresh: (B, D,
        C), the new values at destinations. rotation: the rotation of the keys, if keys are propagated."""
        plan = self.plan
        if kernels := kernels_for(plan, cached, fresh):
            R, R_destinations = (None, None) if rotation is None else (rotation.tokens, rotation.destinations)
            change = kernels.change(fresh, cached, plan.destinations, R_destinations)
            answer = torch.bmm(self.fit, change)
            layout = plan.unmerge_weights, plan.windows, plan.budget
            return kernels.unmerge(change, *layout, None, cached, self.spread, answer, R)
        change = fresh - gather_destinations(cached, plan)  # c
        if rotation is not None:
            change = rotation.undo(change)
        answer = self.fit.to(change.dtype) @ change  # A
        # cached + U c, or U c if the sum is rotated before `cached` is added
        shared = add_unmerged(cached, change, plan) if rotation is None else unmerge(change, plan)
        propagated = shared.baddbmm_(self.spread.to(change.dtype), answer)
        return propagated if rotation is None else rotation.add(cached, propagated)


@dataclass(eq=False)
class LatentChange:
    """The change of the latent since the cached tensors were written."""

    latent: Tensor  # (B, C, ..., H, W), latent of the present call
    before: Tensor  # latent of the call that wrote the cached tensors
    _regressions: dict[int, tuple[MergePlan, Regression | None]] = field(default_factory=dict)  # by the plan's id

    def regression(self, plan: MergePlan) -> Regression | None:
        """Return the regression for a plan; None if the plan has too few destinations or other tokens than the
        latent."""
        if id(plan) not in self._regressions:
            self._regressions[id(plan)] = plan, self._regression(plan)
        return self._regressions[id(plan)][1]

    def _regression(self, plan: MergePlan) -> Regression | None:
        if self.latent.device != plan.merge_weights.device:
            return None
        groups = [_tokens(part, plan) for part in (self.latent - self.before, self.latent)]
        numbers = sum(each.shape[2] for each in groups)
        if groups[0].shape[1] != plan.tokens or plan.num_destinations < _LEAST_DESTINATIONS * numbers:
            return None
        features = torch.cat([*groups, torch.ones_like(groups[0][..., :1])], 2)
        return regress(features, plan)


def _tokens(latent: Tensor, plan: MergePlan) -> Tensor:
    """Return a latent as features of tokens, scaled to mean square 1 in each image, (B, N, F) fp32."""
    tokens = picture_tokens(latent, plan.windows.grid, torch.empty((), device=latent.device))
    return tokens * tokens.square().mean((1, 2), keepdim=True).clamp_min(1e-24).rsqrt()


def regress(features: Tensor, plan: MergePlan) -> Regression:
    """Return the regression on features of all tokens, (B, N, F) fp32; the last feature is 1 and has no ridge."""
    plan = with_rest_weight(plan)
    f = gather_destinations(features, plan)
    gram = f.mT @ f
    squares = gram.diagonal(dim1=1, dim2=2)  # writing to this view changes `gram`
    ridge = squares[:, :-1].mean(1, keepdim=True) * (_RIDGE * (f.shape[2] - 1) / f.shape[1])
    squares[:, :-1] += ridge.clamp_min(torch.finfo(f.dtype).tiny)
    # Unlike `cholesky` and `solve`, `cholesky_ex` does not wait for the device to report success.
    factor, _ = torch.linalg.cholesky_ex(gram)
    fit = torch.cholesky_solve(f.mT.contiguous(), factor)
    plain = replace(plan, unmerge_weights=plan.unmerge_weights.float(), kernels=None)
    spread = add_unmerged(features, -f, plain)  # G - U f
    weights = plan.merge_weights
    spread = spread.to(weights.dtype) if plan.kernels is None else room(weights, *spread.shape).copy_(spread)
    return Regression(plan, fit.to(weights.dtype), spread)


def with_rest_weight(plan: MergePlan) -> MergePlan:
    """Return the plan with changed unmerge weights: destinations keep their own value, and other tokens get
    `REST_WEIGHT` times their weighted mean of destinations."""
    weights, slots = plan.unmerge_weights, torch.arange(plan.windows.slots, device=plan.dest_slots.device)
    own = plan.dest_slots[:, :, None] == slots[:, None]  # (B, W, S, K)
    if (valid := plan.budget.valid) is not None:
        own = own & valid[..., None, :]
    changed = torch.where(own.any(-1, keepdim=True), own.to(weights.dtype), REST_WEIGHT * weights)
    return replace(plan, unmerge_weights=room(weights, *weights.shape).copy_(changed))
