"""Attention and feed-forward of a UNet's transformer block, each between its own merge and unmerge: granularity
`module`, as in the paper."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ...toma_core import MergePlan
from .hooks import Hook, merge, outside_graph, unmerge
from .layout import on_no_grid

# (B, N, C) tokens, the block's transformer_options and the part's name -> the plan, or None to leave the part whole.
Plan = Callable[[Tensor, dict[str, Any], str], MergePlan | None]


class WholeBlock(Hook):
    """A transformer block whose modules are merged one by one. It only keeps its transformer_options for them, because
    a feed-forward is not given any."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.options: dict[str, Any] = {}

    @outside_graph
    def __call__(self, x: Tensor, context: Any = None, transformer_options: dict[str, Any] = {}) -> Tensor:  # noqa: B006
        self.options = transformer_options
        return self.original(x, context=context, transformer_options=transformer_options)

    def release(self) -> None:
        self.options = {}


class MergedAttention(Hook):
    """Self- or cross-attention with merged queries; in self-attention keys and values are merged with them."""

    def __init__(self, block: WholeBlock, part: str) -> None:
        self.block, self.part = block, part

    @outside_graph
    def __call__(
        self,
        x: Tensor,
        context: Any = None,
        value: Any = None,
        mask: Any = None,
        transformer_options: dict[str, Any] = {},  # noqa: B006
        **rest: Any,
    ) -> Tensor:
        given = {"mask": mask, **rest}
        tied = any(argument is not None for argument in given.values())
        plan = None if tied else self.block.plan(x, self.block.options, self.part)
        if plan is None:
            return self.original(x, context=context, value=value, transformer_options=transformer_options, **given)
        merged, told = merge(x, plan), on_no_grid(transformer_options, plan.tokens, plan.kept)
        if context is x and (value is None or value is x):
            # Keys and values must stay as long as each other: if a patch made other values, both stay whole.
            context, value = merged, None if value is None else merged
        return unmerge(self.original(merged, context=context, value=value, transformer_options=told, **given), plan)


class MergedFeedForward(Hook):
    def __init__(self, block: WholeBlock) -> None:
        self.block = block

    @outside_graph
    def __call__(self, x: Tensor, /) -> Tensor:
        plan = self.block.plan(x, self.block.options, " feed-forward")
        return self.original(x) if plan is None else unmerge(self.original(merge(x, plan)), plan)
