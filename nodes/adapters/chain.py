"""Run chains of blocks on merged tokens, in every family: a `ChainSite` holds a chain, a `BlockHook` runs a block.

In eager mode a chain decides whether it is merged when its first block is called: only then are the block's arguments
known. A graph of torch.compile must not depend on a call's arguments, so `prepare` decides from shapes, before the
model runs. The graph guards on the token counts, and calls operators that merge.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import InitVar, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...toma_core.cost_model import Block
from ...toma_core.reasons import Message, Reason
from . import compile_ops
from .active_chain import ActiveChain
from .attention_override import KVOverride
from .model_hooks import Hook, eager, outside_graph
from .signature import BlockSignature, CallArguments, TokenReduction


class RopeCache:
    """Positions that all chains of a model share in an evaluation."""

    # Key: rotary positions and other rows of all tokens, then the plans. Value: the rows of merged tokens.
    entry: tuple[tuple[Any, ...], tuple[Tensor, ...]] | None = None
    image_start: int | None = None  # where the image begins in positions, noted by chains with a text stream


class ChainSite:
    """A block at which a chain may begin, and the state of this chain. A site lives as long as the model. Graphs of
    torch.compile guard on its plain values."""

    signature: BlockSignature  # how the blocks take and return tokens
    shared: RopeCache
    number: int  # the id by which operators find the site
    image: int  # N, the number of image tokens without references
    references: int  # number of tokens of the reference images in the chain
    before: int  # number of tokens before the image, counted at the chain's first block
    lengths: tuple[tuple[int, int], ...]  # (N, D) of the image and each reference: tokens before and after merging
    tokens: int  # sum of all N
    destinations: int  # sum of all D
    in_graph: bool  # whether `prepare` has set the token counts; if not, the chain decides outside of the graph
    attends: bool  # whether blocks attend to all tokens
    chain: ActiveChain | None  # the chain of this evaluation
    pair: tuple[Tensor, ...]  # (merged tokens, all tokens) until `leave`, then empty; both have N tokens in a refresh
    rows: dict[str, Any]  # rotary positions and other rows of the merged tokens, by argument
    reached: bool  # whether the model has reached the chain in this evaluation

    def __init__(self, signature: BlockSignature, shared: RopeCache) -> None:
        self.signature, self.shared, self.number = signature, shared, compile_ops.numbered(self)
        self.release()

    def release(self) -> None:
        """Drop all state of an evaluation."""
        self.chain = None
        self.pair, self.lengths, self.rows = (), (), {}
        self.image = self.references = self.before = self.tokens = self.destinations = 0
        self.in_graph = self.attends = self.reached = False
        self.shared.entry = self.shared.image_start = None

    def begin(self, chain: ActiveChain) -> None:
        self.chain, self.image, self.references = chain, chain.tokens[0], sum(chain.tokens[1:])
        self.attends = chain.evaluation.run.kv_cache and chain.evaluation.step_plan.mode.caches

    def prepare(self, latent: Tensor, module: nn.Module, width: int) -> bool:
        """Decide whether the chain is merged in a graph. If it is, set the token counts and return True. If not, note
        why and return False: the caller must not install the chain's hooks. Without a KV cache, leave the decision to
        `start` and return True if the width is unknown (0), or if B is no multiple of the number of plan keys. module:
        a block of the chain, which gets (B, N, width) tokens for this latent of B images."""
        chain = self.chain
        if chain is None:
            return False
        if not self.attends and (not width or len(latent) % len(chain.evaluation.plan_keys)):
            return True
        weight = next(module.parameters(), latent)
        dtype = weight.dtype if weight.dtype.is_floating_point and weight.dtype.itemsize > 1 else torch.bfloat16
        self.in_graph = chain.merges(latent.new_empty((), dtype=dtype).expand(len(latent), self.image, width))
        if self.in_graph:
            self._set_lengths(chain.counts(latent.device))
        return self.in_graph

    def _set_lengths(self, lengths: tuple[tuple[int, int], ...]) -> None:
        self.lengths = lengths
        self.tokens, self.destinations = (sum(each) for each in zip(*lengths, strict=True))

    def reach(self) -> ActiveChain | None:
        """Note that the model has reached the chain, and return the chain. If another node calls the model a second
        time in one evaluation, the second call gets separate caches. If `pair` is still set, the first call ran out of
        memory: it is repeated with fewer images, and keeps its caches."""
        if self.chain is not None and self.reached and not self.pair:
            self.chain.evaluation = self.chain.evaluation.again()
        self.reached = True
        return self.chain

    def start(self, call_args: CallArguments) -> None:
        """Decide outside of a graph whether the chain is merged; if it is, merge the tokens of its first block."""
        chain = self.reach()
        self.in_graph, self.pair = False, ()
        reason = self.reason(call_args)
        images = self.signature.tokens(call_args)[:, self.before : self.before + self.image + self.references]
        if chain is not None and chain.merges(images[:, : self.image], reason):
            self.pair = chain.reduce(images), images
            self._set_lengths(chain.lengths)

    def reason(self, call_args: CallArguments) -> Message | None:
        """Return why the arguments of the chain's first block rule out merging the chain, None if they do not."""
        chain, signature = self.chain, self.signature
        grid = None if chain is None else signature.grid(call_args, chain.grids[0])
        if chain is None or grid is None:
            return Reason.UNKNOWN_GRID()
        # Leave reference tokens unmerged if ComfyUI's options do not give their number: older versions do not.
        chain.grids = grid, *(chain.grids[1:] if signature.reference_tokens(call_args) else ())
        self.image, self.references = chain.tokens[0], sum(chain.tokens[1:])
        reason = self.obstacle(call_args)
        if signature.text_arg:
            known = reason != Reason.UNKNOWN_IMAGE_POSITION()
            self.shared.image_start = self.before + signature.attention_offset(call_args) if known else None
        return reason

    def obstacle(self, call_args: CallArguments) -> Message | None:
        """Count the tokens before the image, and return why the first block's tokens cannot be merged, None if they
        can. If the arguments of a block without a text stream do not tell where the image begins, use the index that
        earlier blocks noted in `shared`."""
        before = self.signature.image_start(call_args, self.image)
        if before is None and not self.signature.text_arg:
            before = self.shared.image_start
        if before is None:
            return Reason.UNKNOWN_IMAGE_POSITION()
        self.before = before
        return self.signature.obstacle(call_args, before, self.image, self.references)

    def enter(self, x: Tensor) -> Tensor:
        """Merge the N image tokens of x: (B, before + N + rest, C) -> (B, before + D + rest, C)."""
        before = self.before
        if self.in_graph:
            image = x[:, before : before + self.tokens]
            self.pair = compile_ops.operators.enter(image, self.number, self.destinations), image
        reduced = self.pair[0]
        if x.shape[1] == self.tokens:
            # Clone for a block that writes into its input, because `leave` needs `reduced` unchanged.
            return reduced.clone() if self.signature.mutates_input else reduced
        return torch.cat([x[:, :before], reduced, x[:, before + self.tokens :]], 1)

    def leave(self, out: Tensor) -> Tensor:
        """Unmerge the D merged tokens of `out`: (B, before + D + rest, C) -> (B, before + N + rest, C)."""
        before, after, (reduced, image) = self.before, self.before + self.destinations, self.pair
        self.pair, self.rows, self.before = (), {}, 0  # reset, so that the graph need not return them
        unmerge = compile_ops.operators.leave if self.in_graph else compile_ops.leave
        x = unmerge(out[:, before:after], reduced, image, self.number)
        return x if out.shape[1] == self.destinations else torch.cat([out[:, :before], x, out[:, after:]], 1)

    def attend(self, block: str, t: Tensor, what: str, before: int, axis: int) -> Tensor:
        """Return the keys or values of all tokens, see `ActiveChain.attend`."""
        if not self.in_graph and self.chain is not None:
            return self.chain.attend(block, t, what, before, axis)
        sizes = before, self.tokens, self.destinations, axis
        return compile_ops.operators.attend(t, f"{block} {what}", self.number, *sizes)

    def merge_rows(self, rows: dict[str, Any], before: int) -> None:
        """Set `self.rows` to the rows of merged tokens. rows: those of all tokens, [before | N | rest], by argument."""
        self.rows, chain, shared = rows, self.chain, self.shared
        if self.in_graph:
            sizes = self.number, before, self.tokens, self.destinations, self.signature.rope_token_dim
            if self.destinations != self.tokens:
                self.rows = {n: compile_ops.operators.rope(each, self.pair[0], *sizes) for n, each in rows.items()}
        elif rows and chain is not None and not chain.evaluation.refreshes:
            source = *rows.values(), *chain.plans
            if shared.entry is None or list(map(id, shared.entry[0])) != list(map(id, source)):
                shared.entry = source, tuple([chain.rope(each, before) for each in rows.values()])
            self.rows = dict(zip(rows, shared.entry[1], strict=True))
            for name, all_rows in rows.items():
                chain.note_positions(all_rows, self.rows[name], before)


@dataclass(eq=False, repr=False)
class BlockHook(Hook):
    """Stands in for a block that may run on merged tokens, alone or in a chain with other blocks."""

    module: nn.Module
    name: str  # name in the report
    signature: BlockSignature
    work: Block  # cost of the block
    scope: Hashable  # blocks with equal scopes share plans
    rope: InitVar[RopeCache]
    last: bool = True  # whether the block's chain in this evaluation ends with the block

    def __post_init__(self, rope: RopeCache) -> None:
        self.own_site = ChainSite(self.signature, rope)  # site of a chain that begins with this block
        self.site = self.own_site  # site of the block's chain in this evaluation, perhaps that of an earlier block
        modules = () if self.signature.attention_arg else self.module.named_modules()
        self.preferred = tuple(each for name, each in modules if name.rpartition(".")[2] == "comfy_attention")

    def release(self) -> None:
        self.own_site.release()
        self.site = self.own_site
        self.signature.release()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Check `in_graph` first, and read nothing else if it is False: a graph guards on every value that it reads.
        if self.site.in_graph:
            call_args = self.signature.call_args(args, kwargs)
            if self.signature.has_image(call_args) and self._in_graph(call_args):
                return self._unmerged(self._call_original(len(args), self._merged(call_args)))
        return self._outside(*args, **kwargs)

    def _in_graph(self, call_args: CallArguments) -> bool:
        """Whether the block is in a chain that is merged inside the graph being traced."""
        if self.site is not self.own_site:
            return len(self.site.pair) > 0
        return torch.compiler.is_compiling() and self.site.obstacle(call_args) is None

    @outside_graph
    def _outside(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block outside of a graph. If a chain begins here, first decide whether the chain is merged."""
        call_args, merged = self.signature.call_args(args, kwargs), None
        if self.signature.has_image(call_args):
            if self.site is self.own_site:
                merged = self._started(call_args)
            elif self.site.pair:
                merged = self._merged_outside(call_args)
        out = self._call_original(len(args), call_args if merged is None else merged)
        return out if merged is None or not self.last else self._unmerged_eagerly(out)

    @eager
    def _started(self, call_args: CallArguments) -> CallArguments | None:
        """Start the chain; return the arguments for merged tokens, None if the chain is not merged."""
        self.site.start(call_args)
        return self._merged(call_args) if self.site.pair else None

    def _merged(self, call_args: CallArguments) -> CallArguments:
        """Return a call's arguments, changed for merged tokens. The chain's first block merges its tokens here."""
        site, signature, x = self.site, self.signature, self.signature.tokens(call_args)
        before = site.before
        if site is self.own_site:
            x = site.enter(x)
            site.merge_rows(signature.rows(call_args), before + signature.attention_offset(call_args))
        merged = signature.replaced(call_args, x, site.rows)
        reduction = TokenReduction(before, site.lengths)
        if reduction.removed:
            merged = {**merged, **signature.merged_args(merged, reduction)}
        if not site.attends:
            return merged
        spans = signature.attention_spans(merged, before)
        masked = partial(signature.mask_of_all, removed=reduction.removed)
        noted = None if site.in_graph or site.chain is None else site.chain.evaluation.run.stats.attentions
        override = KVOverride(partial(site.attend, self.name), spans, masked, self.preferred, noted)
        return signature.with_attention(merged, override)

    def _unmerged(self, out: Any) -> Any:
        """Return the block's result. If the block is the last of its chain, unmerge the result's tokens."""
        signature = self.signature
        return signature.with_output(out, self.site.leave(signature.output(out))) if self.last else out

    _merged_outside, _unmerged_eagerly = outside_graph(_merged), eager(_unmerged)

    def _call_original(self, positional: int, call_args: CallArguments) -> Any:
        """Call the block's own `forward`, with as many positional arguments as ComfyUI passed."""
        arguments = list(call_args.items())
        return self.original(*[value for _, value in arguments[:positional]], **dict(arguments[positional:]))
