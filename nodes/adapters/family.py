"""What a family of models tells, and what is done with it the same way for all of them.

A family is a file in `families`: NAME, `matches`, and `Hooks`, which says which blocks there are, how they take their
tokens (`BlockSignature`), what they cost, who looks at the tokens between two of them, and what presets leave whole.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol
from weakref import ref

from torch import Tensor, nn

from ...toma_core import Evaluation, ToMAConfig
from ...toma_core.config import Granularity, SimilarityFrom, resolve_count
from ...toma_core.cost_model import FEWEST, Block
from ...toma_core.presets import Fields
from ...toma_core.reasons import Message, Reason
from ...toma_core.windows import Grid
from .active_chain import is_merged
from .chain import BlockHook, RopeCache
from .model_hooks import GRAPHS, HookPair
from .signature import BlockSignature

# What presets of transformers have in common: their plans are made from the predicted picture, with more destinations
# where there is more in it. Nearer at the same work (benchmarks/results/fidelity/trials.md).
PREDICTED: Mapping[str, Any] = {"similarity_from": SimilarityFrom.PREDICTION}
# Where merged blocks look at all tokens none has to be left whole, every step has a plan of its own, and smaller
# windows are nearer.
_KV_CACHE: Mapping[str, Any] = {
    **PREDICTED,
    "kv_cache": True,
    "window_size": 4,
    "sharpness": 1000.0,
    "selection_interval": 1,
    "weight_interval": 1,
}
PRESETS: Fields = {
    "balanced": {**_KV_CACHE, "full_step_interval": 4},
    "quality": {**_KV_CACHE, "full_step_interval": 2},
    "paper": {"skip_first_blocks": 0.1},
}
# Where they cannot: the shares that are left whole of Flux.
WITHOUT_KV_CACHE: Fields = {
    "balanced": {**PREDICTED, "skip_first_blocks": 0.15, "full_step_interval": 3},
    "quality": {**PREDICTED, "skip_first_blocks": 0.15, "full_step_interval": 2},
    "paper": {"skip_first_blocks": 0.1},
}


# The methods in which models run their blocks, each in some of them.
_LOOPS = frozenset(("forward", "_forward", "forward_orig", "forward_core_with_concat"))


class ModelHooks(Protocol):
    """What a family keeps for one model, as long as the model lives."""

    # What each preset is for this kind of model, the same for runs whose blocks cannot look at all tokens, and whether
    # its latents may have several frames.
    presets: Fields
    without_kv_cache: Fields
    takes_frames: bool

    def select(
        self,
        x: Tensor,
        evaluation: Evaluation,
        transformer_options: dict[str, Any],
        *,
        control: Any = None,
        references: Sequence[Tensor] = (),
    ) -> Iterator[HookPair]:
        """The (module, hook) pairs to install while the model is evaluated on the latent x of (B, C, ..., H, W).
        control, references: what ControlNets add, and latents of reference images, as ComfyUI hands them over."""
        ...

    def hook_pairs(self) -> Iterator[HookPair]:
        """Every (module, hook) pair that `select` may ever give whose `forward` can be patched at."""
        ...

    def blocks(self, latent: Tensor) -> Iterator[BlockFacts]:
        """Every block that may be merged, in forward order, as a latent of (B, C, ..., H, W) makes its grid."""
        ...

    def kv_cache_numel(
        self,
        latent: Tensor,
        config: ToMAConfig,
        transformer_options: Mapping[str, Any] = {},
        *,
        controlled: bool = False,
        references: Sequence[Tensor] = (),
    ) -> tuple[int, int]:
        """How many numbers are kept of an image so that merged blocks look at all its tokens: the updates of chains,
        and keys and values of each block that these settings merge; 0 of these where nobody can tell their attention.
        transformer_options, controlled: what may break chains, and whether ControlNets may. references: latents of
        those that may be merged too."""
        ...


@dataclass(frozen=True)
class BlockFacts:
    """A block as it stands in a model. name: as in the report. home: blocks of one home may be merged in one chain.
    tokens, width: of the image at this block; width 0 if unknown."""

    name: str
    home: str
    work: Block
    tokens: int
    width: int


def token_grid(latent: Tensor, patch_size: int) -> Grid:
    """Rows and columns of image tokens of a (B, C, ..., H, W) latent, odd sides padded as ComfyUI does; before them the
    frames of a (B, C, T, H, W) latent, if there are several."""
    *frames, height, width = latent.shape[2:]
    sides = -(-height // patch_size), -(-width // patch_size)
    return (*frames, *sides) if prod(frames) > 1 else sides


def has_forward_hooks(before: nn.Module, after: nn.Module) -> bool:
    """Whether hooks look at what goes from one block to the next. PyTorch's own, of weights that are spread over
    several cards (FSDP), do not look at tokens."""
    hooks = [hook for module in (before, unwrapped(before)) for hook in module._forward_hooks.values()]
    hooks += [hook for module in (after, unwrapped(after)) for hook in module._forward_pre_hooks.values()]
    return not all(str(getattr(hook, "__module__", "")).startswith("torch.") for hook in hooks)


def skip_reason(config: ToMAConfig, index: int, count: int, *, last: bool = True) -> Message | None:
    """Return why the settings skip the block of this index among `count`, None if they do not. last: whether the last
    of them are the last of the model."""
    if index < resolve_count(config.skip_first_blocks, count):
        return Reason.SKIP_FIRST_BLOCKS(count=config.skip_first_blocks)
    if last and count - index <= resolve_count(config.skip_last_blocks, count):
        return Reason.SKIP_LAST_BLOCKS(count=config.skip_last_blocks)
    return None


def profile_skips(hook: BlockHook, evaluation: Evaluation) -> Message | None:
    """Return why a profile skips a block in this evaluation, None if it does not."""
    return None if evaluation.step_plan.ratio_of(hook.name) else Reason.PROFILE_SKIPS_BLOCK()


def chain_hooks(
    hooks: Sequence[BlockHook],
    grids: tuple[Grid, ...],
    latent: Tensor,
    evaluation: Evaluation,
    transformer_options: Mapping[str, Any],
    width: int,
) -> Iterator[HookPair]:
    """Hooks that keep tokens merged from the first of consecutive blocks to the last. grids: of the image, and of
    references that are merged too. width: of their tokens, 0 if unknown."""
    first, config = hooks[0], evaluation.run.config
    evaluation = evaluation.of(first.name)
    # Alone, a block is no stack: merging adds to it what it adds to a block.
    alone = Granularity.BLOCK if config.granularity is Granularity.STACK else config.granularity
    work = first.work, alone if len(hooks) == 1 else Granularity.STACK
    first.site.begin(grids, first.scope, [hook.name for hook in hooks], work, evaluation)
    if transformer_options.get(GRAPHS) and first.in_graphs:
        merged = False
        try:
            merged = first.site.prepare(latent, first.module, width)
        finally:
            if not merged:
                first.release()  # it is not installed: nobody else would, also after an error
        if not merged:
            return
    for hook in hooks:
        hook.chain, hook.last = first.site, hook is hooks[-1]
        yield hook.module, hook


@dataclass(frozen=True)
class BlockGroup:
    """Blocks of one kind, one after another. kind: their name in the report and in plans. added: under which name
    ControlNets add something after each, see ComfyUI's `control`. borders: after these the model itself does something
    with all tokens."""

    kind: str
    blocks: Sequence[nn.Module]
    signature: BlockSignature
    work: Block
    added: str = ""
    borders: Container[int] = ()


class Transformer(ABC):
    """Hooks for a model whose blocks all see the image at one resolution.

    Consecutive blocks stay merged as long as nobody looks between them: where a ControlNet adds, another node replaces
    a block or is shown its tokens, all of them are there.
    """

    # Patches of other nodes that are shown tokens inside a block, and between two.
    inside: tuple[str, ...] = ("attn1_patch", "attn1_output_patch")
    between: tuple[str, ...] = ()
    presets, without_kv_cache = PRESETS, WITHOUT_KV_CACHE
    # Whether blocks hand their attention the options that ComfyUI gives them.
    passes_options = True
    # Of the tokens, 0 if unknown; and pixels of the latent on a token's side.
    width = 0
    patch_size = 2
    takes_frames = False
    # Whether tokens of reference images come right after those of the image.
    references_follow = True

    def __init__(self, model: Any) -> None:
        self.model = ref(model)  # weak: the model itself is the key that these hooks are kept under
        shared = RopeCache()
        self.groups = self.block_groups(model)
        # By name: another pack may put a list of its own in the place.
        self.lists = [next((n for n, m in model.named_children() if m is s.blocks), "") for s in self.groups]
        self.hooks = [
            [self._hook(group, module, index, shared) for index, module in enumerate(group.blocks)]
            for group in self.groups
        ]

    @abstractmethod
    def block_groups(self, model: Any) -> tuple[BlockGroup, ...]:
        """The model's stages, in the order in which they run; takes note of its patch size and width."""

    @staticmethod
    def _hook(group: BlockGroup, module: nn.Module, index: int, shared: RopeCache) -> BlockHook:
        module = unwrapped(module)
        # There is one resolution, but tokens of one kind of block say little of those of the other.
        return BlockHook(module, f"{group.kind}.{index}", group.signature, group.work, group.kind, shared)

    def skipped_by_settings(self, group: BlockGroup, index: int, config: ToMAConfig) -> Message | None:
        """Return why the settings skip this block of a stage, None if they do not."""
        return skip_reason(config, index, len(group.blocks), last=group is self.groups[-1])

    def hook_pairs(self) -> Iterator[HookPair]:
        """Blocks with the hooks that may stand in for them."""
        for hooks in self.hooks:
            yield from ((hook.module, hook) for hook in hooks if is_original(hook.module))

    def blocks(self, latent: Tensor) -> Iterator[BlockFacts]:
        """See `ModelHooks`."""
        tokens = prod(token_grid(latent, self.patch_size))
        for group, hooks in zip(self.groups, self.hooks, strict=True):
            yield from (BlockFacts(hook.name, group.kind, hook.work, tokens, self.width) for hook in hooks)

    def kv_cache_numel(
        self,
        latent: Tensor,
        config: ToMAConfig,
        transformer_options: Mapping[str, Any] = {},
        *,
        controlled: bool = False,
        references: Sequence[Tensor] = (),
    ) -> tuple[int, int]:
        """See `ModelHooks`. Keys are taken to be as wide as tokens: those in groups come to attention repeated."""
        if not self.passes_options:
            return 0, 0
        merged = references if config.merge_references and self.references_follow else ()
        tokens = sum(prod(token_grid(each, self.patch_size)) for each in (latent, *merged))
        chains, replaced = self.chains(transformer_options, config), _replaced(transformer_options)
        updates = keys = 0
        for group in self.groups:
            added = [True] * len(group.blocks) if controlled and group.added else []
            blocks = [n for n in range(len(group.blocks)) if not self.skipped_by_settings(group, n, config)]
            begins = [not chains or n - 1 not in blocks or _needs_all_tokens(group, n, added, replaced) for n in blocks]
            updates += sum(begins)
            keys += 2 * sum(self.attentions(group.blocks[n]) for n in blocks)
        return tokens * self.width * updates, tokens * self.width * keys

    def chains(self, transformer_options: Mapping[str, Any], config: ToMAConfig) -> bool:
        """Whether blocks stay merged from one to the next."""
        patches = transformer_options.get("patches", {})
        patched = any(patches.get(name) for name in self.between)
        return config.granularity is Granularity.STACK and not patched and self.loops()

    def attentions(self, block: nn.Module) -> int:
        """How many self-attentions a block has in which merged tokens take part."""
        return 1

    def obstacle(self, transformer_options: Mapping[str, Any], config: ToMAConfig) -> Message | None:
        """Return why no block of this call can be merged, None if they can."""
        patches = transformer_options.get("patches", {})
        shown = any(patches.get(name) for name in self.inside)
        return Reason.ATTENTION_PATCH() if shown else None

    def loops(self) -> bool:
        """Whether the model's own loop runs its blocks. Whoever runs them in a loop of their own, as step caches do,
        may look at what is between any two."""
        model: Any = self.model()
        return runs_own_loop(model, _LOOPS)

    def select(
        self,
        x: Tensor,
        evaluation: Evaluation,
        transformer_options: dict[str, Any],
        *,
        control: Any = None,
        references: Sequence[Tensor] = (),
    ) -> Iterator[HookPair]:
        """The hooks to install for this evaluation of the latent x, see `ModelHooks`."""
        config, stats = evaluation.run.config, evaluation.run.stats
        chains, replaced = self.chains(transformer_options, config), _replaced(transformer_options)
        control = control or {}
        grid, reason = token_grid(x, self.patch_size), self.obstacle(transformer_options, config)
        grids = grid, *self.merged_references(references, evaluation)
        for group, hooks, name in zip(self.groups, self.hooks, self.lists, strict=True):
            added, runs = control.get(group.added) or (), list[list[BlockHook]]()
            blocks = getattr(self.model(), name, group.blocks)
            own = isinstance(blocks, Sequence | nn.ModuleList) and len(blocks) == len(hooks)
            following = None  # the block that the last run could go on with
            for index, hook in enumerate(self.hooks_for(group, hooks, config)):
                foreign = None if own and is_original(blocks[index]) else Reason.BLOCK_REPLACED()
                if (
                    skipped_by_settings := self.skipped_by_settings(group, index, config)
                    or reason
                    or foreign
                    or profile_skips(hook, evaluation)
                ):
                    stats.not_merged(hook.name, skipped_by_settings)
                    continue
                hook.module = unwrapped(blocks[index])
                joins = chains and index == following and evaluation.step_plan.joins(runs[-1][-1].name, hook.name)
                if (
                    joins
                    and not _needs_all_tokens(group, index, added, replaced)
                    and not has_forward_hooks(blocks[index - 1], blocks[index])
                ):
                    runs[-1].append(hook)
                else:
                    runs.append([hook])
                following = index + 1
            for run in runs:
                of = grids if run[0].merges_references else (grid,)
                yield from chain_hooks(run, of, x, evaluation, transformer_options, self.width)

    def merged_references(self, references: Sequence[Tensor], evaluation: Evaluation) -> list[Grid]:
        """Return the grids of the reference images, (N,) for one that is not merged; nothing if none is."""
        config, stats = evaluation.run.config, evaluation.run.stats
        if not (self.references_follow and config.merge_references):
            return []
        grids = list[Grid]()
        for n, latent in enumerate(references, 1):
            grid, least = token_grid(latent, self.patch_size), config.min_tokens or FEWEST
            reason = None
            if latent.ndim > 4 and latent.shape[2] != 1:
                reason = Reason.REFERENCE_FRAMES()
            elif (count := prod(grid)) < least:
                reason = Reason.TOO_FEW_TOKENS(least=least)
            elif not round(evaluation.step_plan.ratio * count):
                reason = Reason.NOTHING_TO_MERGE()
            if reason is not None:
                stats.reference_not_merged(n, reason)
            grids.append(grid if reason is None else (prod(grid),))
        return grids if any(map(is_merged, grids)) else []

    def hooks_for(self, group: BlockGroup, hooks: list[BlockHook], config: ToMAConfig) -> list[BlockHook]:
        """The hooks of a stage for these settings: those around whole blocks, or of a kind of the family's own."""
        return hooks


def unwrapped(module: nn.Module) -> nn.Module:
    """The module itself where torch.compile has wrapped it."""
    return getattr(module, "_orig_mod", module)


def _by_comfyui(written: Any) -> bool:
    return str(getattr(written, "__module__", "")).startswith("comfy.")


def is_original(block: nn.Module) -> bool:
    """Whether a block is one of ComfyUI's. Another pack may have put its own in the place, for good or for one model
    of many that share the rest: nobody knows what it makes of fewer tokens."""
    # The class that says how it runs: PyTorch makes another of it where weights are spread over cards.
    homes = [kind for kind in type(unwrapped(block)).__mro__ if "forward" in vars(kind)]
    return _by_comfyui(homes[0])


def runs_own_loop(model: nn.Module, methods: Iterable[str]) -> bool:
    """Whether those of these methods that a model has are as ComfyUI wrote them."""
    loops = [getattr(type(model), name) for name in methods if hasattr(type(model), name)]
    return vars(model).keys().isdisjoint(methods) and all(map(_written_there, loops))


def _written_there(loop: Any) -> bool:
    """Whether a method is as ComfyUI wrote it, not one that somebody has put in its place for all models."""
    home = sys.modules.get(getattr(loop, "__module__", ""))
    code = getattr(loop, "__code__", None)
    return code is not None and _by_comfyui(loop) and code.co_filename == getattr(home, "__file__", None)


def _needs_all_tokens(group: BlockGroup, index: int, added: Sequence[Any], replaced: Mapping[Any, Any]) -> bool:
    """Whether the model itself, a ControlNet or another node takes what the block before gives."""
    if index - 1 in group.borders:
        return True
    if index - 1 < len(added) and added[index - 1] is not None:
        return True
    return any((f"{group.kind}_block", at) in replaced for at in (index - 1, index))


def _replaced(transformer_options: Mapping[str, Any]) -> Mapping[Any, Any]:
    """The blocks that other nodes have put something in the place of."""
    found: Mapping[Any, Any] = transformer_options.get("patches_replace", {}).get("dit", {})
    return found
