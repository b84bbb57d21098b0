"""Merging inside the graphs of torch.compile, by operators that the compiler takes as they are.

Merging chooses by content, step and run, and a traced graph would freeze those choices. Left out of the graph, they
break it: around every stack of a UNet, in the middle of the loops over its blocks, so that each block becomes a graph
of its own and most of what compiling gains is lost to their guards. So a graph holds operators that know only a place
in the model, by number, and their shapes; what they do is looked up when they run.

Only what has the same shape at every merged step can be told to a graph. A hook tells it through plain numbers in its
`Place`, which torch.compile guards on.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from ...toma_core import Evaluation, MergePlan, reduce, restore
from ...toma_core.detail import Detail
from ...toma_core.kernels.namespace import free_namespace
from ...toma_core.payoff import UNET_BLOCK, Block

_MODES = (None, "default", "max-autotune-no-cudagraphs")


def compiled(model_options: dict[str, Any]) -> bool:
    """Whether ComfyUI was told to compile the model with Inductor. Recorded CUDA graphs would replay what the operators
    did when they were recorded: there, and where nobody knows, merging stays outside."""
    told = model_options.get("torch_compile_kwargs") or {}
    options = told.get("options") or {}
    return told.get("backend") == "inductor" and told.get("mode") in _MODES and not options.get("triton.cudagraphs")


class Place:
    """Where a chain of blocks begins to run on merged tokens, and ends.

    tokens, kept: N and D of one image, what a graph is made for. Equal where the chain runs whole to keep its detail;
    kept is 0 where the graph has to be left for the hook to decide.
    held: between the first block and the last, what `restore` needs beside their output: reduced and x.
    """

    grid: tuple[int, int]
    scope: Hashable
    names: Sequence[str]
    evaluation: Evaluation
    plan: MergePlan
    detail: Detail | None
    held: Any

    def __init__(self) -> None:
        self.number = next(_numbers)
        _places[self.number] = self
        self.release()

    def release(self) -> None:
        """Drop what the evaluation left behind."""
        self.tokens = self.kept = 0
        self.held = None
        for name in ("evaluation", "plan", "detail"):
            vars(self).pop(name, None)

    def prepare(
        self,
        x: Tensor,
        grid: tuple[int, int],
        scope: Hashable,
        names: Sequence[str],
        evaluation: Evaluation,
        module: nn.Module,
        width: int,
        work: Block = UNET_BLOCK,
    ) -> bool:
        """Get ready for an evaluation on the latent x of (B, C, H, W), in which these blocks, like `module`, see
        (B, H' * W', width), 0 if unknown. False if they stay whole, which is then noted in the run's stats."""
        run, decision, tokens, images = evaluation.run, evaluation.decision, grid[0] * grid[1], x.shape[0]
        if not width or images % len(evaluation.copies):
            return True  # for the hook to decide
        weight = next(module.parameters(), x)
        dtype = weight.dtype if weight.dtype.is_floating_point and weight.dtype.itemsize > 1 else torch.bfloat16
        reason = evaluation.obstacle(x.new_empty((), dtype=dtype).expand(images, tokens, width), work)
        if reason:
            for name in names:
                run.stats.whole(name, reason)
            return False
        self.grid, self.scope, self.names, self.evaluation = grid, scope, names, evaluation
        self.tokens = tokens
        self.kept = tokens if decision.keeps_detail else run.kept(grid, decision, x.device)
        return True

    def begins(self, x: Tensor, before: int = 0) -> bool:
        """Whether a chain whose first block gets [before | N | rest] is merged inside the graph being traced."""
        inside = self.kept > 0 and torch.compiler.is_compiling()
        return inside and x.ndim == 3 and x.shape[1] >= before + self.tokens

    def enter(self, x: Tensor, before: int = 0) -> Tensor:
        """[before | N | rest] -> [before | D | rest], which is held: a block must not write into it."""
        reduced: Tensor = operators.enter(x, self.number, before, self.tokens, self.kept)
        self.held = (reduced, x)
        return reduced

    def leave(self, out: Tensor, before: int = 0) -> Tensor:
        """What the chain's last block gives, for all tokens again."""
        reduced, x = self.held
        self.held = None
        restored: Tensor = operators.leave(out, reduced, x, self.number, before, self.tokens, self.kept)
        return restored

    def now_enter(self, image: Tensor) -> Tensor:
        """`reduce` for (B, N, C) when the graph runs; the outcome is noted in the run's stats."""
        evaluation = self.evaluation
        run = evaluation.run
        self.plan = evaluation.plan(image, self.grid, self.scope)
        self.detail = evaluation.detail("-".join(dict.fromkeys((self.names[0], self.names[-1]))), image)
        if not evaluation.decision.keeps_detail:
            for name in self.names:
                run.stats.merged(name)
        return reduce(image, self.plan, self.detail)

    def now_leave(self, out: Tensor, reduced: Tensor, image: Tensor) -> Tensor:
        """`restore` for (B, D, C), (B, D, C) and (B, N, C) when the graph runs."""
        return restore(out, reduced, image, self.plan, self.detail)


_numbers = itertools.count()
# Weakly: a place lives as long as its hook, which lives as long as the model.
_places: WeakValueDictionary[int, Any] = WeakValueDictionary()


def _around(x: Tensor, before: int, tokens: int, image: Tensor) -> Tensor:
    """x with the image in place of so many of its tokens. A new tensor: the graph may write into what it gave."""
    if x.shape[1] == tokens:
        own = image.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
        return image.contiguous() if own else image.clone(memory_format=torch.contiguous_format)
    return torch.cat([x[:, :before], image, x[:, before + tokens :]], 1)


def _enter(x: Tensor, place: int, before: int, tokens: int, kept: int) -> Tensor:
    return _around(x, before, tokens, _places[place].now_enter(x[:, before : before + tokens]))


def _leave(out: Tensor, reduced: Tensor, x: Tensor, place: int, before: int, tokens: int, kept: int) -> Tensor:
    merged, whole = slice(before, before + kept), slice(before, before + tokens)
    return _around(out, before, kept, _places[place].now_leave(out[:, merged], reduced[:, merged], x[:, whole]))


def _turn(pe: Tensor, reduced: Tensor, place: int, before: int, tokens: int, kept: int) -> Tensor:
    rows: Tensor = _places[place].now_turn(pe, before)
    return rows


_namespace = free_namespace("toma_graphs", "enter")
_library = torch.library.Library(_namespace, "FRAGMENT")
# Tensors come as eager code would lay them out, and a recorded CUDA graph has to stop at them.
_tags = tuple(
    getattr(torch.Tag, name) for name in ("needs_fixed_stride_order", "cudagraph_unsafe") if hasattr(torch.Tag, name)
)
_library.define("enter(Tensor x, int place, SymInt before, SymInt tokens, SymInt kept) -> Tensor", tags=_tags)
_library.define(
    "leave(Tensor out, Tensor reduced, Tensor x, int place, SymInt before, SymInt tokens, SymInt kept) -> Tensor",
    tags=_tags,
)
_library.define(
    "turn(Tensor pe, Tensor reduced, int place, SymInt before, SymInt tokens, SymInt kept) -> Tensor", tags=_tags
)
for _name, _function in (("enter", _enter), ("leave", _leave), ("turn", _turn)):
    _library.impl(_name, _function, "CompositeExplicitAutograd")
operators = getattr(torch.ops, _namespace)


@torch.library.register_fake(f"{_namespace}::enter", lib=_library)
def _fake_enter(x: Tensor, place: int, before: int, tokens: int, kept: int) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1] - tokens + kept, x.shape[2])


@torch.library.register_fake(f"{_namespace}::leave", lib=_library)
def _fake_leave(out: Tensor, reduced: Tensor, x: Tensor, place: int, before: int, tokens: int, kept: int) -> Tensor:
    return out.new_empty(out.shape[0], out.shape[1] - kept + tokens, out.shape[2])


@torch.library.register_fake(f"{_namespace}::turn", lib=_library)
def _fake_turn(pe: Tensor, reduced: Tensor, place: int, before: int, tokens: int, kept: int) -> Tensor:
    return pe.new_empty(reduced.shape[0], pe.shape[1], pe.shape[2] - tokens + kept, *pe.shape[3:])
