"""Chains of blocks on merged tokens: enter before the first block, leave after the last, for every family.

    x = place.enter(x)        reduce
    x = block(x) ...          the blocks themselves, with positions and places told anew
    y = place.leave(x)        restore

Outside of torch.compile a place decides when it sees the tokens. Inside a graph only plain numbers can be told, which
torch.compile guards on: they are made ready before the model runs, and the same work is done by operators.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...toma_core import Evaluation, MergePlan, plan_for, reduce, restore
from ...toma_core.config import Share
from ...toma_core.detail import Detail
from ...toma_core.payoff import Block
from .graphs import numbered, operators
from .hooks import Hook, eager, outside_graph
from .port import CHANGED, Given, Port
from .rope import merged_rows


class Place:
    """Where a chain of blocks begins to run on merged tokens, and ends. Made once for a block, filled for an
    evaluation.

    tokens, kept: N and D of one image, what a graph is made for. Equal where the chain runs whole to keep its detail;
    kept is 0 where the graph has to be left, and the chain decides when it sees the tokens.
    held: from the first block to the last, what `restore` needs beside their output: reduced and x of the image; None
    where the chain runs whole. traced: the same for all tokens, where it began inside a graph; rows: their positions.
    """

    grid: tuple[int, int]
    scope: Hashable
    names: Sequence[str]
    work: Block
    evaluation: Evaluation | None
    plan: MergePlan
    detail: Detail | None
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
        for name in ("plan", "detail"):
            vars(self).pop(name, None)

    def begin(
        self, grid: tuple[int, int], scope: Hashable, names: Sequence[str], work: Block, evaluation: Evaluation
    ) -> None:
        """An evaluation begins, in which these blocks stay merged on a token grid like this."""
        self.grid, self.scope, self.names, self.work, self.evaluation = grid, scope, names, work, evaluation

    def prepare(self, latent: Tensor, module: nn.Module, width: int) -> bool:
        """Get ready for a graph, in which blocks like `module` see (B, N, width), 0 if unknown, of a latent of B.
        False if they stay whole, which is then noted in the run's stats."""
        evaluation = self.evaluation
        assert evaluation is not None  # noqa: S101 - for mypy: it has begun
        run, decision, images = evaluation.run, evaluation.decision, latent.shape[0]
        if not width or images % len(evaluation.copies):
            return True  # for the chain to decide
        weight = next(module.parameters(), latent)
        dtype = weight.dtype if weight.dtype.is_floating_point and weight.dtype.itemsize > 1 else torch.bfloat16
        tokens = self.grid[0] * self.grid[1]
        reason = evaluation.obstacle(latent.new_empty((), dtype=dtype).expand(images, tokens, width), self.work)
        if reason:
            self._whole(reason)
            return False
        self.tokens = tokens
        self.kept = tokens if decision.keeps_detail else run.kept(self.grid, decision, latent.device)
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

    # --- what is done, inside and outside ----------------------------------------------------------------------------

    def reduced(self, image: Tensor) -> Tensor:
        """`reduce` for (B, N, C); the outcome is noted in the run's stats."""
        assert self.evaluation is not None  # noqa: S101 - for mypy: it has begun
        self.plan = self.evaluation.plan(image, self.grid, self.scope)
        return self._reduced(image)

    def _reduced(self, image: Tensor) -> Tensor:
        evaluation = self.evaluation
        assert evaluation is not None  # noqa: S101 - for mypy: it has begun
        self.detail = evaluation.detail("-".join(dict.fromkeys((self.names[0], self.names[-1]))), image)
        if not evaluation.decision.keeps_detail:
            for name in self.names:
                evaluation.run.stats.merged(name)
        return self.port.limited(reduce(image, self.plan, self.detail))

    def restored(self, out: Tensor, reduced: Tensor, image: Tensor) -> Tensor:
        """`restore` for (B, D, C), (B, D, C) and (B, N, C)."""
        return self.port.limited(restore(out, reduced, image, self.plan, self.detail))

    def turned(self, rows: Tensor, before: int) -> Tensor:
        """`merged_rows` for the positions of [before | N | rest]."""
        return merged_rows(rows, self.plan, before, self.port.axis)

    # --- outside of graphs --------------------------------------------------------------------------------------------

    @eager
    def open(self, x: Tensor, before: int, reason: str) -> Tensor:
        """[before | N | rest] -> [before | D | rest], or x where there is a reason to leave the chain whole; the
        outcome is noted in the run's stats."""
        evaluation = self.evaluation
        if evaluation is None:
            return x
        after = before + self.grid[0] * self.grid[1]
        image = x[:, before:after]
        plan = self.plan_for(image, reason)
        if plan is None:
            return x
        self.plan = plan
        reduced = self._reduced(image)
        self.held = reduced, image
        if x.shape[1] > image.shape[1]:
            return torch.cat([x[:, :before], reduced, x[:, after:]], 1)
        # What the block was given stays for the difference.
        return reduced.clone() if self.port.writes else reduced

    @eager
    def plan_for(self, image: Tensor, reason: str, part: str = "") -> MergePlan | None:
        """The plan for the (B, N, C) tokens of the image, or None to leave the chain whole, or a part of its block."""
        evaluation = self.evaluation
        if evaluation is None:
            return None
        plan = None
        if not reason and (image.shape[1] != self.grid[0] * self.grid[1] or len(image) % len(evaluation.copies)):
            reason = CHANGED
        elif not reason:
            plan = plan_for(image, self.grid, self.scope, evaluation, self.work)
            reason, part = "" if plan else evaluation.obstacle(image, self.work), ""
        if plan is None:
            self._whole(reason, part)
        return plan

    def _whole(self, reason: str, part: str = "") -> None:
        assert self.evaluation is not None  # noqa: S101 - for mypy: it has begun
        for name in self.names:
            self.evaluation.run.stats.whole(name + part, reason)

    @eager
    def close(self, out: Tensor, before: int) -> Tensor:
        """What the chain's last block gives, for all tokens again."""
        assert self.held is not None  # noqa: S101 - for mypy: it has been entered
        held, self.held = self.held, None
        after = before + held[0].shape[1]
        restored = self.restored(out[:, before:after], *held)
        if out.shape[1] == held[0].shape[1]:
            return restored
        return torch.cat([out[:, :before], restored, out[:, after:]], 1)


class Positions:
    """Positions of merged tokens, shared by the blocks of an evaluation that share a plan."""

    def __init__(self) -> None:
        self.held: tuple[Tensor, MergePlan, Tensor] | None = None

    @eager
    def of(self, rows: Any, place: Place, before: int) -> Any:
        """The positions of the tokens inside the chain, from those of all; the same where it runs whole to keep its
        detail, or where there are none."""
        plan, detail = place.plan, place.detail
        if rows is None or (detail is not None and detail.kept is None):
            return rows
        if self.held is None or self.held[0] is not rows or self.held[1] is not plan:
            self.held = rows, plan, place.turned(rows, before)
        return self.held[2]


class Link(Hook):
    """Stands in for a block that may run on merged tokens, alone or in a chain with those after it.

    names as in the report. scopes: what shares a plan with it. begin: the place where its chain begins, its own or that
    of a block before; last: whether the chain ends with it. Both are told for an evaluation, by plain values that
    torch.compile guards on.
    """

    # Whether the chain may begin inside a graph of torch.compile.
    in_graphs = True

    def __init__(
        self, module: nn.Module, name: str, port: Port, work: Block, scopes: Mapping[Share, Hashable], shared: Positions
    ) -> None:
        self.module, self.name, self.port, self.work, self.scopes = module, name, port, work, scopes
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
                out = self._called(len(args), merged)
                return self._with(out, self.begin.leave(self._tokens(out), before)) if self.last else out
        return self.outside(*args, **kwargs)

    def _in_graph(self, given: Given) -> tuple[Given | None, int]:
        """The arguments on merged tokens, None if the chain is not merged inside the graph being traced; and how many
        tokens come before the image."""
        place, port = self.begin, self.port
        before = port.before(given, place.tokens)
        if before is None:
            return None, 0
        x, rows = given[port.tokens], given.get(port.rows)
        if place is self.place and place.begins(x, before) and not port.obstacle(given, place.tokens):
            x = place.enter(x, before)
            if rows is not None:
                place.turn(rows, before + port.above(given))
        if place.traced is None:
            return None, before
        return self._moved(given, x, place.rows, before + place.tokens, place.tokens, place.kept), before

    @outside_graph
    def outside(self, *args: Any, **kwargs: Any) -> Any:
        """The block where the chain decides when it sees the tokens."""
        place, port = self.begin, self.port
        given = port.given(args, kwargs)
        port.note(given)
        x, reason = given[port.tokens], self.reason(given) if place is self.place else ""
        image = place.grid[0] * place.grid[1]
        before = port.before(given, image)
        if place is self.place:
            x = place.open(x, before or 0, reason)
        if place.held is None or before is None:
            return self._called(len(args), given)
        rows = given.get(port.rows)
        turned = self.positions.of(rows, place, before + port.above(given))
        kept = place.held[0].shape[1]
        out = self._called(len(args), self._moved(given, x, turned, before + image, image, kept))
        return self._with(out, place.close(self._tokens(out), before)) if self.last else out

    def reason(self, given: Given) -> str:
        """Why the chain that begins here is left whole, see `Port.obstacle`. The grid is taken as it is told."""
        place, port = self.place, self.port
        grid = port.grid(given, place.grid)
        if grid is None:
            return "ComfyUI does not tell the size of the grid"
        place.grid = grid
        return port.obstacle(given, grid[0] * grid[1])

    def _moved(self, given: Given, x: Tensor, rows: Any, end: int, tokens: int, kept: int) -> Given:
        """The arguments for merged tokens x. end: of the image before merging, in the argument that carries it."""
        port = self.port
        moved = {**given, port.tokens: x}
        if rows is not None:
            moved[port.rows] = rows
        return moved if kept == tokens else {**moved, **port.moved(given, end, tokens, kept)}

    def _called(self, by_place: int, given: Given) -> Any:
        """The block itself, told by place what its caller told by place."""
        places = self.port.places[:by_place]
        return self.original(*[given[n] for n in places], **{n: v for n, v in given.items() if n not in places})

    def _tokens(self, out: Any) -> Tensor:
        return out if self.port.output is None else out[self.port.output]

    def _with(self, out: Any, x: Tensor) -> Any:
        """What the block gave, with x in place of its tokens."""
        if self.port.output is None:
            return x
        return tuple([x if n == self.port.output else part for n, part in enumerate(out)])
