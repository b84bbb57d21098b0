"""Keys and values on fewer tokens: every query, norm and feed-forward runs on all of them, and nothing is restored.

A block's self-attention looks at K' = M K and V' = M V in place of K and V, means of windows as everywhere else, taken
after norm and rotation: then each key of a mean carries its own position. It goes by ComfyUI's
`optimized_attention_override`, so that whatever computes attention goes on doing so, on fewer keys and without a mask.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...toma_core import MergePlan
from .chain import Link
from .hooks import Hook, merge, outside_graph

_OVERRIDE = "optimized_attention_override"


class KeysLink(Hook):
    """Stands in for a block whose self-attention is to look at fewer keys and values. link: the block's own hook, which
    knows where its tokens are and why it may have to stay whole."""

    def __init__(self, link: Link) -> None:
        self.link, self.port = link, link.port

    def release(self) -> None:
        self.link.release()

    @outside_graph
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        place, port = self.link.place, self.port
        given = port.given(args, kwargs)
        port.note(given)
        x, reason, before = given[port.tokens], self.link.reason(given), port.before(given, place.image) or 0
        plan = place.plan_for(x[:, before : before + place.image], reason)
        if plan is None or place.evaluation is None:
            return self.original(*args, **kwargs)
        place.evaluation.run.stats.merged(self.link.name)
        options = given.get("transformer_options") or {}
        fewer = FewerKeys(plan, before, x.shape[1], options.get(_OVERRIDE))
        told = list({**given, "transformer_options": {**options, _OVERRIDE: fewer}}.items())
        return self.original(*[value for _, value in told[: len(args)]], **dict(told[len(args) :]))


class FewerKeys:
    """In the place of `optimized_attention` for one call of a block: the first attention in it is that of its tokens to
    each other. before: tokens before the image; tokens: all of them. then: what another node has put there."""

    def __init__(self, plan: MergePlan, before: int, tokens: int, then: Callable[..., Any] | None) -> None:
        self.plan, self.before, self.tokens, self.then = plan, before, tokens, then
        self.asked = False

    def __call__(self, function: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
        axis = 2 if kwargs.get("skip_reshape") else 1
        first, self.asked = not self.asked, True
        if first and q.shape[axis] == k.shape[axis] == self.tokens:
            k, v = (self._fewer(t, axis) for t in (k, v))
        compute = function if self.then is None else partial(self.then, function)
        return compute(q, k, v, *args, **kwargs)

    def _fewer(self, t: Tensor, axis: int) -> Tensor:
        """(B, N, C), or (B, heads, N, C) with `axis` 2 -> the same with D tokens of the image."""
        heads = t.shape[1]
        if axis == 2:
            t = t.transpose(1, 2).flatten(2)
        after = self.before + self.plan.tokens
        few = merge(t[:, self.before : after], self.plan)
        if t.shape[1] > self.plan.tokens:
            few = torch.cat([t[:, : self.before], few, t[:, after:]], 1)
        return few.unflatten(2, (heads, -1)).transpose(1, 2) if axis == 2 else few
