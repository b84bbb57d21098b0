"""The declarations of a family of models, and the code that chooses the hooks of all transformers from them.

A family is a file in `families` with NAME, MODEL and `Hooks`. `Hooks` names the blocks, their arguments
(`BlockSignature`), their costs, and the patches that read tokens between two blocks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Any
from weakref import ref

from torch import Tensor, nn

from ...toma_core import Evaluation, RunState, ToMAConfig
from ...toma_core.config import Granularity
from ...toma_core.cost_model import FEWEST
from ...toma_core.presets import Fields, ModelKind
from ...toma_core.reasons import Message, Reason
from ...toma_core.windows import Grid
from .active_chain import is_merged
from .blocks import BlockFacts, chain_hooks, chains_of, merged_blocks, skip_reason, token_grid
from .chain import BlockHook, RopeCache
from .model_hooks import HookPair
from .origin import is_original, runs_own_loop, unwrapped
from .signature import BlockGroup, Options

# Methods in which models run their blocks.
_LOOPS = "forward", "_forward", "forward_orig", "forward_core_with_concat", "_process_transformer_blocks", "_backbone"


class ModelHooks:
    """The hooks of one model, which live as long as the model. By default there are no blocks and nothing is merged."""

    takes_frames = False  # whether latents may have several frames
    own_presets: Fields = MappingProxyType({})  # settings in which this model's presets differ from those of its kind

    def kind(self, kv_cache: bool) -> ModelKind:
        """Return the kind of model, by which presets choose settings. kv_cache: whether a run has a KV cache. UNets
        need no KV cache: their convolutions see all tokens."""
        return ModelKind.UNET

    def select(
        self, x: Tensor, evaluation: Evaluation, options: Options, control: Any, references: Sequence[Tensor]
    ) -> Iterator[HookPair]:
        """Yield the (module, hook) pairs to install while the model is evaluated on the latent x of (B, C, ..., H, W).
        options: ComfyUI's `transformer_options`. control: residuals that ControlNets add. references: latents of
        reference images."""
        return iter(())

    def hook_pairs(self) -> Iterator[HookPair]:
        """Yield every (module, hook) pair that `select` can yield, except for modules that another pack replaced."""
        return iter(())

    def blocks(self, latent: Tensor) -> Iterator[BlockFacts]:
        """Yield every block that may be merged, in forward order, for a latent of (B, C, ..., H, W)."""
        return iter(())

    def flops_beside_blocks(self, latent: Tensor) -> float:
        """Return the FLOPs that an evaluation of one image needs outside of `blocks`; a multiply-add counts as two."""
        return 0.0

    def kv_cache_numel(
        self, latent: Tensor, config: ToMAConfig, options: Options, controlled: bool, references: Sequence[Tensor]
    ) -> tuple[int, int]:
        """Return how many elements per image are stored with a KV cache: residuals of chains, then keys and values of
        the blocks that these settings merge. Both numbers are 0 if the attention of blocks cannot be overridden.
        options: ComfyUI's `transformer_options`, whose patches may end chains. controlled: whether ControlNets may end
        chains. references: latents of reference images that may be merged, too."""
        return 0, 0

    def model_cache_numel(self, cond: Mapping[str, Any], options: Options) -> float:
        """Return how many elements per image and condition the model itself caches on the card during a run."""
        return 0

    def times_less_work(self, latent: Tensor, run: RunState) -> float | None:
        """Return the FLOPs of the unmerged run divided by the FLOPs of this run, for a latent of (B, C, ..., H, W).
        None if nothing was merged, or if the model got tiles of the latent or reference images, whose tokens are not
        counted. The making of plans is not counted either, nor are text tokens beyond a family's minimum."""
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


class Transformer(ModelHooks, ABC):
    """Hooks for a model of one resolution. A chain ends where ControlNets or other nodes read tokens between blocks."""

    inside: tuple[str, ...] = ("attn1_patch", "attn1_output_patch")  # patches of other nodes inside a block
    between: tuple[str, ...] = ()  # patches of other nodes that read tokens between two blocks
    passes_options = True  # whether blocks pass ComfyUI's options to their attention; if not, there is no KV cache
    width = 0  # channels of a token, 0 if unknown
    keys_width = 0  # channels of a token's keys, summed over a block's attentions; 0 if as many as `width`
    patch_size = 2  # side of a token in pixels of the latent
    references_follow = False  # whether tokens of reference images come directly after the image's tokens
    hooks: list[list[BlockHook]]  # by group, then by block

    def __init__(self, model: Any) -> None:
        self.model = ref(model)  # weak: the registry drops the hooks when their model is deleted
        shared = RopeCache()
        self.groups = self.block_groups(model)
        # Store the names of the lists of blocks, because another pack may replace a list.
        self.lists = [next((n for n, m in model.named_children() if m is s.blocks), "") for s in self.groups]
        self.hooks = []
        for group in self.groups:
            # The kind is the scope of plans, because blocks of different kinds have different tokens.
            rest = group.signature, group.work, group.kind, shared
            modules = enumerate(map(unwrapped, group.blocks))
            self.hooks.append([BlockHook(module, f"{group.kind}.{n}", *rest) for n, module in modules])

    @abstractmethod
    def block_groups(self, model: Any) -> tuple[BlockGroup, ...]:
        """Return the groups of blocks in the order in which they run; set `patch_size` and `width`."""

    def kind(self, kv_cache: bool) -> ModelKind:
        return ModelKind.TRANSFORMER if kv_cache and self.passes_options else ModelKind.WITHOUT_KV_CACHE

    def skipped_by_settings(self, group: BlockGroup, index: int, config: ToMAConfig) -> Message | None:
        return skip_reason(config, index, len(group.blocks), last=group is self.groups[-1])

    def hook_pairs(self) -> Iterator[HookPair]:
        for hooks in self.hooks:
            yield from ((hook.module, hook) for hook in hooks if is_original(hook.module))

    def blocks(self, latent: Tensor) -> Iterator[BlockFacts]:
        tokens = prod(token_grid(latent, self.patch_size))
        for group, hooks in zip(self.groups, self.hooks, strict=True):
            yield from (BlockFacts(hook.name, group.kind, hook.work, tokens, self.width) for hook in hooks)

    def kv_cache_numel(
        self, latent: Tensor, config: ToMAConfig, options: Options, controlled: bool, references: Sequence[Tensor]
    ) -> tuple[int, int]:
        # Without `keys_width`, grouped keys count once for each head of queries, because attention gets them repeated.
        if not self.passes_options:
            return 0, 0
        merged = references if config.merge_references and self.references_follow else ()
        tokens = sum(prod(token_grid(each, self.patch_size)) for each in (latent, *merged))
        chains = self.chains(options, config)
        replaced = _replaced(options)
        updates = keys = 0
        for group in self.groups:
            added = [True] * len(group.blocks) if controlled and group.added else []
            blocks = [n for n in range(len(group.blocks)) if not self.skipped_by_settings(group, n, config)]
            begins = [not chains or n - 1 not in blocks or _needs_all_tokens(group, n, added, replaced) for n in blocks]
            updates += sum(begins)
            keys += 2 * sum(self.attentions(group.blocks[n]) for n in blocks)
        return tokens * self.width * updates, tokens * (self.keys_width or self.width) * keys

    def chains(self, options: Options, config: ToMAConfig) -> bool:
        """Whether tokens may stay merged from one block to the next. They may not if another node can read tokens
        between two blocks, by a patch or by running the blocks in its own loop, as step caches do."""
        model: Any = self.model()
        stacked = config.granularity is Granularity.STACK and runs_own_loop(model, _LOOPS)
        return stacked and not patched(options, self.between)

    def attentions(self, block: nn.Module) -> int:
        """Return how many self-attentions a block has."""
        return 1

    def select(
        self, x: Tensor, evaluation: Evaluation, options: Options, control: Any, references: Sequence[Tensor]
    ) -> Iterator[HookPair]:
        config = evaluation.run.config
        chains = self.chains(options, config)
        replaced = _replaced(options)
        reason = Reason.ATTENTION_PATCH() if patched(options, self.inside) else None
        grids = token_grid(x, self.patch_size), *self.merged_references(references, evaluation)
        for group, hooks, name in zip(self.groups, self.hooks, self.lists, strict=True):
            modules = getattr(self.model(), name, group.blocks)
            skips = [self.skipped_by_settings(group, n, config) or reason for n in range(len(hooks))]
            merged = merged_blocks(hooks, modules, skips, evaluation)
            added = (control or {}).get(group.added) or ()
            begins = {n for n in merged if not chains or _needs_all_tokens(group, n, added, replaced)}
            for chain in chains_of(merged, modules, begins, evaluation):
                yield from chain_hooks(chain, grids, x, evaluation, options, self.width)

    def merged_references(self, references: Sequence[Tensor], evaluation: Evaluation) -> list[Grid]:
        """Return the grids of the reference images, (N,) for an image that is not merged. Empty if none is merged."""
        config, stats = evaluation.run.config, evaluation.run.stats
        if not (self.references_follow and config.merge_references):
            return []
        grids = list[Grid]()
        for n, latent in enumerate(references, 1):
            grid, least = token_grid(latent, self.patch_size), config.min_tokens or FEWEST
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


def _needs_all_tokens(group: BlockGroup, index: int, added: Sequence[Any], replaced: Mapping[Any, Any]) -> bool:
    """Whether the model, a ControlNet or another node reads all tokens before this block."""
    if index - 1 in group.borders or (0 < index <= len(added) and added[index - 1] is not None):
        return True
    return any((f"{group.kind}_block", at) in replaced for at in (index - 1, index))


def _replaced(options: Options) -> Mapping[Any, Any]:
    return options.get("patches_replace", {}).get("dit", {})


def patched(options: Options, names: tuple[str, ...]) -> bool:
    """Whether another node has patches of these names."""
    return any(options.get("patches", {}).get(name) for name in names)
