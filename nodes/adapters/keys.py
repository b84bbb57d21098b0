"""Keys and values on fewer tokens: every query, norm and feed-forward runs on all of them, and nothing is restored.

A block's self-attention looks at K' = M K and V' = M V in place of K and V, means of windows as everywhere else, taken
after norm and rotation: then each key of a mean carries its own position. It goes by ComfyUI's
`optimized_attention_override`, so that whatever computes attention goes on doing so, on fewer keys and without a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...toma_core import MergePlan
from .chain import Link
from .hooks import Hook, HookPair, eager, merge, outside_graph

_OVERRIDE = "optimized_attention_override"
UNSERVED = "another node's attention takes no fewer keys"


class KeysLink(Hook):
    """Stands in for a block whose self-attention is to look at fewer keys and values. link: the block's own hook, which
    knows where its tokens are and why it may have to stay whole. attention: what the block calls its self-attention."""

    def __init__(self, link: Link, attention: str) -> None:
        self.link, self.port, self.attention, self.inner = link, link.port, attention, KeysAttention()

    def hooks(self) -> Iterator[HookPair]:
        """The hooks to install for an evaluation."""
        yield self.link.module, self
        yield getattr(self.link.module, self.attention), self.inner

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
        self.inner.fewer = fewer = FewerKeys(plan, before, x.shape[1])
        try:
            out = self.original(*args, **kwargs)
        finally:
            self.inner.fewer = None
        stats, name = place.evaluation.run.stats, self.link.name
        if fewer.served:
            stats.merged(name)
        else:
            stats.whole(name, UNSERVED)
        return out


class KeysAttention(Hook):
    """Stands in for the self-attention of a block. Outside of graphs: ComfyUI's torch.compile does not look whether an
    override is there, and would run what it traced with one where there is none."""

    fewer: FewerKeys | None = None

    @eager
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        options = kwargs.get("transformer_options")
        if self.fewer is None or options is None:
            return self.original(*args, **kwargs)
        override = partial(self.fewer, options.get(_OVERRIDE))
        return self.original(*args, **{**kwargs, "transformer_options": {**options, _OVERRIDE: override}})


class FewerKeys:
    """In the place of `optimized_attention` for one call of a block's self-attention. before: tokens before the image;
    tokens: all of them. served: whether it was asked for that, which another pack's attention may not do."""

    def __init__(self, plan: MergePlan, before: int, tokens: int) -> None:
        self.plan, self.before, self.tokens = plan, before, tokens
        self.served = False

    def __call__(
        self,
        then: Callable[..., Any] | None,
        function: Callable[..., Any],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """then: the override that another node has put there."""
        axis = 2 if kwargs.get("skip_reshape") else 1
        mask = args[1] if len(args) > 1 else kwargs.get("mask")  # of every key, and here there are fewer
        if mask is None and q.shape[axis] == k.shape[axis] == self.tokens:
            k, v, self.served = self._fewer(k, axis), self._fewer(v, axis), True
        compute = function if then is None else partial(then, function)
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
