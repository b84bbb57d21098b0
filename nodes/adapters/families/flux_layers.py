"""Layers of a double block of Flux on merged tokens: what granularity `module` installs around each of them.

A layer gets [image | references]; only the image is merged. The plan is set before a hook is installed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ....toma_core import MergePlan
from ..active_chain import Reduction
from ..chain import BlockHook
from ..model_hooks import Hook, installed, merge, outside_graph, unmerge
from ..signature import BlockSignature, TokenReduction


class Layer(Hook):
    """Merges the image tokens of a layer by `plan`, as long as it is installed."""

    plan: MergePlan

    def release(self) -> None:
        del self.plan


class MergeIn(Layer):
    """Computes qkv of merged tokens."""

    @outside_graph
    def __call__(self, x: Tensor, /) -> Tensor:
        return self.original(_merged_image(x, self.plan))


class UnmergeOut(Layer):
    """Computes the output projection of merged tokens, and unmerges."""

    @outside_graph
    def __call__(self, x: Tensor, /) -> Tensor:
        return _unmerged_image(self.original(x), self.plan)


class MergedLayer(Layer):
    """Computes the MLP on merged tokens, and unmerges."""

    @outside_graph
    def __call__(self, x: Tensor, /) -> Tensor:
        return _unmerged_image(self.original(_merged_image(x, self.plan)), self.plan)


def _merged_image(x: Tensor, plan: MergePlan) -> Tensor:
    """Merge the image of (B, N + R, C) to (B, D + R, C); the references stay as they are."""
    return torch.cat([merge(x[:, : plan.tokens], plan), x[:, plan.tokens :]], 1)


def _unmerged_image(y: Tensor, plan: MergePlan) -> Tensor:
    """Unmerge the image of (B, D + R, C) to (B, N + R, C)."""
    return torch.cat([unmerge(y[:, : plan.num_destinations], plan), y[:, plan.num_destinations :]], 1)


class ByModule(BlockHook):
    """A double block with attention and MLP each between their own merge and unmerge, as in the paper."""

    in_graphs = False
    merges_references = False

    def __init__(self, block: BlockHook) -> None:
        """block: the hook of the same block that merges it as one."""
        super().__init__(block.module, block.name, block.signature, block.work, block.scope, block.positions)
        self.parts = (MergeIn(), UnmergeOut(), MergedLayer())

    def layers(self) -> tuple[tuple[nn.Module, Layer], ...]:
        """Return qkv, the projection after attention, and the MLP, with their hooks. Looked up each time, as other
        nodes may replace them."""
        module: Any = self.module
        attention = module.img_attn
        return tuple(zip((attention.qkv, attention.proj, module.img_mlp), self.parts, strict=True))

    @outside_graph
    def outside(self, *args: Any, **kwargs: Any) -> Any:
        signature, site = self.signature, self.site
        call_args = signature.call_args(args, kwargs)
        signature.observe(call_args)
        reason, x = self.reason(call_args), signature.tokens(call_args)
        plan = site.plan_for(x[:, : site.image], reason)
        if plan is None or site.active is None:
            return self.original(*args, **kwargs)
        if not site.active.evaluation.refreshes:
            site.active.evaluation.run.stats.merged(self.name)
        lengths = ((plan.tokens, plan.num_destinations),)
        site.reduction = Reduction(site.active, (plan,), (None,), lengths)
        rows = self.positions.of(signature.rows(call_args), site, signature.attention_offset(call_args))
        # Only the attention sees merged tokens: arguments for the rest of the block are unchanged.
        call_args = {
            **call_args,
            **rows,
            **BlockSignature.merged_args(signature, call_args, TokenReduction(0, lengths)),
        }
        layers = self.layers()
        for _, hook in layers:
            hook.plan = plan
        with installed(layers):
            return self._called(len(args), call_args)
