"""SDXL, SD1.5 and every other model that ComfyUI runs on `UNetModel` with `SpatialTransformer`s."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

from comfy.ldm.modules.attention import SpatialTransformer
from comfy.ldm.modules.diffusionmodules.openaimodel import Downsample, UNetModel
from torch import Tensor, nn

from ...toma_core import Evaluation, MergePlan, ToMAConfig, plan_for
from ...toma_core.config import Granularity, Levels, Share
from ...toma_core.detail import Detail
from .graphs import Place
from .hooks import GRAPHS, Hook, HookPair, detail_of, eager, fits, outside_graph, reduce, restore
from .layout import on_no_grid
from .unet_layers import MergedAttention, MergedFeedForward, WholeBlock

NAME = "UNet (SDXL, SD1.5, SD2)"

# Patches of other nodes that are shown tokens inside a transformer block.
_TOKEN_PATCHES = ("attn1_patch", "attn1_output_patch", "middle_patch", "attn2_patch", "attn2_output_patch")


def matches(diffusion_model: nn.Module) -> bool:
    """Whether this adapter knows the model. Video UNets are left alone: they mix frames inside a stack."""
    kinds = {type(m) for m in diffusion_model.modules() if isinstance(m, SpatialTransformer)}
    return isinstance(diffusion_model, UNetModel) and kinds == {SpatialTransformer}


class _Now:
    """The evaluation in progress on a model, held weakly: it belongs to who calls the model. None outside of one."""

    evaluation: Callable[[], Evaluation | None] = staticmethod(lambda: None)


@dataclass(frozen=True)
class _Site:
    """Where a transformer block sits. left: its stack and those after it; level: 0 is the finest with attention;
    halvings: of the latent's sides on the way here."""

    position: tuple[str, int]
    index: int
    left: int
    level: int
    halvings: int
    now: _Now = field(compare=False)

    @property
    def name(self) -> str:
        return f"{self.position[0]}.{self.position[1]}.{self.index}"

    def grid(self, latent: Tensor) -> tuple[int, int]:
        """Rows and columns of the tokens here of a (B, C, H, W) latent; a Downsample rounds up."""
        return -(-latent.shape[-2] // 2**self.halvings), -(-latent.shape[-1] // 2**self.halvings)

    def scope(self, share: Share) -> Hashable:
        if share is Share.LEVEL:
            return "level"
        return self.position if share is Share.STACK else (self.position, self.index)

    @eager
    def plan(
        self, x: Tensor, transformer_options: dict[str, Any], part: str = "", rest: Sequence[_Site] = ()
    ) -> MergePlan | None:
        """The plan for x here, or None to leave it whole; the outcome is noted in the run's stats, also for the rest
        of a chain that shares the plan."""
        if (evaluation := self.now.evaluation()) is None:
            return None
        run = evaluation.run
        height, width = transformer_options.get("activations_shape", (0, 0))[-2:]
        plan = None
        if not height:
            reason = "ComfyUI does not tell the size of the grid (activations_shape)"
        elif not fits(x, height * width, evaluation):
            reason = "another node changed the number of tokens"
        else:
            plan = plan_for(x, (height, width), self.scope(run.config.share), evaluation)
            reason, part = "" if plan else evaluation.obstacle(x), ""
        for site in (self, *rest):
            if plan is None:
                run.stats.whole(site.name + part, reason)
            elif not evaluation.decision.keeps_detail:
                run.stats.merged(site.name)
        return plan


class _MergedBlock(Hook):
    """A transformer block that runs on merged tokens from its first norm to its last residual."""

    def __init__(self, site: _Site) -> None:
        self.site, self.place = site, Place()

    def __call__(self, x: Tensor, context: Any = None, transformer_options: dict[str, Any] = {}) -> Tensor:  # noqa: B006
        if not self.place.begins(x) or x.shape[1] != self.place.tokens:
            return self.outside(x, context, transformer_options)
        told = on_no_grid(transformer_options, self.place.tokens, self.place.kept)
        return self.place.leave(self.original(self.place.enter(x), context=context, transformer_options=told))

    @outside_graph
    def outside(self, x: Tensor, context: Any, transformer_options: dict[str, Any]) -> Tensor:
        plan = self.site.plan(x, transformer_options)
        detail = detail_of(self.site.name, x, self.site.now.evaluation())
        reduced = reduce(x, plan, detail)
        told = on_no_grid(transformer_options, x.shape[1], reduced.shape[1])
        out = self.original(reduced, context=context, transformer_options=told)
        return restore(out, reduced, x, plan, detail)

    def release(self) -> None:
        self.place.release()


class _StackStart(Hook):
    """The first of several blocks that stay merged: it merges, and holds what the last one needs to unmerge."""

    def __init__(self, sites: list[_Site]) -> None:
        self.sites, self.place = sites, Place()
        # What `restore` needs beside the chain's output.
        self.held: tuple[Tensor, Tensor, MergePlan | None, Detail | None] | None = None
        # N and D of the chain, for its other blocks. Plain numbers: torch.compile may trace each block apart.
        self.lengths = 0, 0

    def __call__(self, x: Tensor, context: Any = None, transformer_options: dict[str, Any] = {}) -> Tensor:  # noqa: B006
        if not self.place.begins(x) or x.shape[1] != self.place.tokens:
            return self.outside(x, context, transformer_options)
        reduced, self.lengths = self.place.enter(x), (self.place.tokens, self.place.kept)
        told = on_no_grid(transformer_options, *self.lengths)
        return self.original(reduced, context=context, transformer_options=told)

    @outside_graph
    def outside(self, x: Tensor, context: Any, transformer_options: dict[str, Any]) -> Tensor:
        plan = self.sites[0].plan(x, transformer_options, rest=self.sites[1:])
        detail = detail_of(f"{self.sites[0].name}-{self.sites[-1].name}", x, self.sites[0].now.evaluation())
        reduced = reduce(x, plan, detail)
        self.held, self.lengths = (reduced, x, plan, detail), (x.shape[1], reduced.shape[1])
        told = on_no_grid(transformer_options, *self.lengths)
        return self.original(reduced, context=context, transformer_options=told)

    def release(self) -> None:
        self.held, self.lengths = None, (0, 0)
        self.place.release()


class _StackMiddle(Hook):
    """A block between the first and the last of several that stay merged: what it is told has to fit its tokens."""

    def __init__(self, start: _StackStart) -> None:
        self.start = start

    def __call__(self, x: Tensor, context: Any = None, transformer_options: dict[str, Any] = {}) -> Tensor:  # noqa: B006
        told = on_no_grid(transformer_options, *self.start.lengths)
        return self.original(x, context=context, transformer_options=told)


class _StackEnd(_StackMiddle):
    """The last of several blocks that stay merged."""

    def __call__(self, x: Tensor, context: Any = None, transformer_options: dict[str, Any] = {}) -> Tensor:  # noqa: B006
        if self.start.place.held is None:
            return self.outside(x, context, transformer_options)
        return self.start.place.leave(super().__call__(x, context, transformer_options))

    @outside_graph
    def outside(self, x: Tensor, context: Any, transformer_options: dict[str, Any]) -> Tensor:
        out = super().__call__(x, context, transformer_options)
        held, self.start.held = self.start.held, None
        return out if held is None else restore(out, *held)


class _BlockHooks:
    """Every hook a transformer block may get."""

    def __init__(self, module: Any, site: _Site) -> None:
        self.module, self.site = module, site
        self.merged = _MergedBlock(site)
        self.block = WholeBlock(site.plan)
        self.attn1 = MergedAttention(self.block, " self-attention")
        self.attn2 = MergedAttention(self.block, " cross-attention")
        self.ff = MergedFeedForward(self.block)

    def by_module(self, config: ToMAConfig) -> Iterator[HookPair]:
        yield self.module, self.block
        if config.self_attention:
            yield self.module.attn1, self.attn1
        if config.cross_attention and self.module.attn2 is not None:
            yield self.module.attn2, self.attn2
        if config.feed_forward:
            yield self.module.ff, self.ff


class Hooks:
    """All hooks of one UNet, made once and kept as long as the model lives."""

    def __init__(self, diffusion_model: UNetModel) -> None:
        self.now = _Now()
        self.stacks: list[list[_BlockHooks]] = []
        self.chains: dict[tuple[_Site, _Site], list[_StackStart | _StackMiddle]] = {}
        stacks = list(_stacks(diffusion_model))
        for left, (position, level, halvings, stack) in zip(range(len(stacks), 0, -1), stacks, strict=True):
            blocks = enumerate(stack.transformer_blocks)
            self.stacks.append([_BlockHooks(m, _Site(position, i, left, level, halvings, self.now)) for i, m in blocks])

    def select(
        self, x: Tensor, evaluation: Evaluation, transformer_options: dict[str, Any], control: Any = None
    ) -> Iterator[HookPair]:
        """The hooks to install for this evaluation. control: not looked at, ControlNets add outside of the stacks."""
        config, stats = evaluation.run.config, evaluation.run.stats
        self.now.evaluation = ref(evaluation)
        seen = x, evaluation, bool(transformer_options.get(GRAPHS))
        for blocks in self.stacks:
            chain: list[_BlockHooks] = []
            for block in blocks:
                if reason := _left_out(block.site, config):
                    stats.whole(block.site.name, reason)
                elif config.granularity is Granularity.MODULE or _is_patched(block.site, transformer_options):
                    if evaluation.decision.keeps_detail:
                        continue
                    for part in _replaced(block.site, transformer_options):
                        stats.whole(f"{block.site.name} {part}", "replaced by another node")
                    yield from block.by_module(config)
                elif config.granularity is Granularity.BLOCK:
                    yield from self._chained([block], *seen)
                else:
                    chain.append(block)
                    continue
                yield from self._chained(chain, *seen)
                chain = []
            yield from self._chained(chain, *seen)

    def whole_every(self, config: ToMAConfig) -> int:
        """Of how many steps one runs whole."""
        return config.unet_whole_every

    def places(self) -> Iterator[HookPair]:
        """Blocks and their parts with the hooks that may stand in for them."""
        for block in (block for blocks in self.stacks for block in blocks):
            yield block.module, block.merged
            yield block.module.attn1, block.attn1
            if block.module.attn2 is not None:
                yield block.module.attn2, block.attn2
            yield block.module.ff, block.ff

    def _chained(self, chain: list[_BlockHooks], x: Tensor, evaluation: Evaluation, graphs: bool) -> Iterator[HookPair]:
        """Hooks that keep tokens merged from the first to the last of consecutive blocks."""
        if not chain:
            return
        first, config = chain[0], evaluation.run.config
        hooks = self._hooks(chain)
        if graphs:
            scope, width = first.site.scope(config.share), getattr(first.module.attn1.to_q, "in_features", 0)
            names, grid = [block.site.name for block in chain], first.site.grid(x)
            if not hooks[0].place.prepare(x, grid, scope, names, evaluation, first.module, width):
                return
        yield from zip((block.module for block in chain), hooks, strict=True)

    def _hooks(self, chain: list[_BlockHooks]) -> list[Any]:
        """One for each block of a chain, made once; the first of them has a place."""
        if len(chain) == 1:
            return [chain[0].merged]
        key = (chain[0].site, chain[-1].site)
        if key not in self.chains:
            start = _StackStart([block.site for block in chain])
            self.chains[key] = [start, *(_StackMiddle(start) for _ in chain[2:]), _StackEnd(start)]
        return self.chains[key]


def _stacks(diffusion_model: UNetModel) -> Iterator[tuple[tuple[str, int], int, int, SpatialTransformer]]:
    """(position, level, halvings, stack) of every SpatialTransformer in forward order, see `_Site`."""
    depth, depths, found = 0, [], []
    for i, module in enumerate(diffusion_model.input_blocks):
        depth += any(isinstance(m, Downsample) for m in module.modules())
        depths.append(depth)
        found += [(("input", i), depth, m) for m in module if isinstance(m, SpatialTransformer)]
    middle = diffusion_model.middle_block if diffusion_model.middle_block is not None else ()
    found += [(("middle", 0), depth, m) for m in middle if isinstance(m, SpatialTransformer)]
    for i, module in enumerate(diffusion_model.output_blocks):
        # An output block runs at the resolution of the skip connection it takes.
        found += [(("output", i), depths[-1 - i], m) for m in module if isinstance(m, SpatialTransformer)]
    finest = min(depth for _, depth, _ in found)
    for position, depth, stack in found:
        yield position, depth - finest, depth, stack


def _left_out(site: _Site, config: ToMAConfig) -> str:
    """Why the settings leave this block whole, or an empty string."""
    if site.left <= config.unet_whole_last:
        return f"unet_whole_last = {config.unet_whole_last}"
    if config.granularity is Granularity.MODULE and not any(
        (config.self_attention, config.cross_attention, config.feed_forward)
    ):
        return "self_attention, cross_attention and feed_forward are off"
    wanted = config.levels is Levels.ALL or (config.levels is Levels.FINEST) == (site.level == 0)
    return "" if wanted else f"levels = {config.levels.value}"


def _is_patched(site: _Site, transformer_options: dict[str, Any]) -> bool:
    """Whether another node's patch is shown this block's tokens: then it is merged module by module, so that the
    patch goes on seeing all of them."""
    patches = transformer_options.get("patches", {})
    return any(patches.get(name) for name in _TOKEN_PATCHES) or any(_replaced(site, transformer_options))


def _replaced(site: _Site, transformer_options: dict[str, Any]) -> Iterator[str]:
    """The attentions of this block that another node computes in its own way, on all tokens."""
    replacements = transformer_options.get("patches_replace", {})
    for name, part in (("attn1", "self-attention"), ("attn2", "cross-attention")):
        entries = replacements.get(name, {})
        if (*site.position, site.index) in entries or site.position in entries:
            yield part
