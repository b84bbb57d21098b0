"""What a family of models declares about its blocks, and how blocks are joined to chains and get hooks."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from types import MappingProxyType
from typing import Any
from weakref import ref

from torch import Tensor, nn

from ...toma_core import Evaluation, RunState, ToMAConfig
from ...toma_core.config import Granularity, resolve_count
from ...toma_core.cost_model import FEWEST, Block
from ...toma_core.presets import Fields, ModelKind
from ...toma_core.reasons import Message, Reason
from ...toma_core.windows import Grid
from .active_chain import ActiveChain, is_merged
from .chain import BlockHook, RopeCache
from .model_hooks import GRAPHS, HookPair
from .origin import has_forward_hooks, is_original, runs_own_loop, unwrapped
from .signature import BlockSignature, Options

# Methods in which models run their blocks.
_LOOPS = "forward", "_forward", "forward_orig", "forward_core_with_concat", "_process_transformer_blocks", "_backbone"


@dataclass(eq=False)
class BlockGroup:
    """Consecutive blocks of one kind and resolution."""

    kind: str  # name of the blocks in the report
    blocks: Sequence[nn.Module]
    signature: BlockSignature
    work: Block  # cost of one block
    patch_size: int  # side of a token in pixels of the latent
    width: int  # channels of a token, 0 if unknown
    added: str = ""  # key in ComfyUI's `control` of the tensors that ControlNets add after each block
    borders: Container[int] = ()  # indices of blocks after which the model itself reads all tokens
    keys_width: int = 0  # channels of a token's keys, summed over a block's attentions; 0 if as many as `width`
    # `ModelHooks` sets these. hooks: one per block. home: returns the module that runs the blocks. list_name: the
    # attribute of this module that lists the blocks.
    hooks: list[BlockHook] = field(default_factory=list)
    home: Callable[[], Any] = lambda: None
    list_name: str = ""

    @property
    def modules(self) -> Any:
        """The model's list of blocks as it is now: another pack may have replaced the list."""
        return getattr(self.home(), self.list_name, self.blocks)


@dataclass(frozen=True)
class BlockFacts:
    """Name, cost and size of a block, in one form for every family of models."""

    name: str  # name in the report
    home: str  # stack of the block in the model; a chain lies in one stack
    work: Block  # cost of the block
    tokens: int  # image tokens at this block
    width: int  # channels of a token, 0 if unknown

    def flops(self, ratio: float = 0.0, attends: bool = False) -> float:
        """Return the FLOPs for one image at this ratio. attends: whether the block attends to all tokens."""
        left = self.tokens - round(ratio * self.tokens)
        return self.work.flops(left, 1, self.width or 1024, self.tokens if attends else left)


class ModelHooks:
    """The hooks of one model. They live as long as the model. Each family declares its blocks in a derived class."""

    # Whether latents may have several frames. Merging leaves frames equally many tokens: modulation may be per frame.
    takes_frames = False
    references_follow = False  # whether tokens of reference images come directly after the image's tokens
    inside: tuple[str, ...] = ("attn1_patch", "attn1_output_patch")  # patches of other nodes inside a block
    between: tuple[str, ...] = ()  # patches of other nodes that read tokens between two blocks
    scope = ""  # blocks with equal scopes share plans; empty if only blocks of one kind do
    kind = ModelKind.TRANSFORMER  # by which presets choose settings
    own_presets: Fields = MappingProxyType({})  # settings in which this model's presets differ from those of its kind

    def __init__(self, model: nn.Module) -> None:
        self.model = ref(model)  # weak: the registry drops the hooks when their model is deleted
        self.groups = self.block_groups(model)
        shared = RopeCache()
        for group in self.groups:
            rest = group.signature, group.work, self.scope or group.kind, shared
            modules = enumerate(map(unwrapped, group.blocks))
            group.hooks = [BlockHook(module, f"{group.kind}.{n}", *rest) for n, module in modules]
            children = ((home, name, each) for home in model.modules() for name, each in home.named_children())
            found = ((ref(home), name) for home, name, each in children if each is group.blocks)
            group.home, group.list_name = next(found, (self.model, ""))

    def block_groups(self, model: Any) -> tuple[BlockGroup, ...]:
        """Return the groups of blocks in the order in which they run."""
        return ()

    def hook_pairs(self) -> Iterator[HookPair]:
        """Yield every (module, hook) pair that `select` can yield, except for modules that another pack replaced."""
        for hook in (hook for group in self.groups for hook in group.hooks if is_original(hook.module)):
            yield hook.module, hook

    def blocks(self, latent: Tensor) -> Iterator[BlockFacts]:
        """Yield every block that may be merged, in forward order, for a latent of (B, C, ..., H, W)."""
        for group in self.groups:
            tokens = prod(token_grid(latent, group.patch_size))
            yield from (BlockFacts(hook.name, group.kind, hook.work, tokens, group.width) for hook in group.hooks)

    def flops_beside_blocks(self, latent: Tensor) -> float:
        """Return the FLOPs that an evaluation of one image needs outside of `blocks`; a multiply-add counts as two."""
        return 0.0

    def skipped_by_settings(self, group: BlockGroup, index: int, config: ToMAConfig) -> Message | None:
        return skip_reason(config, index, len(group.blocks), last=group is self.groups[-1])

    def kv_cache_numel(
        self, latent: Tensor, config: ToMAConfig, options: Options, controlled: bool, references: Sequence[Tensor]
    ) -> tuple[int, int]:
        """Return how many elements per image a run with a KV cache stores: first those of the chains' residuals, then
        those of keys and values in blocks that these settings merge. Both numbers are 0 if attention cannot be
        overridden. options: ComfyUI's `transformer_options`, whose patches may end chains. controlled: whether
        ControlNets may end chains. references: latents of reference images that may be merged, too."""
        merged = references if config.merge_references and self.references_follow else ()
        updates = keys = 0
        for group in self.groups if self.kind is ModelKind.TRANSFORMER else ():
            tokens = sum(prod(token_grid(each, group.patch_size)) for each in (latent, *merged))
            added = [True] * len(group.blocks) if controlled and group.added else []
            blocks = [n for n in range(len(group.blocks)) if not self.skipped_by_settings(group, n, config)]
            begins = self.begins(group, added, options, config)
            updates += tokens * group.width * sum(n in begins or n - 1 not in blocks for n in blocks)
            # Without `keys_width`, grouped keys count as wide as tokens: attention gets keys repeated for all heads.
            attentions = sum(self.attentions(group.blocks[n]) for n in blocks)
            keys += 2 * tokens * (group.keys_width or group.width) * attentions
        return updates, keys

    def model_cache_numel(self, cond: Mapping[str, Any], options: Options) -> float:
        """Return how many elements per image and condition the model itself caches on the card during a run."""
        return 0

    def attentions(self, block: nn.Module) -> int:
        """Return how many self-attentions a block has."""
        return 1

    def begins(self, group: BlockGroup, added: Sequence[Any], options: Options, config: ToMAConfig) -> Container[int]:
        """Return the indices of blocks at which a new chain begins, because the model, a ControlNet or another node may
        read all tokens before the block. Nodes do so in patches, or if they run the blocks in a loop of their own, as
        step caches do. added: per block, the residual that ControlNets add after the block."""
        every = range(len(group.blocks))
        stacked = config.granularity is Granularity.STACK and runs_own_loop(group.home(), _LOOPS)
        if not stacked or patched(options, self.between):
            return every
        patches = options.get("patches_replace", {}).get("dit", {})
        replaced = {n for n in every if (f"{group.kind}_block", n) in patches}
        ends = {n for n in every if n in group.borders} | {n for n, each in enumerate(added) if each is not None}
        return replaced | {n + 1 for n in replaced | ends}

    def select(
        self, x: Tensor, evaluation: Evaluation, options: Options, control: Any, references: Sequence[Tensor]
    ) -> Iterator[HookPair]:
        """Yield the (module, hook) pairs to install while the model is evaluated on the latent x of (B, C, ..., H, W).
        options: ComfyUI's `transformer_options`. control: residuals that ControlNets add. references: latents of
        reference images."""
        following = self.merged_references(references, evaluation)
        for group in self.groups:
            merged, grid = self.merged_blocks(group, evaluation, options), token_grid(x, group.patch_size)
            yield from self.module_hooks(merged, grid, evaluation, options)
            added = (control or {}).get(group.added) or ()
            begins = self.begins(group, added, options, evaluation.run.config)
            for chain in chains_of(merged, group.modules, begins, evaluation):
                yield from chain_hooks(chain, (grid, *following), x, evaluation, options, group.width)

    def merged_blocks(self, group: BlockGroup, evaluation: Evaluation, options: Options) -> dict[int, BlockHook]:
        """Return the hooks of the blocks that are merged, by index. Set `module` of each hook to the block that is in
        the model now. Note in the stats why other blocks are not merged."""
        config, modules, merged = evaluation.run.config, group.modules, dict[int, BlockHook]()
        own = isinstance(modules, Sequence | nn.ModuleList) and len(modules) == len(group.hooks)
        patch = Reason.ATTENTION_PATCH() if patched(options, self.inside) else None
        for index, hook in enumerate(group.hooks):
            reason = self.skipped_by_settings(group, index, config) or patch
            if reason is None and not (own and is_original(modules[index])):
                reason = Reason.BLOCK_REPLACED()
            if reason is None and not evaluation.step_plan.of(hook.name).ratio:
                reason = Reason.PROFILE_SKIPS_BLOCK()
            if reason is None:
                hook.module, merged[index] = unwrapped(modules[index]), hook
            else:
                evaluation.run.stats.not_merged(hook.name, reason)
        return merged

    def module_hooks(
        self, merged: dict[int, BlockHook], grid: Grid, evaluation: Evaluation, options: Options
    ) -> Iterator[HookPair]:
        """If modules of a block are to be merged one by one, remove the block from `merged`, and yield hooks for it."""
        return iter(())

    def merged_references(self, references: Sequence[Tensor], evaluation: Evaluation) -> list[Grid]:
        """Return each reference image's grid, or (N,) if the image is not merged. Return [] if no image is merged."""
        config, stats = evaluation.run.config, evaluation.run.stats
        if not (self.references_follow and config.merge_references):
            return []
        grids = list[Grid]()
        for n, latent in enumerate(references, 1):
            grid, least = token_grid(latent, self.groups[0].patch_size), config.min_tokens or FEWEST
            count, reason = prod(grid), None
            if latent.ndim > 4 and latent.shape[2] != 1:
                reason = Reason.REFERENCE_FRAMES()
            elif count < least:
                reason = Reason.TOO_FEW_TOKENS(least=least)
            elif not round(evaluation.step_plan.ratio * count):
                reason = Reason.NOTHING_TO_MERGE()
            if reason is not None:
                stats.not_merged(None, reason, f"reference {n}")
            grids.append(grid if reason is None else (count,))
        return grids if any(map(is_merged, grids)) else []

    def times_less_work(self, latent: Tensor, run: RunState) -> float | None:
        """Return the FLOPs of this run without merging, divided by its FLOPs with merging. latent: (B, C, ..., H, W).
        None if nothing was merged, and if the model got reference images or tiles of the latent, because their tokens
        are not counted. Not counted either are making plans, and text tokens beyond a family's minimum."""
        stats, schedule = run.stats, run.schedule
        if run.tiles or run.references or not stats.merged_blocks:
            return None
        facts = list(self.blocks(latent))
        every = (self.flops_beside_blocks(latent) + sum(fact.flops() for fact in facts)) * stats.evaluations
        saved = 0.0
        for step, ratio in stats.merged_steps.items():
            by_block = schedule.ratios_at(0.0, step) if schedule.sigmas else None  # None if all have the same ratio
            for fact in facts:
                if step in stats.merged_at.get(fact.name, ()):
                    share = ratio if by_block is None else by_block.get(fact.name, 0.0)
                    saved += (fact.flops() - fact.flops(share, run.kv_cache)) * stats.merged_in[step]
        return every / (every - saved) if 0 < saved < every else None


def patched(options: Options, names: tuple[str, ...]) -> bool:
    """Whether another node has patches of these names."""
    return any(options.get("patches", {}).get(name) for name in names)


def token_grid(latent: Tensor, patch_size: int) -> Grid:
    """Return (rows, columns) of the image tokens of a (B, C, ..., H, W) latent, or (frames, rows, columns) if it has
    several frames. Sides are rounded up to entire tokens, because ComfyUI pads the latent."""
    *frames, height, width = latent.shape[2:]
    sides = -(-height // patch_size), -(-width // patch_size)
    return (*frames, *sides) if prod(frames) > 1 else sides


def skip_reason(config: ToMAConfig, index: int, count: int, *, last: bool = True) -> Message | None:
    """Return why the settings skip block `index` of `count` blocks. last: whether the model ends with these blocks."""
    if index < resolve_count(config.skip_first_blocks, count):
        return Reason.SKIP_FIRST_BLOCKS(count=config.skip_first_blocks)
    if last and count - index <= resolve_count(config.skip_last_blocks, count):
        return Reason.SKIP_LAST_BLOCKS(count=config.skip_last_blocks)
    return None


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
    """Begin a chain, and yield the hooks that keep tokens merged from its first block to its last. hooks: those of its
    blocks. grids: the image's grid, then one per reference. x: latent of (B, C, ..., H, W). width: channels of a token,
    0 if unknown."""
    first, names, granularity = hooks[0], [hook.name for hook in hooks], evaluation.run.config.granularity
    if granularity is Granularity.STACK and len(hooks) == 1:
        granularity = Granularity.BLOCK  # which merges in the same way, at the same cost
    chain = first.signature, grids, first.scope, names, (first.work, granularity), evaluation.of(first.name)
    first.own_site.begin(ActiveChain(*chain))
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
