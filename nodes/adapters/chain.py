"""Chains of blocks on merged tokens: enter before the first block, leave after the last, for every family.

    x = place.enter(x)        reduce
    x = block(x) ...          the blocks themselves, with positions and places told anew
    y = place.leave(x)        restore

Outside of torch.compile a place decides when it sees the tokens. Inside a graph only plain numbers can be told, which
torch.compile guards on: they are made ready before the model runs, and the same work is done by operators.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from ...toma_core import Evaluation, MergePlan, reduce, restore
from ...toma_core.config import Granularity
from ...toma_core.detail import Detail
from ...toma_core.payoff import Block
from ...toma_core.reasons import Message, Reason
from ...toma_core.windows import Grid, has_frames
from .graphs import numbered, operators
from .hooks import Hook, eager, outside_graph, unmerge
from .looks import flat, like, looking
from .port import Cuts, Given, Port
from .rope import merged_rows


class Place:
    """Where a chain of blocks begins to run on merged tokens, and ends. Made once for a block, filled for an
    evaluation.

    grids: of the image, and of references that follow it and are merged too, each by a plan of its own.
    work: what a block costs, and around what it is merged: more blocks than one, one, or a module of it.
    lengths: (N, D) of each; as long as each other where the chain runs whole to keep its detail.
    tokens, kept: all of them together before and after, what a graph is made for; 0 where the graph has to be left, and
    the chain decides when it sees the tokens.
    looks: whether its blocks look at all tokens, see `attended`; looked: what of them has done so.
    held: from the first block to the last, what `restore` needs beside their output: reduced and x of the images; None
    where the chain runs whole. traced: the same for all tokens, where it began inside a graph; rows: their positions.
    """

    grids: tuple[Grid, ...]
    scope: Hashable
    names: Sequence[str]
    work: tuple[Block, Granularity]
    evaluation: Evaluation | None
    plans: tuple[MergePlan | None, ...]
    details: tuple[Detail | None, ...]
    lengths: tuple[tuple[int, int], ...]
    looks: bool
    looked: set[str]
    held: tuple[Tensor, Tensor] | None
    traced: tuple[Tensor, Tensor] | None
    rows: Tensor | None

    def __init__(self, port: Port) -> None:
        self.port, self.number = port, numbered(self)
        self.release()

    def release(self) -> None:
        """Drop what the evaluation left behind."""
        self.tokens = self.kept = 0
        self.evaluation = self.held = self.traced = self.rows = None
        self.plans = self.details = self.lengths = ()
        self.looks, self.looked = False, set()

    def begin(
        self,
        grids: tuple[Grid, ...],
        scope: Hashable,
        names: Sequence[str],
        work: tuple[Block, Granularity],
        evaluation: Evaluation,
    ) -> None:
        """An evaluation begins, in which these blocks stay merged on token grids like these."""
        self.grids, self.scope, self.names, self.work, self.evaluation = grids, scope, names, work, evaluation
        self.looks = evaluation.all_keys

    @property
    def image(self) -> int:
        """Tokens of the image before merging."""
        return prod(self.grids[0])

    @property
    def references(self) -> int:
        """Tokens of the references that are merged too, before."""
        return sum(map(prod, self.grids[1:]))

    def prepare(self, latent: Tensor, module: nn.Module, width: int) -> bool:
        """Get ready for a graph, in which blocks like `module` see (B, N, width), 0 if unknown, of a latent of B.
        False if they stay whole, which is then noted in the run's stats."""
        evaluation = self.evaluation
        assert evaluation is not None  # noqa: S101 - for mypy: it has begun
        run, images = evaluation.run, latent.shape[0]
        if not width or images % len(evaluation.copies):
            return True  # for the chain to decide
        weight = next(module.parameters(), latent)
        dtype = weight.dtype if weight.dtype.is_floating_point and weight.dtype.itemsize > 1 else torch.bfloat16
        reason = evaluation.obstacle(latent.new_empty((), dtype=dtype).expand(images, self.image, width), *self.work)
        if reason:
            self._not_merged(reason)
            return False
        tokens = list(map(prod, self.grids))
        kept = [run.kept(self.grids[0], evaluation.step_plan, latent.device)]
        kept += [
            run.kept(grid, evaluation.lasting, latent.device) if is_merged(grid) else prod(grid)
            for grid in self.grids[1:]
        ]
        if evaluation.refreshes:
            kept = tokens
        self.lengths = tuple(zip(tokens, kept, strict=True))
        self.tokens, self.kept = sum(tokens), sum(kept)
        return True

    def begins(self, x: Tensor, before: int = 0) -> bool:
        """Whether a chain whose first block gets [before | N | rest] is merged inside the graph being traced."""
        inside = self.kept > 0 and torch.compiler.is_compiling()
        return inside and x.ndim == 3 and x.shape[1] >= before + self.tokens

    # --- inside a graph ---------------------------------------------------------------------------------------------

    def enter(self, x: Tensor, before: int = 0) -> Tensor:
        """[before | N | rest] -> [before | D | rest]; of what is held no block may write into."""
        reduced: Tensor = operators.enter(x, self.number, before, self.tokens, self.kept)
        self.traced = reduced, x
        return reduced.clone() if self.port.writes else reduced

    def turn(self, rows: Tensor, before: int) -> None:
        """Make the positions of what `enter` gave from those of [before | N | rest]."""
        assert self.traced is not None  # noqa: S101 - for mypy: it has been entered
        whole, place = self.kept == self.tokens, (self.number, before, self.tokens, self.kept, self.port.axis)
        self.rows = rows if whole else operators.turn(rows, self.traced[0], *place)

    def leave(self, out: Tensor, before: int = 0) -> Tensor:
        """What the chain's last block gives, for all tokens again."""
        assert self.traced is not None  # noqa: S101 - for mypy: it has been entered
        reduced, x = self.traced
        self.traced = self.rows = None
        restored: Tensor = operators.leave(out, reduced, x, self.number, before, self.tokens, self.kept)
        return restored

    def look(self, block: str, t: Tensor, what: str, before: int, axis: int) -> Tensor:
        """`attended`, as an operator."""
        changed: Tensor = operators.look(t, f"{block} {what}", self.number, before, self.tokens, self.kept, axis)
        return changed

    # --- what is done, inside and outside ----------------------------------------------------------------------------

    def reduced(self, x: Tensor) -> Tensor:
        """`reduce` for the (B, N, C) tokens of all grids; the outcome is noted in the run's stats."""
        assert self.evaluation is not None  # noqa: S101 - for mypy: it has begun
        image = x[:, : self.image] if len(self.grids) > 1 else x
        return self._reduced(x, self.evaluation.plan(image, self.grids[0], self.scope))

    def _reduced(self, x: Tensor, plan: MergePlan | None) -> Tensor:
        """plan: of the image, None where it is only kept."""
        evaluation = self.evaluation
        assert evaluation is not None  # noqa: S101 - for mypy: it has begun
        image, *references = self._pieces(x, list(map(prod, self.grids)))
        plans: list[MergePlan | None] = [plan]
        for n, (piece, grid) in enumerate(zip(references, self.grids[1:], strict=True)):
            plans.append(evaluation.lasting_plan(piece, grid, (self.scope, n)) if is_merged(grid) else None)
        name = "-".join(dict.fromkeys((self.names[0], self.names[-1])))
        details = [evaluation.detail(name, image)]
        details += [
            evaluation.detail(f"{name} reference {n}", piece) if is_merged(grid) else None
            for n, (piece, grid) in enumerate(zip(references, self.grids[1:], strict=True))
        ]
        self.plans, self.details = tuple(plans), tuple(details)
        if not evaluation.refreshes:
            for block in self.names:
                evaluation.run.stats.merged(block)
        pieces = list(map(reduce, (image, *references), plans, details))
        whole = image, *references
        self.lengths = tuple((one.shape[1], piece.shape[1]) for one, piece in zip(whole, pieces, strict=True))
        return self.port.limited(_joined(pieces))

    def restored(self, out: Tensor, reduced: Tensor, x: Tensor) -> Tensor:
        """`restore` for the (B, D, C), (B, D, C) and (B, N, C) tokens of all grids."""
        kept, tokens = [kept for _, kept in self.lengths], [tokens for tokens, _ in self.lengths]
        pieces = self._pieces(out, kept), self._pieces(reduced, kept), self._pieces(x, tokens)
        looked = self.looks and self._have_looked()
        return self.port.limited(_joined(list(map(restore, *pieces, self.plans, self.details, [looked] * len(kept)))))

    def _have_looked(self) -> bool:
        """Whether the attention of all of these blocks has asked what to look at; noted in the run."""
        assert self.evaluation is not None  # noqa: S101 - for mypy: it has begun
        run, looked = self.evaluation.run, self.looked.issuperset(self.names)
        run.served, run.unserved = run.served or bool(self.looked), run.unserved or not looked
        self.looked.clear()
        return looked

    def attended(self, block: str, t: Tensor, what: str, before: int, axis: int, always: bool = False) -> Tensor:
        """What destinations of a block look at: keys or values of all tokens in the place of their own,
        (B, before + D + rest, C) -> (B, before + N + rest, C), or (B, heads, T, C) with axis 2.

        A full step keeps them, a merged one moves on what is kept as its destinations have moved. The same where
        nothing is kept that fits; always: for all tokens then too, each what its destination has.
        """
        evaluation = self.evaluation
        assert evaluation is not None  # noqa: S101 - for mypy: it has begun
        lengths, packs = [kept for _, kept in self.lengths], evaluation.run.packs
        rows = flat(t.narrow(axis, before, sum(lengths)), axis)
        own = packs or (rows.untyped_storage()._cdata != t.untyped_storage()._cdata and len(lengths) == 1)
        pieces, seen = self._pieces(rows, lengths), []
        for n, (piece, (tokens, _), plan) in enumerate(zip(pieces, self.lengths, self.plans, strict=True)):
            if not is_merged(self.grids[n]):
                seen.append(piece)
                continue
            shape = piece[:, :1].expand(-1, tokens, -1)
            detail = evaluation.detail(f"{block} {what} {n}", shape, packs)
            if detail is not None and detail.kept is None:
                # A view would change with what the block makes of it.
                detail.keep(piece if own else piece.clone(memory_format=torch.contiguous_format))
            elif detail is not None and plan is not None:
                seen.append(detail.moved_on(piece, plan))
            elif always and plan is not None:
                seen.append(unmerge(piece, plan))
            if detail is not None:
                self.looked.add(block)
        if len(seen) < len(pieces):
            return t
        images, after = like(_joined(seen), t, axis), before + sum(lengths)
        if t.shape[axis] == sum(lengths):
            return images if packs else images.clone()  # what is kept is nobody's to write into
        return torch.cat([t.narrow(axis, 0, before), images, t.narrow(axis, after, t.shape[axis] - after)], axis)

    @staticmethod
    def _pieces(x: Tensor, lengths: list[int]) -> list[Tensor]:
        return [x] if len(lengths) == 1 else list(x.split(lengths, 1))

    def turned(self, rows: Tensor, before: int) -> Tensor:
        """`merged_rows` for the positions of [before | N | rest]."""
        places, start = list[Tensor](), 0
        for plan, (tokens, _) in zip(self.plans, self.lengths, strict=True):
            if plan is None:
                each = torch.arange(tokens, device=rows.device)[None].expand(len(places[0]), -1)
            else:
                each = plan.destinations
            places.append(each + start if start else each)
            start += tokens
        return merged_rows(rows, _joined(places), before, start, self.port.axis)

    # --- outside of graphs --------------------------------------------------------------------------------------------

    @eager
    def start(self, x: Tensor, before: int, reason: Message | None) -> Tensor:
        """[before | N | rest] -> [before | D | rest], or x where there is a reason to leave the chain whole; the
        outcome is noted in the run's stats."""
        self.held = None  # of a call that broke off, which another pack makes again with fewer images
        image = x[:, before : before + self.image]
        if self.evaluation is None or not self.merges(image, reason):
            return x
        after = before + self.image + self.references
        images, plan = x[:, before:after], self._plan(image)
        if self.scope in self.evaluation.run.unplanned:
            return x
        reduced = self._reduced(images, plan)
        self.held = reduced, images
        if x.shape[1] > images.shape[1]:
            return torch.cat([x[:, :before], reduced, x[:, after:]], 1)
        # What the block was given stays for the difference.
        return reduced.clone() if self.port.writes else reduced

    @eager
    def plan_for(self, image: Tensor, reason: Message | None, part: str = "") -> MergePlan | None:
        """The plan for the (B, N, C) tokens of the image, or None to leave the chain whole, or a part of its block."""
        if self.evaluation is None or not self.merges(image, reason, part):
            return None
        return self._plan(image)

    def _plan(self, image: Tensor) -> MergePlan | None:
        """The image's plan; None also where there is no memory for that of a video: blocks that would share it are then
        whole, in calls for other conditions too, and so are all later steps. For a picture it is the model's memory
        that is short: that ends the run, as without ToMA, and does not make another picture of it."""
        assert self.evaluation is not None  # noqa: S101 - for mypy: it has begun
        run, grid = self.evaluation.run, self.grids[0]
        if self.scope not in run.unplanned:
            try:
                return self.evaluation.plan(image, grid, self.scope)
            except torch.OutOfMemoryError:
                if not has_frames(grid):
                    raise
                run.unplanned.add(self.scope)
        self._not_merged(Reason.OUT_OF_MEMORY_PLAN())
        return None

    def merges(self, image: Tensor, reason: Message | None, part: str = "") -> bool:
        """Whether the (B, N, C) tokens of the image are merged, if nothing speaks against it; else it is noted."""
        evaluation = self.evaluation
        assert evaluation is not None  # noqa: S101 - for mypy: it has begun
        if not reason and (image.shape[1] != self.image or len(image) % len(evaluation.copies)):
            reason = Reason.TOKENS_CHANGED()
        elif not reason:
            reason, part = evaluation.obstacle(image, *self.work), ""
        if reason is not None:
            self._not_merged(reason, part)
        return reason is None

    def _not_merged(self, reason: Message, part: str = "") -> None:
        assert self.evaluation is not None  # noqa: S101 - for mypy: it has begun
        for name in self.names:
            self.evaluation.run.stats.not_merged(name + part, reason)

    @eager
    def finish(self, out: Tensor, before: int) -> Tensor:
        """What the chain's last block gives, for all tokens again."""
        assert self.held is not None  # noqa: S101 - for mypy: it has been entered
        held, self.held = self.held, None
        after = before + held[0].shape[1]
        restored = self.restored(out[:, before:after], *held)
        if out.shape[1] == held[0].shape[1]:
            return restored
        return torch.cat([out[:, :before], restored, out[:, after:]], 1)


def is_merged(grid: Grid) -> bool:
    """Whether tokens of this grid are merged: those of a reference that is not are told as one row, (N,)."""
    return len(grid) > 1


def _joined(pieces: list[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)


def _same(plans: Sequence[object], others: Sequence[object]) -> bool:
    return len(plans) == len(others) and all(a is b for a, b in zip(plans, others, strict=True))


class Positions:
    """Positions of merged tokens, shared by the blocks of an evaluation that share plans."""

    def __init__(self) -> None:
        self.held: tuple[Tensor, tuple[MergePlan | None, ...], Tensor] | None = None

    @eager
    def of(self, rows: Any, place: Place, before: int) -> Any:
        """The positions of the tokens inside the chain, from those of all; the same where it runs whole to keep its
        detail, or where there are none."""
        plans, detail = place.plans, place.details[0]
        if rows is None or plans[0] is None or (detail is not None and detail.kept is None):
            return rows
        if self.held is None or self.held[0] is not rows or not _same(self.held[1], plans):
            self.held = rows, plans, place.turned(rows, before)
        return self.held[2]


class Link(Hook):
    """Stands in for a block that may run on merged tokens, alone or in a chain with those after it.

    names as in the report. scope: shared by blocks that share plans. begin: the place where its chain begins, its own
    or that of a block before; last: whether the chain ends with it. Both are told for an evaluation, by plain values
    that torch.compile guards on.
    """

    # Whether the chain may begin inside a graph of torch.compile, and whether references may be merged in it.
    in_graphs = merges_references = True

    def __init__(
        self, module: nn.Module, name: str, port: Port, work: Block, scope: Hashable, shared: Positions
    ) -> None:
        self.module, self.name, self.port, self.work, self.scope = module, name, port, work, scope
        self.positions = shared
        self.place = self.begin = Place(port)
        self.last = True

    def release(self) -> None:
        self.place.release()
        self.begin = self.place
        self.positions.held = None
        self.port.release()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Before anything else: a graph guards on what it reads.
        if self.begin.kept:
            given = self.port.given(args, kwargs)
            merged, before = self._in_graph(given)
            if merged is not None:
                if self.begin.looks:
                    merged = self._looking(merged, self.begin.look, before)
                out = self._called(len(args), merged)
                return self._with(out, self.begin.leave(self._tokens(out), before)) if self.last else out
        return self.outside(*args, **kwargs)

    def _in_graph(self, given: Given) -> tuple[Given | None, int]:
        """The arguments on merged tokens, None if the chain is not merged inside the graph being traced; and how many
        tokens come before the image."""
        place, port = self.begin, self.port
        before = port.before(given, place.image)
        if before is None:
            return None, 0
        x, rows = given[port.tokens], given.get(port.rows)
        if place is self.place and place.begins(x, before) and not port.obstacle(given, place.image, place.references):
            x = place.enter(x, before)
            if rows is not None:
                place.turn(rows, before + port.above(given))
        if place.traced is None:
            return None, before
        return self.moved(given, x, place.rows, before), before

    @outside_graph
    def outside(self, *args: Any, **kwargs: Any) -> Any:
        """The block where the chain decides when it sees the tokens."""
        place, port = self.begin, self.port
        given = port.given(args, kwargs)
        port.note(given)
        x, reason = given[port.tokens], self.reason(given) if place is self.place else None
        before = port.before(given, place.image)
        if place is self.place:
            x = place.start(x, before or 0, reason)
        if place.held is None or before is None:
            return self._called(len(args), given)
        rows = self.positions.of(given.get(port.rows), place, before + port.above(given))
        merged = self.moved(given, x, rows, before)
        if place.looks:
            merged = self._looking(merged, place.attended, before)
        out = self._called(len(args), merged)
        return self._with(out, place.finish(self._tokens(out), before)) if self.last else out

    def reason(self, given: Given) -> Message | None:
        """Return why the chain that begins here is not merged, see `Port.obstacle`. The grid is taken as it is told."""
        place, port = self.place, self.port
        grid = port.grid(given, place.grids[0])
        if grid is None:
            return Reason.UNKNOWN_GRID()
        # A ComfyUI that does not tell of references has them after the image all the same: they stay whole.
        place.grids = grid, *(place.grids[1:] if port.references(given) else ())
        return port.obstacle(given, place.image, place.references)

    def moved(self, given: Given, x: Tensor, rows: Any, before: int) -> Given:
        """The arguments for merged tokens x at positions `rows`. before: tokens before the image."""
        port, cuts = self.port, Cuts(before, self.begin.lengths)
        moved = {**given, port.tokens: x}
        if rows is not None:
            moved[port.rows] = rows
        return {**moved, **port.moved(given, cuts)} if cuts.gone else moved

    def _looking(self, given: Given, change: Callable[..., Tensor], before: int) -> Given:
        """The arguments with which the block looks at all tokens."""
        port, cuts = self.port, Cuts(before, self.begin.lengths)
        masked = partial(port.mask_moved, gone=-cuts.gone)
        return looking(given, partial(change, self.name), port.attended(given, before), masked)

    def _called(self, by_place: int, given: Given) -> Any:
        """The block itself, told by place what its caller told by place."""
        arguments = list(given.items())
        return self.original(*[value for _, value in arguments[:by_place]], **dict(arguments[by_place:]))

    def _tokens(self, out: Any) -> Tensor:
        return out if self.port.output is None else out[self.port.output]

    def _with(self, out: Any, x: Tensor) -> Any:
        """What the block gave, with x in place of its tokens."""
        if self.port.output is None:
            return x
        return tuple([x if n == self.port.output else part for n, part in enumerate(out)])
