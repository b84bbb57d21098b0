"""SDXL, SD1.5 and every other model that ComfyUI runs on `UNetModel` with `SpatialTransformer`s."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

from comfy.ldm.modules.attention import SpatialTransformer
from comfy.ldm.modules.diffusionmodules.openaimodel import Downsample, UNetModel, Upsample
from torch import Tensor, nn

from ....toma_core import Evaluation
from ....toma_core.config import Granularity
from ....toma_core.cost_model import Block
from ....toma_core.reasons import Message, Reason
from ....toma_core.windows import Grid
from ..blocks import BlockFacts, chain_hooks, chains_of, merged_blocks, skip_reason, token_grid
from ..chain import BlockHook, RopeCache
from ..family import ModelHooks, patched
from ..model_hooks import HookPair
from ..origin import is_original, runs_own_loop
from ..signature import BlockSignature, CallArguments, Options, TokenReduction
from .unet_layers import ByModule, without_grid

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


@dataclass(frozen=True)
class _Stack:
    """A stack of transformer blocks."""

    position: tuple[str, int]  # part of the UNet and index in it
    halvings: int  # how often the latent's sides are halved before this layer; a Downsample rounds up
    width: int  # channels of a token, 0 if unknown
    home: SpatialTransformer  # the module that runs the blocks
    blocks: list[ByModule]  # the blocks' hooks


class Hooks(ModelHooks):
    def __init__(self, diffusion_model: UNetModel) -> None:
        signature = Signature()
        shared = RopeCache()
        self.stacks: list[_Stack] = []
        self.convolutions: list[tuple[int, int]] = []  # halvings and weights of each layer
        for position, halvings, layer in _parts(diffusion_model):
            self.convolutions.append((halvings - isinstance(layer, Upsample), _weights(layer)))
            if isinstance(layer, SpatialTransformer):
                blocks = []
                for index, module in enumerate(layer.transformer_blocks):
                    name = ".".join(map(str, (*position, index)))
                    blocks.append(ByModule(BlockHook(module, name, signature, COST, "unet", shared)))
                width = getattr(layer.transformer_blocks[0].attn1.to_q, "in_features", 0)
                self.stacks.append(_Stack(position, halvings, width, layer, blocks))

    def select(
        self, x: Tensor, evaluation: Evaluation, options: Options, control: Any, references: Sequence[Tensor]
    ) -> Iterator[HookPair]:
        # `control` is not used, because ControlNets add residuals outside of the stacks.
        config, stats = evaluation.run.config, evaluation.run.stats
        by_module = config.granularity is Granularity.MODULE or patched(options, _TOKEN_PATCHES)
        for place, stack in enumerate(self.stacks):
            grid, modules = token_grid(x, 2**stack.halvings), stack.home.transformer_blocks
            skips = [skip_reason(config, place, len(self.stacks))] * len(stack.blocks)
            merged = merged_blocks([block.block_hook for block in stack.blocks], modules, skips, evaluation)
            for index in list(merged):
                # If another node's patch reads the tokens of a block, merge by module, so that the patch gets all
                # tokens.
                replaced = list(_replaced(stack, index, options))
                if by_module or replaced:
                    name = merged.pop(index).name
                    if not evaluation.refreshes:
                        for part in replaced:
                            stats.not_merged(name, Reason.BLOCK_REPLACED(), part)
                        yield from stack.blocks[index].hooks(grid, evaluation.of(name))
            chains = config.granularity is Granularity.STACK and runs_own_loop(stack.home, ("forward",))
            for chain in chains_of(merged, modules, () if chains else merged, evaluation):
                yield from chain_hooks(chain, (grid,), x, evaluation, options, stack.width)

    def blocks(self, latent: Tensor) -> Iterator[BlockFacts]:
        for stack in self.stacks:
            home = ".".join(map(str, stack.position))
            tokens = prod(token_grid(latent, 2**stack.halvings))
            for hook in (block.block_hook for block in stack.blocks):
                yield BlockFacts(hook.name, home, hook.work, tokens, stack.width)

    def flops_beside_blocks(self, latent: Tensor) -> float:
        return 2.0 * sum(weights * prod(token_grid(latent, 2**halvings)) for halvings, weights in self.convolutions)

    def hook_pairs(self) -> Iterator[HookPair]:
        for block in (block for stack in self.stacks for block in stack.blocks):
            if is_original(block.block_hook.module):
                yield block.block_hook.module, block.block_hook
                yield from block.layers()


def _parts(model: UNetModel) -> Iterator[tuple[tuple[str, int], int, nn.Module]]:
    """Yield (position, halvings, layer) of every layer in forward order, see `_Stack`."""
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
            yield from (((name, index), depth, layer) for layer in part)


def _weights(layer: nn.Module) -> int:
    """Return how many weights of a layer, outside of transformer blocks, are applied to each pixel."""
    own = [m for name, m in layer.named_modules() if "transformer_blocks" not in name]
    convolutions = [m for m in own if isinstance(m, nn.Conv2d)]
    weights = sum(m.in_channels * m.out_channels * prod(m.kernel_size) // m.groups for m in convolutions)
    if isinstance(layer, SpatialTransformer):
        weights += sum(m.in_features * m.out_features for m in own if isinstance(m, nn.Linear))
    return weights


def _replaced(stack: _Stack, index: int, options: Options) -> Iterator[str]:
    """Yield the names of a block's attentions that another node computes; these run on all tokens."""
    replacements = options.get("patches_replace", {})
    for name, part in (("attn1", "self-attention"), ("attn2", "cross-attention")):
        entries = replacements.get(name, {})
        if (*stack.position, index) in entries or stack.position in entries:
            yield part
