"""One chain of blocks in one evaluation: decide whether it is merged, then merge and unmerge its tokens.

`chain.ChainSite` calls the methods directly in eager mode, and through operators in a graph of torch.compile.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from ...toma_core import Evaluation, MergePlan, reduce, restore
from ...toma_core.config import Granularity
from ...toma_core.cost_model import Block
from ...toma_core.decision import chain_merges
from ...toma_core.latent_regression import Rotation
from ...toma_core.pipeline import Cached, Refresh
from ...toma_core.reasons import Message, Reason
from ...toma_core.windows import Grid
from .model_hooks import unmerge
from .signature import BlockSignature


@dataclass(eq=False)
class ActiveChain:
    """Consecutive blocks that may keep their tokens merged from the first block to the last, in one evaluation."""

    signature: BlockSignature
    grids: tuple[Grid, ...]  # the image's grid, then one per reference image; (N,) for a reference that is not merged
    scope: Hashable  # chains with equal scopes share plans
    names: Sequence[str]  # names of the blocks, as in the report
    work: tuple[Block, Granularity]  # cost of one block, and the granularity at which the chain is merged
    evaluation: Evaluation
    # `reduce` sets these, with one item per grid. plans: None for a grid that is not merged. cached: the chain's entry
    # in the cache, None if there is none. lengths: (N, D), the numbers of tokens before and after merging.
    plans: tuple[MergePlan | None, ...] = ()
    cached: tuple[Refresh | Cached | None, ...] = ()
    lengths: tuple[tuple[int, int], ...] = ()
    attended: set[str] = field(default_factory=set)  # blocks whose attention has read or stored keys and values
    # Rotary positions of the image's N tokens, then of its D destinations: (B or 1, N or D, ..., channel pairs, 2, 2).
    positions: tuple[Tensor, Tensor] | None = None
    _rotations: dict[tuple[int, torch.dtype], Rotation | None] = field(default_factory=dict)  # by the keys' C and dtype

    @property
    def tokens(self) -> list[int]:
        return list(map(prod, self.grids))

    @property
    def name(self) -> str:
        """The name under which the caches store the chain."""
        return "-".join(dict.fromkeys((self.names[0], self.names[-1])))

    def counts(self, device: torch.device) -> tuple[tuple[int, int], ...]:
        """Return the `lengths` that `reduce` will set. The tokens need not exist yet."""
        evaluation, counts = self.evaluation, self.tokens
        for n, grid in enumerate(self.grids):
            if is_merged(grid) and not evaluation.refreshes:
                plan = evaluation.lasting if n else evaluation.step_plan
                counts[n] = evaluation.run.num_destinations(grid, plan, device)
        return tuple(zip(self.tokens, counts, strict=True))

    def merges(self, image: Tensor, reason: Message | None = None, part: str = "") -> bool:
        """Decide whether the image's (B, N, C) tokens are merged; if not, note the reason for the report. reason: the
        caller's reason not to merge, None if it has none. part: name of the part of a block that gets these tokens."""
        evaluation = self.evaluation
        if not reason and (image.shape[1] != prod(self.grids[0]) or len(image) % len(evaluation.plan_keys)):
            reason = Reason.TOKENS_CHANGED()
        elif not reason:
            reason, part = evaluation.obstacle(image, *self.work), ""
        if reason is None and not chain_merges(evaluation.run, evaluation.step_plan, evaluation.keys(self.name)):
            reason = Reason.NOT_CACHED()
        if reason is not None:
            for name in self.names:
                evaluation.run.stats.not_merged(name, reason, part)
        return reason is None

    def reduce(self, x: Tensor) -> Tensor:
        """Merge x, the (B, N, C) tokens of all grids. In a refresh, return x unchanged."""
        evaluation, name, parts = self.evaluation, self.name, split(x, self.tokens)
        plans = [evaluation.plan(parts[0], self.grids[0], self.scope)]
        cached = [evaluation.cached(name, parts[0])]
        for n, (part, grid) in enumerate(zip(parts[1:], self.grids[1:], strict=True)):
            merged = is_merged(grid)
            plans.append(evaluation.lasting_plan(part, grid, (self.scope, n)) if merged else None)
            cached.append(evaluation.cached(f"{name} reference {n}", part, of_latent=False) if merged else None)
        if not evaluation.refreshes:
            for block in self.names:
                evaluation.run.stats.merged(block, evaluation.step_plan.step)
        reduced = list(map(reduce, parts, plans, cached))
        self.plans, self.cached = tuple(plans), tuple(cached)
        self.lengths = tuple((a.shape[1], b.shape[1]) for a, b in zip(parts, reduced, strict=True))
        self.attended, self.positions = set(), None
        return self.signature.clamp_fp16(joined(reduced))

    def restore(self, out: Tensor, reduced: Tensor, x: Tensor) -> Tensor:
        """Unmerge `out`, the (B, D, C) output of the last block, to (B, N, C). reduced: input of the first block, (B,
        D, C). x: the tokens before merging, (B, N, C). Note in the run whether the chain's attention has called
        `attend`."""
        run, counts = self.evaluation.run, [count for _, count in self.lengths]
        if self.evaluation.step_plan.mode.caches:
            run.attention_hook_called = bool(run.attention_hook_called or self.attended)
        parts = split(out, counts), split(reduced, counts), split(x, self.tokens)
        restored = list(map(restore, *parts, self.plans, self.cached))
        return self.signature.clamp_fp16(joined(restored))

    def attend(self, block: str, t: Tensor, what: str, before: int, axis: int, always: bool = False) -> Tensor:
        """Return keys or values of all tokens, T = before + N + rest. t: those of merged tokens, T = before + D + rest.
        t and the result are (B, T, C), (B, T, heads, C) or, with axis 2, (B, heads, T, C). In a refresh, cache and
        return t. In a merged step, estimate all tokens' change from the destinations' change, and return the cached
        tensor plus the change. If nothing is cached, return t or, with `always`, t unmerged. what: "key" or "value",
        and the attention's index."""
        evaluation, lengths = self.evaluation, [count for _, count in self.lengths]
        quantized, total = evaluation.run.cache.quantized, sum(lengths)
        tokens_btc = (t.transpose(1, 2) if axis == 2 else t).narrow(1, before, total).flatten(2)
        own = quantized or (tokens_btc.untyped_storage()._cdata != t.untyped_storage()._cdata and len(lengths) == 1)
        parts, seen = split(tokens_btc, lengths), []
        for n, (part, (tokens, _), plan) in enumerate(zip(parts, self.lengths, self.plans, strict=True)):
            if not is_merged(self.grids[n]):
                seen.append(part)
                continue
            shape = part[:, :1].expand(-1, tokens, -1)
            cached = evaluation.cached(f"{block} {what} {n}", shape, kv=True, of_latent=not n)
            if isinstance(cached, Refresh):
                # If `part` is a view of t, clone it, because the block may write into t later.
                cached.store(part if own else part.clone(memory_format=torch.contiguous_format))
            elif cached is not None and plan is not None:
                rotation = self._rotation(part, t.shape[3:]) if what.startswith("key") and not n else None
                seen.append(cached.propagate(part, plan, rotation))
            elif always and plan is not None:
                seen.append(unmerge(part, plan))
            if cached is not None:
                self.attended.add(block)
        if len(seen) < len(parts):
            return t
        images, after = joined(seen), before + total
        if t.ndim == 4:
            heads = images.unflatten(2, (-1, t.shape[3]))
            images = heads.transpose(1, 2) if axis == 2 else heads
        if t.shape[axis] == total:
            return images if quantized else images.clone()  # blocks may write into the clone, but not into the cache
        return torch.cat([t.narrow(axis, 0, before), images, t.narrow(axis, after, t.shape[axis] - after)], axis)

    def note_positions(self, rope: Tensor, merged: Tensor, before: int) -> None:
        """Store the image's rows of `rope`, positions of [before | N | rest], and of `merged`, of [before | D | rest].
        If rotation pairs distant channels, store nothing: the change of keys is then estimated without undoing the
        rotation."""
        axis, (tokens, destinations) = self.signature.rope_token_dim, self.lengths[0]
        pairs = rope.ndim >= 5 and rope.shape[-2:] == (2, 2) and axis < rope.ndim - 3
        if pairs and not self.signature.rope_split_half:
            mine = merged.narrow(axis, before, destinations).movedim(axis, 1)
            self.positions, self._rotations = (rope.narrow(axis, before, tokens).movedim(axis, 1), mine), {}

    def _rotation(self, keys: Tensor, head: tuple[int, ...]) -> Rotation | None:
        """Return the rotation of (B, T, C) keys, None if unknown. head: (channels of one head,), or () if unknown."""
        if self.positions is None:
            return None
        kind = keys.shape[2], keys.dtype
        if kind not in self._rotations:
            whole = not head or head[0] == 2 * self.positions[0].shape[-3]
            self._rotations[kind] = Rotation.of(*self.positions, keys) if whole else None
        return self._rotations[kind]

    def rope(self, rope: Tensor, before: int) -> Tensor:
        """Return rotary positions of [before | D | rest]. rope: positions of [before | N | rest], (B or 1, ..., T, ...,
        2, 2). T is the second or third axis; an axis of heads has length 1."""
        parts, tokens = list[Tensor](), 0
        for plan, (count, _) in zip(self.plans, self.lengths, strict=True):
            if plan is None:
                each = torch.arange(count, device=rope.device)[None].expand(len(parts[0]), -1)
            else:
                each = plan.destinations
            parts.append(each + tokens if tokens else each)
            tokens += count
        destinations, axis = joined(parts), self.signature.rope_token_dim
        rope = rope.expand(len(destinations), *rope.shape[1:])
        first, image, last = rope.split([before, tokens, rope.shape[axis] - before - tokens], axis)
        index = destinations.view(-1, *[1] * (axis - 1), destinations.shape[1], *[1] * (rope.ndim - axis - 1))
        wanted = *rope.shape[:axis], destinations.shape[1], *rope.shape[axis + 1 :]
        return torch.cat([first, image.gather(axis, index.expand(wanted)), last], axis)


def is_merged(grid: Grid) -> bool:
    """Whether a grid's tokens are merged. A reference image that is not merged has (N,) in place of a grid."""
    return len(grid) > 1


def split(x: Tensor, lengths: list[int]) -> list[Tensor]:
    """Split x, (B, T, C), into parts of `lengths` tokens."""
    return [x] if len(lengths) == 1 else list(x.split(lengths, 1))


def joined(parts: list[Tensor]) -> Tensor:
    """Reverse `split`."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
