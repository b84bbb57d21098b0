"""Attention and feed-forward of a UNet's transformer block, each between its own merge and unmerge: granularity
`module`, as in the paper."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from ....toma_core import Evaluation, MergePlan
from ....toma_core.config import Granularity
from ....toma_core.windows import Grid
from ..active_chain import ActiveChain
from ..chain import BlockHook
from ..model_hooks import Hook, HookPair, eager, merge, outside_graph, unmerge
from ..signature import Options


class ByModule(Hook):
    """Hook of a transformer block whose modules are merged one by one."""

    def __init__(self, block_hook: BlockHook) -> None:
        self.block_hook = block_hook  # the hook that merges the same block in one piece
        self.options: dict[
            str, Any
        ] = {}  # the block's transformer_options, stored for the feed-forward, which gets none
        self.attn1 = MergedAttention(self, "self-attention")
        self.attn2 = MergedAttention(self, "cross-attention")
        self.ff = MergedFeedForward(self)

    @outside_graph
    def __call__(self, x: Tensor, context: Any = None, transformer_options: dict[str, Any] = {}) -> Tensor:  # noqa: B006
        self.options = transformer_options
        return self.original(x, context=context, transformer_options=transformer_options)

    def release(self) -> None:
        self.options = {}
        self.block_hook.release()

    def layers(self) -> Iterator[HookPair]:
        module: Any = self.block_hook.module
        pairs = (module.attn1, self.attn1), (module.attn2, self.attn2), (module.ff, self.ff)
        yield from (pair for pair in pairs if pair[0] is not None)

    def hooks(self, grid: Grid, evaluation: Evaluation) -> Iterator[HookPair]:
        """Yield the hooks to install for an evaluation in which the block's tokens form this grid."""
        hook = self.block_hook
        work = hook.work, Granularity.MODULE
        hook.own_site.begin(ActiveChain(hook.signature, (grid,), hook.scope, [hook.name], work, evaluation))
        yield hook.module, self
        yield from self.layers()

    @eager
    def plan(self, x: Tensor, part: str) -> MergePlan | None:
        """Return the plan for the tokens x of a module, None if the module is not merged. Note the result."""
        site = self.block_hook.own_site
        reason = site.reason({"x": x, "transformer_options": self.options})
        chain = site.chain
        if chain is None or not chain.merges(x, reason, part):
            return None
        chain.evaluation.run.stats.merged(self.block_hook.name, chain.evaluation.step_plan.step)
        return chain.evaluation.plan(x, chain.grids[0], chain.scope)


class MergedAttention(Hook):
    """Self- or cross-attention with merged queries; in self-attention keys and values are merged, too."""

    def __init__(self, block: ByModule, part: str) -> None:
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
        call_args = {"mask": mask, **rest}
        tied = any(argument is not None for argument in call_args.values())
        plan = None if tied else self.block.plan(x, self.part)
        if plan is None:
            return self.original(x, context=context, value=value, transformer_options=transformer_options, **call_args)
        merged = merge(x, plan)
        options = without_grid(transformer_options, plan.tokens, plan.num_destinations)
        if context is x and (value is None or value is x):
            # Merge keys and values if both come from x. Otherwise merge neither, because their lengths must be equal.
            context, value = merged, None if value is None else merged
        out = self.original(merged, context=context, value=value, transformer_options=options, **call_args)
        return unmerge(out, plan)


class MergedFeedForward(Hook):
    def __init__(self, block: ByModule) -> None:
        self.block = block

    @outside_graph
    def __call__(self, x: Tensor, /) -> Tensor:
        plan = self.block.plan(x, "feed-forward")
        return self.original(x) if plan is None else unmerge(self.original(merge(x, plan)), plan)


def without_grid(options: Options, tokens: int, destinations: int) -> Options:
    """Return options for merged tokens, which form no grid: `activations_shape` becomes (B, C, 1, D)."""
    shape = options.get("activations_shape")
    if not shape or destinations == tokens:
        return options
    return {**options, "activations_shape": [*shape[:-2], 1, destinations]}
