"""Chains of blocks on merged tokens, for every family: a site in the model, and the hook of each of its blocks.

    x = site.enter(x)         merge
    x = block(x) ...          the blocks, with rotary positions and arguments that fit the merged tokens
    y = site.leave(x)         unmerge

Eager mode and torch.compile take the same path. In eager mode a chain decides when it sees the tokens. A graph guards
on plain numbers only: they are prepared before the model runs, and operators do the work.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from ...toma_core import Evaluation, MergePlan
from ...toma_core.config import Granularity
from ...toma_core.cost_model import Block
from ...toma_core.reasons import Message, Reason
from ...toma_core.windows import Grid
from . import compile_ops
from .active_chain import ActiveChain, Reduction
from .attention_override import override_attention
from .model_hooks import Hook, eager, outside_graph
from .signature import BlockSignature, CallArguments, TokenReduction


class ChainSite:
    """The block of a model that a chain may begin at. Lives as long as the model.

    torch.compile guards on what a graph reads of it: plain values.

    Attributes:
        signature: How the blocks take their tokens.
        number: Number by which operators find the site.
        image: Image tokens, N, without references.
        references: Tokens of reference images that are merged too.
        lengths: (N, D) of the image and of each reference; N = D where the chain only refreshes the cache.
        tokens: Sum of all N.
        destinations: Sum of all D.
        in_graph: Whether the numbers were prepared for a graph; else the chain decides outside of it.
        attends: Whether merged blocks attend to all tokens.
        active: The chain in this evaluation.
        reduction: Its merged tokens.
        pair: (reduced, x) of the merged part, which `leave` needs; empty where the chain is not merged.
        rows: Rotary positions and other rows of the merged tokens, by argument, in a graph.
        reached: Whether the model has come to the chain in this evaluation.
    """

    active: ActiveChain | None
    reduction: Reduction | None
    pair: tuple[Tensor, ...]
    rows: dict[str, Any]

    def __init__(self, signature: BlockSignature) -> None:
        self.signature, self.number = signature, compile_ops.numbered(self)
        self.release()

    def release(self) -> None:
        """Drop all state of an evaluation."""
        self.active = self.reduction = None
        self.pair, self.rows = (), {}
        self.image = self.references = self.tokens = self.destinations = 0
        self.lengths: tuple[tuple[int, int], ...] = ()
        self.in_graph = self.attends = self.reached = False

    def begin(
        self,
        grids: tuple[Grid, ...],
        scope: Hashable,
        names: Sequence[str],
        work: tuple[Block, Granularity],
        evaluation: Evaluation,
    ) -> ActiveChain:
        """Begin an evaluation, see `ActiveChain`."""
        self.attends = evaluation.kv_cache
        return self.activate(ActiveChain(self.signature, grids, scope, names, work, evaluation))

    def activate(self, chain: ActiveChain) -> ActiveChain:
        """Set the chain of this evaluation."""
        self.active, self.image, self.references = chain, chain.tokens[0], sum(chain.tokens[1:])
        return chain

    def prepare(self, chain: ActiveChain, latent: Tensor, module: nn.Module, width: int) -> bool:
        """Prepare the numbers for a graph in which blocks like `module` see (B, N, width) of a latent of B images.

        Return whether the chain may be merged; if not, the reason is noted. With an unknown width, 0, it may: the chain
        decides when it sees the tokens.
        """
        if not width or len(latent) % len(chain.evaluation.plan_keys):
            self.attends = False  # compiled code does not see what a chain decides at run time
            return True
        weight = next(module.parameters(), latent)
        dtype = weight.dtype if weight.dtype.is_floating_point and weight.dtype.itemsize > 1 else torch.bfloat16
        self._set_lengths(chain.prepare(latent.new_empty(len(latent), dtype=dtype), width))
        self.in_graph = bool(self.lengths)
        return self.in_graph

    def _set_lengths(self, lengths: tuple[tuple[int, int], ...]) -> None:
        self.lengths = lengths
        self.tokens, self.destinations = (sum(each) for each in zip(*lengths, strict=True)) if lengths else (0, 0)

    def reach(self) -> ActiveChain | None:
        """Note that the model comes to the chain, and return it. A call of the model that another node adds to an
        evaluation has caches of its own."""
        if self.active is not None and self.reached and not self.pair:
            self.active = replace(self.active, evaluation=self.active.evaluation.again())
        self.reached = True
        return self.active

    @eager
    def start(self, x: Tensor, before: int, reason: Message | None) -> bool:
        """Decide outside of a graph whether the chain is merged, with x of [before | N | rest]; reduce it if it is.

        reason: Why it is not, if known.
        """
        # A call that ran out of memory and is repeated with fewer images has left a pair.
        chain, self.in_graph, self.pair = self.reach(), False, ()
        if chain is None or not chain.merges(x[:, before : before + self.image], reason):
            return False
        images = x[:, before : before + self.image + self.references]
        self.reduction, reduced = chain.reduce(images)
        self._set_lengths(self.reduction.lengths)
        self.pair = reduced, images
        return True

    @eager
    def plan_for(self, image: Tensor, reason: Message | None, part: str = "") -> MergePlan | None:
        """Return the plan for (B, N, C) tokens of the image, for a hook that merges parts of the block by itself; None
        if they are not merged, see `ActiveChain.merges`."""
        chain = self.active
        return chain.plan(image) if chain is not None and chain.merges(image, reason, part) else None

    def fits(self, x: Tensor, before: int) -> bool:
        """Whether a graph is traced in which x is [before | N | rest] as prepared."""
        inside = self.in_graph and torch.compiler.is_compiling()
        return inside and x.ndim == 3 and x.shape[1] >= before + self.tokens

    def enter(self, x: Tensor, before: int) -> Tensor:
        """Merge [before | N | rest] to [before | D | rest], (B, T, C)."""
        return self._enter(x, before) if self.in_graph else self._enter_eagerly(x, before)

    def _enter(self, x: Tensor, before: int) -> Tensor:
        if self.in_graph:
            image = x[:, before : before + self.tokens]
            self.pair = compile_ops.operators.enter(image, self.number, self.destinations), image
        reduced = self.pair[0]
        if x.shape[1] == self.tokens:
            # `leave` needs the block's input.
            return reduced.clone() if self.signature.mutates_input else reduced
        return torch.cat([x[:, :before], reduced, x[:, before + self.tokens :]], 1)

    def leave(self, out: Tensor, before: int) -> Tensor:
        """Unmerge [before | D | rest] to [before | N | rest], (B, T, C)."""
        return self._leave(out, before) if self.in_graph else self._leave_eagerly(out, before)

    def _leave(self, out: Tensor, before: int) -> Tensor:
        after, (reduced, image) = before + self.destinations, self.pair
        self.pair, self.rows = (), {}
        unmerge = compile_ops.operators.leave if self.in_graph else compile_ops.leave
        x: Tensor = unmerge(out[:, before:after], reduced, image, self.number)
        return x if out.shape[1] == self.destinations else torch.cat([out[:, :before], x, out[:, after:]], 1)

    _enter_eagerly, _leave_eagerly = eager(_enter), eager(_leave)

    def attend(self, block: str, t: Tensor, what: str, before: int, axis: int) -> Tensor:
        """See `Reduction.attend`."""
        if self.reduction is not None and not self.in_graph:
            return self.reduction.attend(block, t, what, before, axis)
        sizes = before, self.tokens, self.destinations, axis
        attended: Tensor = compile_ops.operators.attend(t, f"{block} {what}", self.number, *sizes)
        return attended

    def merge_rows(self, rows: dict[str, Any], before: int) -> None:
        """Make, in a graph, the rows of the merged tokens from those of [before | N | rest]."""
        sizes = self.number, before, self.tokens, self.destinations, self.signature.rope_token_dim
        if self.destinations != self.tokens:
            rows = {n: compile_ops.operators.rope(each, self.pair[0], *sizes) for n, each in rows.items()}
        self.rows = rows


class RopeCache:
    """Rotary positions and other rows of merged tokens, shared by blocks that share plans in an evaluation."""

    def __init__(self) -> None:
        self.entry: tuple[tuple[Tensor, ...], tuple[MergePlan | None, ...], tuple[Tensor, ...]] | None = None

    @eager
    def of(self, rows: dict[str, Any], site: ChainSite, before: int) -> dict[str, Any]:
        """Return the rows of the merged tokens, by argument, from those of all; `rows` itself where the chain only
        refreshes the cache."""
        reduction, given = site.reduction, tuple(rows.values())
        if not rows or reduction is None or reduction.refreshes:
            return rows
        if self.entry is None or not _same(self.entry[0], given) or not _same(self.entry[1], reduction.plans):
            self.entry = given, reduction.plans, tuple([reduction.rope(each, before) for each in given])
        return dict(zip(rows, self.entry[2], strict=True))


def _same(plans: Sequence[object], others: Sequence[object]) -> bool:
    return len(plans) == len(others) and all(a is b for a, b in zip(plans, others, strict=True))


class BlockHook(Hook):
    """Stands in for a block that may run on merged tokens, alone or in a chain with those after it.

    Attributes:
        name: As in the report.
        scope: Blocks with equal scopes share plans.
        site: Where a chain that begins with this block begins.
        chain: The site of the chain that the block is in, in this evaluation: its own, or that of an earlier block.
        last: Whether the chain ends with the block.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        signature: BlockSignature,
        work: Block,
        scope: Hashable,
        positions: RopeCache,
    ) -> None:
        self.module, self.name, self.signature, self.work, self.scope = module, name, signature, work, scope
        self.positions = positions
        self.site = self.chain = ChainSite(signature)
        self.last = True

    def release(self) -> None:
        self.site.release()
        self.chain = self.site
        self.positions.entry = None
        self.signature.release()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Before anything else: a graph guards on what it reads.
        if self.chain.in_graph:
            call_args = self.signature.call_args(args, kwargs)
            before = self.signature.image_start(call_args, self.chain.image)
            if before is not None and self._in_graph(call_args, before):
                return self._merged(len(args), call_args, before)
        return self.outside(*args, **kwargs)

    def _in_graph(self, call_args: CallArguments, before: int) -> bool:
        """Whether the block is in a chain that is merged inside the graph being traced."""
        site, signature = self.site, self.signature
        if self.chain is not site:
            return len(self.chain.pair) > 0
        return site.fits(signature.tokens(call_args), before) and not signature.obstacle(
            call_args, site.image, site.references
        )

    @outside_graph
    def outside(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block where its chain decides when it sees the tokens."""
        chain, signature = self.chain, self.signature
        call_args = signature.call_args(args, kwargs)
        signature.observe(call_args)
        reason = self.reason(call_args) if chain is self.site else None
        before = signature.image_start(call_args, chain.image)
        merged = len(chain.pair) > 0
        if chain is self.site:
            merged = chain.start(signature.tokens(call_args), before or 0, reason)
        if before is None or not merged:
            return self._called(len(args), call_args)
        return self._merged_outside(len(args), call_args, before)

    def _merged(self, positional: int, call_args: CallArguments, before: int) -> Any:
        """Run the block on the merged tokens of its chain, of which `before` others come before the image."""
        chain, signature = self.chain, self.signature
        x, rows = signature.tokens(call_args), signature.rows(call_args)
        start = before + signature.attention_offset(call_args)
        if chain is self.site:
            x = chain.enter(x, before)
            if chain.in_graph:
                chain.merge_rows(rows, start)
        rows = chain.rows if chain.in_graph else self.positions.of(rows, chain, start)
        merged, reduction = self.merged_call_args(call_args, x, rows, before), TokenReduction(before, chain.lengths)
        if chain.attends:
            spans = signature.attention_spans(merged, before)
            masked = partial(signature.merged_mask, removed=-reduction.removed)
            merged = override_attention(merged, partial(chain.attend, self.name), spans, masked)
        out = self._called(positional, merged)
        return signature.with_output(out, chain.leave(signature.output(out), before)) if self.last else out

    _merged_outside = outside_graph(_merged)

    def reason(self, call_args: CallArguments) -> Message | None:
        """Return why the chain that begins here is not merged, see `BlockSignature.obstacle`; None if it may be."""
        site, signature, active = self.site, self.signature, self.site.active
        if active is None:
            return None
        grid = signature.grid(call_args, active.grids[0])
        if grid is None:
            return Reason.UNKNOWN_GRID()
        # A ComfyUI that does not name references has them after the image too: they stay unmerged.
        grids = grid, *(active.grids[1:] if signature.reference_tokens(call_args) else ())
        site.activate(replace(active, grids=grids))
        return signature.obstacle(call_args, prod(grid), site.references)

    def merged_call_args(self, call_args: CallArguments, x: Tensor, rows: dict[str, Any], before: int) -> CallArguments:
        """Return the arguments for merged tokens x with these rows. before: tokens before the image."""
        signature, reduction = self.signature, TokenReduction(before, self.chain.lengths)
        merged = signature.replaced(call_args, x, rows)
        return {**merged, **signature.merged_args(call_args, reduction)} if reduction.removed else merged

    def _called(self, positional: int, call_args: CallArguments) -> Any:
        """Call the block, with as many positional arguments as its caller gave."""
        arguments = list(call_args.items())
        return self.original(*[value for _, value in arguments[:positional]], **dict(arguments[positional:]))
