"""SDXL, SD1.5 and every other model that ComfyUI runs on `UNetModel` with `SpatialTransformer`s.

With granularity `module`, as in the paper, each attention and the feed-forward of a transformer block have their own
merge and unmerge.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from math import prod
from typing import Any

from comfy.ldm.modules.attention import SpatialTransformer
from comfy.ldm.modules.diffusionmodules.openaimodel import Downsample, UNetModel, Upsample
from torch import Tensor, nn

from ....toma_core import Evaluation, MergePlan, ModelKind, ToMAConfig
from ....toma_core.config import Granularity
from ....toma_core.windows import Grid
from ..active_chain import ActiveChain
from ..chain import BlockHook
from ..family import Block, BlockGroup, BlockSignature, Message, ModelHooks, Reason, patched, skip_reason, token_grid
from ..model_hooks import Hook, HookPair, eager, merge, outside_graph, unmerge
from ..origin import is_original
from ..signature import CallArguments, Options, TokenReduction

NAME = "UNet (SDXL, SD1.5, SD2)"
MODEL = UNetModel
COST = Block(18, 20, (1, 2, 6))  # 4 in self-attention, 2 in cross-attention, 12 in the gated feed-forward

# Patches of other nodes that read tokens inside a transformer block.
_TOKEN_PATCHES = ("attn1_patch", "attn1_output_patch", "middle_patch", "attn2_patch", "attn2_output_patch")


def fits(model: nn.Module) -> bool:
    """Whether the model is a UNet for images. Video UNets are not supported, because their stacks mix frames."""
    return {type(m) for m in model.modules() if isinstance(m, SpatialTransformer)} == {SpatialTransformer}


class Signature(BlockSignature):
    """Blocks on the image's tokens, whose grid ComfyUI passes in its options."""

    positional_args = ("x", "context", "transformer_options")
    passthrough_args = ("context",)

    def grid(self, call_args: CallArguments, grid: Grid) -> Grid | None:
        height, width = (call_args.get("transformer_options") or {}).get("activations_shape", (0, 0))[-2:]
        return (height, width) if height else None

    def obstacle(self, call_args: CallArguments, before: int, image: int, references: int = 0) -> Message | None:
        fits = call_args["x"].shape[1] == image
        return super().obstacle(call_args, before, image) if fits else Reason.TOKENS_CHANGED()

    def merged_options(self, options: Options, reduction: TokenReduction) -> Options:
        return without_grid(options, *reduction.lengths[0])


class ByModule(Hook):
    """Hook of a block whose attentions and feed-forward are merged separately."""

    def __init__(self, block_hook: BlockHook) -> None:
        self.block_hook = block_hook  # the hook that merges the same block in one piece
        self.options: Options = {}  # the block's `transformer_options`, for the feed-forward, which gets none
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

    @eager
    def plan(self, x: Tensor, part: str) -> MergePlan | None:
        """Return the plan for the tokens x of a module, None if the module is not merged. Note the outcome for the
        report."""
        site = self.block_hook.own_site
        reason = site.reason({"x": x, "transformer_options": self.options})
        chain = site.chain
        if chain is None or not chain.merges(x, reason, part):
            return None
        chain.evaluation.run.stats.merged(self.block_hook.name, chain.evaluation.step_plan.step)
        return chain.evaluation.plan(x, chain.grids[0], chain.scope)


class MergedFeedForward(Hook):
    def __init__(self, block: ByModule) -> None:
        self.block = block

    @outside_graph
    def __call__(self, x: Tensor, /) -> Tensor:
        plan = self.block.plan(x, "feed-forward")
        return self.original(x) if plan is None else unmerge(self.original(merge(x, plan)), plan)


class MergedAttention(Hook):
    """Hook of a self- or cross-attention: merges queries, in self-attention also keys and values."""

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


class Hooks(ModelHooks):
    inside = ()
    scope = "unet"  # blocks of one resolution share plans
    kind = ModelKind.UNET  # no KV cache, because convolutions see all tokens

    def __init__(self, model: UNetModel) -> None:
        super().__init__(model)
        self.by_module = {hook: ByModule(hook) for group in self.groups for hook in group.hooks}
        # For each layer: how many weights it applies to a pixel, and the side of this pixel in pixels of the latent.
        self.convolutions = [(_weights(layer), 2 ** (n - isinstance(layer, Upsample))) for _, n, layer in _parts(model)]

    def block_groups(self, model: UNetModel) -> tuple[BlockGroup, ...]:
        signature, groups = Signature(), list[BlockGroup]()
        for position, halvings, layer in _parts(model):
            if isinstance(layer, SpatialTransformer):
                width = getattr(layer.transformer_blocks[0].attn1.to_q, "in_features", 0)
                groups.append(BlockGroup(position, layer.transformer_blocks, signature, COST, 2**halvings, width))
        return tuple(groups)

    def skipped_by_settings(self, group: BlockGroup, index: int, config: ToMAConfig) -> Message | None:
        return skip_reason(config, self.groups.index(group), len(self.groups))

    def module_hooks(
        self, merged: dict[int, BlockHook], grid: Grid, evaluation: Evaluation, options: Options
    ) -> Iterator[HookPair]:
        every = evaluation.run.config.granularity is Granularity.MODULE or patched(options, _TOKEN_PATCHES)
        for index, hook in list(merged.items()):
            # If another node's patch reads a block's tokens, merge by module, so that the patch gets all tokens.
            replaced = _replaced(hook.name, options)
            if not (every or replaced):
                continue
            del merged[index]
            if not evaluation.refreshes:
                for part in replaced:
                    evaluation.run.stats.not_merged(hook.name, Reason.BLOCK_REPLACED(), part)
                chain = (grid,), hook.scope, [hook.name], (hook.work, Granularity.MODULE), evaluation.of(hook.name)
                hook.own_site.begin(ActiveChain(hook.signature, *chain))
                yield hook.module, self.by_module[hook]
                yield from self.by_module[hook].layers()

    def flops_beside_blocks(self, latent: Tensor) -> float:
        return 2.0 * sum(weights * prod(token_grid(latent, side)) for weights, side in self.convolutions)

    def hook_pairs(self) -> Iterator[HookPair]:
        for hook, parts in self.by_module.items():
            if is_original(hook.module):
                yield hook.module, hook
                yield from parts.layers()


def _parts(model: UNetModel) -> Iterator[tuple[str, int, nn.Module]]:
    """Yield (position, halvings, layer) for every layer in forward order. position: such as "input.4". halvings: how
    often the latent's sides have been halved, rounding up."""
    halvings = list(accumulate(any(isinstance(m, Downsample) for m in b.modules()) for b in model.input_blocks))
    middle = [model.middle_block] if model.middle_block is not None else []
    # Output blocks have the resolutions of input blocks in reverse, because skip connections join them.
    sections = (
        ("input", model.input_blocks, halvings),
        ("middle", middle, halvings[-1:]),
        ("output", model.output_blocks, reversed(halvings)),
        ("out", [model.out], [0]),
    )
    for name, parts, depths in sections:
        for index, (part, depth) in enumerate(zip(parts, depths, strict=False)):
            yield from ((f"{name}.{index}", depth, layer) for layer in part)


def _weights(layer: nn.Module) -> int:
    """Return how many weights of a layer, outside of transformer blocks, are applied to each pixel."""
    own = [m for name, m in layer.named_modules() if "transformer_blocks" not in name]
    convolutions = [m for m in own if isinstance(m, nn.Conv2d)]
    weights = sum(m.in_channels * m.out_channels * prod(m.kernel_size) // m.groups for m in convolutions)
    if isinstance(layer, SpatialTransformer):
        weights += sum(m.in_features * m.out_features for m in own if isinstance(m, nn.Linear))
    return weights


def _replaced(block: str, options: Options) -> list[str]:
    """Return the names of those attentions of a block that another node computes, on all tokens."""
    section, stack, index = block.split(".")
    keys = {(section, int(stack), int(index)), (section, int(stack))}
    parts, replacements = {"attn1": "self-attention", "attn2": "cross-attention"}, options.get("patches_replace", {})
    return [part for name, part in parts.items() if not keys.isdisjoint(replacements.get(name, {}))]


def without_grid(options: Options, tokens: int, destinations: int) -> Options:
    """Return options for merged tokens, which form no grid: `activations_shape` becomes (B, C, 1, D)."""
    shape = options.get("activations_shape")
    if not shape or destinations == tokens:
        return options
    return {**options, "activations_shape": [*shape[:-2], 1, destinations]}
