"""What a block's self-attention looks at, changed on the way to whatever computes it.

It goes by ComfyUI's `optimized_attention_override`, after norm and rotation, so that each key carries its own position,
and whatever computes attention goes on doing so, on other keys and without a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from .signature import CallArguments

_OVERRIDE = "optimized_attention_override"

# From keys or values of (B, T, C), (B, T, heads, C), or (B, heads, T, C) with axis 2, to those looked at in their
# place: told which they are, how many tokens come before the image, and the axis.
Change = Callable[[Tensor, str, int, int], Tensor]
# From a mask of what was looked at to one of what is looked at in its place, None where nobody can tell.
Masked = Callable[[Tensor], "Tensor | None"]


class KVOverride:
    """In the place of `optimized_attention` for one call of a block.

    spans: see `BlockSignature.spans`. then: the override that another node has put there. served: how many of its
    self-attentions came by.
    """

    def __init__(
        self, change: Change, spans: Sequence[tuple[int, int]], then: Callable[..., Any] | None, masked: Masked
    ) -> None:
        self.change, self.spans, self.then, self.masked = change, spans, then, masked
        self.called = 0

    def __call__(self, function: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
        axis = 2 if kwargs.get("skip_reshape") else 1
        mask = args[1] if len(args) > 1 else kwargs.get("mask")  # of every key, and here there are others
        seen = None if mask is None else self.masked(mask)
        if (mask is None or seen is not None) and self.called < len(self.spans):
            before, tokens = self.spans[self.called]
            if q.shape[axis] == k.shape[axis] == v.shape[axis] == tokens:
                which = self.called
                self.called += 1
                keys = self.change(k, f"key {which}", before, axis)
                values = self.change(v, f"value {which}", before, axis)
                if keys.shape[axis] == values.shape[axis]:  # else something is kept of the one alone
                    k, v = keys, values
                if len(args) > 1:
                    args = (args[0], seen, *args[2:])
                elif seen is not None:
                    kwargs = {**kwargs, "mask": seen}
        compute = function if self.then is None else partial(self.then, function)
        return compute(q, k, v, *args, **kwargs)


def override_attention(
    call_args: CallArguments, change: Change, spans: Sequence[tuple[int, int]], masked: Masked
) -> CallArguments:
    """A block's arguments with which its self-attention looks at what `change` makes of its keys and values; unchanged
    where ComfyUI hands the block no options."""
    options = call_args.get("transformer_options")
    if options is None:
        return call_args
    override = KVOverride(change, spans, options.get(_OVERRIDE), masked)
    return {**call_args, "transformer_options": {**options, _OVERRIDE: override}}


def to_btc(t: Tensor, axis: int) -> Tensor:
    """(B, T, C), (B, T, heads, C) or, with axis 2, (B, heads, T, C) -> (B, T, all channels)."""
    return (t.transpose(1, 2) if axis == 2 else t).flatten(2)


def from_btc(t: Tensor, other: Tensor, axis: int) -> Tensor:
    """The reverse of `to_btc`, as the other was."""
    if other.ndim == 3:
        return t
    t = t.unflatten(2, (-1, other.shape[3]))
    return t.transpose(1, 2) if axis == 2 else t
