"""Give a block's self-attention the keys and values of all tokens, in place of those of merged tokens.

ComfyUI calls the `optimized_attention_override` after norm and rotation, so cached keys are already rotated. Then the
function that would run without ToMA computes attention: another node's override, else the function that the checkpoint
names for this attention, else ComfyUI's default.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

from torch import Tensor

from .compat import with_argument

OVERRIDE = "optimized_attention_override"


@dataclass(eq=False)
class KVOverride:
    """Stands in for `optimized_attention` in one call of a block."""

    # `change` takes a block's keys or values, their name, the number of tokens before the image, and the axis of
    # tokens. It returns the keys or values to attend to: (B, T, C), (B, T, heads, C) or, with axis 2, (B, heads, T, C).
    change: Callable[[Tensor, str, int, int], Tensor]
    spans: Sequence[tuple[int, int, int]]  # see `BlockSignature.attention_spans`
    masked: Callable[[Tensor], Tensor | None]  # takes a mask of a block's keys, returns a mask of the changed keys
    # The block's `ComfyAttention` modules (ComfyUI 0.34 or newer): the first belongs to the self-attention, the last to
    # the attention to text. The `function` of a module is the attention function that the checkpoint names, or None.
    preferred: Sequence[Any] = ()
    # The set `RunStats.attentions`; None if calls of another node's attention are not recorded.
    noted: set[tuple[bool, bool]] | None = None
    then: Callable[..., Any] | None = None  # the override of another node, if there is one
    called: int = 0  # how many of the block's self-attentions have run

    def __call__(self, function: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
        axis = 2 if kwargs.get("skip_reshape") else 1
        mask = args[1] if len(args) > 1 else kwargs.get("mask")  # mask of the keys k
        seen = None if mask is None else self.masked(mask)
        number = None  # index among the block's self-attentions; None if this is no self-attention
        if self.called < len(self.spans):
            before, tokens, queries = self.spans[self.called]
            if k.shape[axis] == v.shape[axis] == tokens and q.shape[axis] == queries:
                number = self.called
        if number is not None and (mask is None or seen is not None):
            keys = self.change(k, f"key {number}", before, axis)
            values = self.change(v, f"value {number}", before, axis)
            self.called += 1
            if keys.shape[axis] == values.shape[axis]:  # lengths differ if only keys or only values are cached
                k, v = keys, values
            if seen is not None and k.shape[axis] > tokens:
                args, kwargs = with_argument(args, kwargs, 1, "mask", seen)
        if self.then is None:
            # If there is an override, as here, ComfyUI ignores the function that the checkpoint names. So call this
            # function here.
            named = self.preferred[0 if number == 0 else -1].function if self.preferred else None
            return (function if named is None else named)(q, k, v, *args, **kwargs)
        if self.noted is None or number is None:
            return self.then(function, q, k, v, *args, **kwargs)
        left = list[int]()

        @wraps(function)
        def default(*args: Any, **kwargs: Any) -> Any:
            left.append(1)
            return function(*args, **kwargs)

        out = self.then(default, q, k, v, *args, **kwargs)
        self.noted.add((q.shape[axis] < k.shape[axis], bool(left)))
        return out
