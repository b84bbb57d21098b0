"""Describe blocks, skip blocks, join blocks to chains, and make the hooks of a chain, for all families of models."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor, nn

from ...toma_core import Evaluation, ToMAConfig
from ...toma_core.config import Granularity, resolve_count
from ...toma_core.cost_model import Block
from ...toma_core.reasons import Message, Reason
from ...toma_core.windows import Grid
from .active_chain import ActiveChain
from .chain import BlockHook
from .model_hooks import GRAPHS, HookPair
from .origin import has_forward_hooks, is_original, unwrapped
from .signature import Options


@dataclass(frozen=True)
class BlockFacts:
    """Name, cost and size of a block, in one form for every family of models."""

    name: str  # name in the report
    home: str  # stack of the block in the model; a chain lies in one stack
    work: Block  # cost of the block
    tokens: int  # image tokens at this block
    width: int  # channels of a token, 0 if unknown

    def flops(self, ratio: float = 0.0, attends: bool = False) -> float:
        """Return the FLOPs for one image, merged by a ratio. attends: whether the block attends to all tokens."""
        left = self.tokens - round(ratio * self.tokens)
        return self.work.flops(left, 1, self.width or 1024, self.tokens if attends else left)


def token_grid(latent: Tensor, patch_size: int) -> Grid:
    """Return (rows, columns) of the image tokens of a (B, C, ..., H, W) latent, or (frames, rows, columns) if it has
    several frames. Sides are rounded up to entire tokens, because ComfyUI pads the latent."""
    *frames, height, width = latent.shape[2:]
    sides = -(-height // patch_size), -(-width // patch_size)
    return (*frames, *sides) if prod(frames) > 1 else sides


def skip_reason(config: ToMAConfig, index: int, count: int, *, last: bool = True) -> Message | None:
    """Return why the settings skip the block of this index among `count`. last: whether these blocks are the model's
    last."""
    if index < resolve_count(config.skip_first_blocks, count):
        return Reason.SKIP_FIRST_BLOCKS(count=config.skip_first_blocks)
    if last and count - index <= resolve_count(config.skip_last_blocks, count):
        return Reason.SKIP_LAST_BLOCKS(count=config.skip_last_blocks)
    return None


def merged_blocks(
    hooks: Sequence[BlockHook], modules: Any, skips: Sequence[Message | None], evaluation: Evaluation
) -> dict[int, BlockHook]:
    """Return the hooks of the blocks that are merged, by index, and set each hook's module to the module that is in the
    model now. Note in the stats why each of the other blocks is not merged. modules: the model's list of blocks, which
    another pack may have replaced. skips: per block, why the settings skip it."""
    merged = {}
    own = isinstance(modules, Sequence | nn.ModuleList) and len(modules) == len(hooks)
    for index, (hook, reason) in enumerate(zip(hooks, skips, strict=True)):
        if reason is None and not (own and is_original(modules[index])):
            reason = Reason.BLOCK_REPLACED()
        if reason is None and not evaluation.step_plan.of(hook.name).ratio:
            reason = Reason.PROFILE_SKIPS_BLOCK()
        if reason is None:
            hook.module, merged[index] = unwrapped(modules[index]), hook
        else:
            evaluation.run.stats.not_merged(hook.name, reason)
    return merged


def chains_of(
    hooks: Mapping[int, BlockHook], modules: Sequence[nn.Module], begins: Container[int], evaluation: Evaluation
) -> list[list[BlockHook]]:
    """Divide merged blocks into chains of consecutive blocks. begins: indices at which a new chain always begins."""
    chains = list[list[BlockHook]]()
    for index, hook in hooks.items():
        before = hooks.get(index - 1)
        joins = before is not None and index not in begins and evaluation.step_plan.joins(before.name, hook.name)
        if not joins or has_forward_hooks(modules[index - 1], modules[index]):
            chains.append([])
        chains[-1].append(hook)
    return chains


def chain_hooks(
    hooks: Sequence[BlockHook], grids: tuple[Grid, ...], x: Tensor, evaluation: Evaluation, options: Options, width: int
) -> Iterator[HookPair]:
    """Yield hooks that keep tokens merged from the first of consecutive blocks to the last. grids: the image's grid,
    then one per reference. x: latent of (B, C, ..., H, W). width: channels of a token, 0 if unknown."""
    first, config = hooks[0], evaluation.run.config
    evaluation = evaluation.of(first.name)
    # Estimate the cost of a chain of one block as with granularity `block`, where such a block is merged in the same
    # way.
    alone = Granularity.BLOCK if config.granularity is Granularity.STACK else config.granularity
    work = first.work, alone if len(hooks) == 1 else Granularity.STACK
    names = [hook.name for hook in hooks]
    first.own_site.begin(ActiveChain(first.signature, grids, first.scope, names, work, evaluation))
    if options.get(GRAPHS):
        merged = False
        try:
            merged = first.own_site.prepare(x, first.module, width)
        finally:
            if not merged:
                first.release()  # the hook was not installed, so it must be released here, also after an error
        if not merged:
            return
    for hook in hooks:
        hook.site, hook.last = first.own_site, hook is hooks[-1]
        yield hook.module, hook
