"""One mechanism for every model: a module's `forward` is replaced for the duration of one model evaluation.

Why not ComfyUI's patch lists: the UNet has none around the feed-forward or a whole block, Flux's are single slots that
other packs own, and both show patches the tokens we would have merged. A swapped `forward` sits inside all of them,
so every other patch goes on seeing whole tokens, and the model is untouched between evaluations, however a run ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ... import toma_core

# Where the pieces ride in ComfyUI's transformer_options, as far as the model, which is not shown them: torch.compile's
# code for it reads every key that was there when it was traced, also in later runs without ToMA.
ATTACHMENT = "toma"
SAMPLING = "toma_sampling"
GRAPHS = "toma_graphs"
RIDING = (ATTACHMENT, SAMPLING, GRAPHS)


class Hook:
    """Stands in for a module's `forward`; `original` is what it replaces, while it is installed.

    Hooks hold no run state longer than one evaluation. One hook object per place in a model is kept for the model's
    life, because torch.compile guards on the identity of what it traced.
    """

    original: Callable[..., Any]

    def release(self) -> None:
        """Called when the hook is taken out, also after an error: drop what the evaluation left behind."""


HookPair = tuple[nn.Module, Hook]


@contextmanager
def installed(hooks: Iterable[HookPair]) -> Iterator[None]:
    """Put every hook in its module's place, and put back exactly what was there."""
    missing = object()
    replaced = []
    try:
        for module, hook in hooks:
            replaced.append((module, hook, module.__dict__.get("forward", missing)))
            hook.original = module.forward
            module.__dict__["forward"] = hook
        yield
    finally:
        for module, hook, before in reversed(replaced):
            if before is missing:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = before
            del hook.original
            hook.release()


# Merging chooses by content, step and shape: inside a traced graph those choices would be frozen at the first trace.
# The wrapped block itself may still be compiled, so hooks are kept out of graphs alone, and what they call to plan and
# to merge with everything below it.
outside_graph = torch.compiler.disable(recursive=False)
eager = torch.compiler.disable
merge, unmerge = eager(toma_core.merge), eager(toma_core.unmerge)
