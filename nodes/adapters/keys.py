"""Keys and values on fewer tokens: every query, norm and feed-forward runs on all of them, and nothing is restored.

A block's self-attention looks at the keys and values of destinations in place of all, taken after norm and rotation,
see `looks`. Not at means of what they stand for: these are like no key that the model knows, and pictures were twice as
far off with them (docs/fidelity-trials.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...toma_core import Evaluation, MergePlan
from ...toma_core.config import Granularity
from ...toma_core.merge import pick
from ...toma_core.windows import Grid
from .chain import Link
from .hooks import Hook, HookPair, compiled_here, eager, outside_graph
from .looks import Look, flat, like, looking
from .port import Given

UNSERVED = "another node's attention takes no fewer keys"
COMPILED = "keys_only does not go with torch.compile in this kind of block"


class KeysLink(Hook):
    """Stands in for a block whose self-attention is to look at fewer keys and values.

    link: the block's own hook, which knows where its tokens are and why it may have to stay whole. attention: what the
    block calls its self-attention, if that is a module of its own; else the block's options are told. ComfyUI's
    torch.compile does not look whether there is an override in them, and would run what it traced with one where there
    is none: a module can be kept out of the graph, a whole block stays as it is.
    """

    def __init__(self, link: Link, attention: str = "") -> None:
        self.link, self.port, self.attention, self.inner = link, link.port, attention, KeysAttention()

    def hooks(self, grid: Grid, evaluation: Evaluation) -> Iterator[HookPair]:
        """The hooks to install for an evaluation in which the block sees a token grid like this."""
        link, share = self.link, evaluation.run.config.share
        work = link.work, Granularity.BLOCK
        link.place.begin((grid,), link.scopes[share], [link.name], work, evaluation.of(link.name))
        yield self.link.module, self
        if self.attention:
            yield getattr(self.link.module, self.attention), self.inner

    def release(self) -> None:
        self.link.release()

    @outside_graph
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        place, port, inner = self.link.place, self.port, self.inner
        given = port.given(args, kwargs)
        port.note(given)
        reason = self.link.reason(given) or (COMPILED if not self.attention and compiled_here() else "")
        x, before = given[port.tokens], port.before(given, place.image) or 0
        plan = place.plan_for(x[:, before : before + place.image], reason)
        if plan is None or place.evaluation is None:
            return self.original(*args, **kwargs)
        change, masked = partial(fewer, plan), partial(port.mask_moved, gone=plan.tokens - plan.kept)
        inner.asked = partial(looking, change=change, attended=port.attended(given, before), masked=masked)
        try:
            out = self.original(*args, **(kwargs if self.attention else inner.told(kwargs)))
            served = inner.look is not None and inner.look.served
        finally:
            inner.asked = inner.look = None
        stats, name = place.evaluation.run.stats, self.link.name
        if served:
            stats.merged(name)
        else:
            stats.whole(name, UNSERVED)
        return out


class KeysAttention(Hook):
    """Stands in for the self-attention of a block, outside of graphs.

    asked: `looking` for the call in progress of the block, None where it stays whole; look: what came of it.
    """

    asked: Callable[[Given], tuple[Given, Look | None]] | None = None
    look: Look | None = None

    def told(self, given: Given) -> Given:
        """The arguments with which it looks at fewer keys and values."""
        if self.asked is not None:
            given, self.look = self.asked(given)
        return given

    @eager
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.original(*args, **self.told(kwargs))


def fewer(plan: MergePlan, t: Tensor, _: str, before: int, axis: int) -> Tensor:
    """Keys or values, see `looks.flat`, with D tokens of the image in place of N."""
    rows, after = flat(t, axis), before + plan.tokens
    few = pick(rows[:, before:after], plan)
    if rows.shape[1] > plan.tokens:
        few = torch.cat([rows[:, :before], few, rows[:, after:]], 1)
    return like(few, t, axis)
