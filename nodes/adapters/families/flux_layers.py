"""Layers inside a double block of Flux on merged tokens: what granularity `module` puts around each of them.

A layer sees [image | references]; only the image is merged. Whoever installs a hook of these gives it a plan first.
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


class ByModule(BlockHook):
    """A double block with attention and MLP each between their own merge and unmerge, the residual stream whole, as in
    the paper."""

    in_graphs = False
    merges_references = False

    def __init__(self, whole: BlockHook) -> None:
        """whole: the hook for the same block on merged tokens from its beginning to its end."""
        super().__init__(whole.module, whole.name, whole.signature, whole.work, whole.scope, whole.positions)
        self.parts = (MergeIn(), UnmergeOut(), MergedLayer())

    def layers(self) -> tuple[tuple[nn.Module, Layer], ...]:
        """Query, key and value; what follows the attention; the MLP. Looked up anew, as others may replace them."""
        module: Any = self.module
        attention = module.img_attn
        return tuple(zip((attention.qkv, attention.proj, module.img_mlp), self.parts, strict=True))

    @outside_graph
    def outside(self, *args: Any, **kwargs: Any) -> Any:
        signature, site = self.signature, self.site
        call_args = signature.call_args(args, kwargs)
        signature.observe(call_args)
        reason, x = self.reason(call_args), call_args[signature.tokens_arg]
        plan = site.plan_for(x[:, : site.image], reason)
        if plan is None or site.active is None:
            return self.original(*args, **kwargs)
        if not site.active.evaluation.refreshes:
            site.active.evaluation.run.stats.merged(self.name)
        lengths = ((plan.tokens, plan.kept),)
        site.reduction = Reduction(site.active, (plan,), (None,), lengths)
        rope = self.positions.of(call_args.get(signature.rope_arg), site, signature.attention_offset(call_args))
        # The attention alone sees merged tokens: what the block does to all of them stays where it is told.
        call_args = {
            **call_args,
            signature.rope_arg: rope,
            **BlockSignature.merged_args(signature, call_args, TokenReduction(0, lengths)),
        }
        layers = self.layers()
        for _, hook in layers:
            hook.plan = plan
        with installed(layers):
            return self._called(len(args), call_args)
