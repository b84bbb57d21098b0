"""Replace a module's `forward` for the duration of one model evaluation, in the same way for every model.

ComfyUI's patches do not suffice. The UNet has no patch around the feed-forward or a block. A block of Flux can have
only one patch, which is often another pack's. If this pack merged in patches, other packs' patches could get merged
tokens. A replaced `forward` lies inside all patches, so patches get all tokens. The model is unchanged between
evaluations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ... import toma_core

# Keys of transformer_options that are removed before the model is called. Compiled code would read each key that was
# present during tracing, even in later runs without ToMA.
ATTACHMENT = "toma"
SAMPLING = "toma_sampling"
GRAPHS = "toma_graphs"
RIDING = (ATTACHMENT, SAMPLING, GRAPHS)


class Hook:
    """Stands in for a module's `forward`. A hook lives as long as its model, because torch.compile guards on the
    identity of traced objects, but keeps a run's state only during one evaluation."""

    original: Callable[..., Any]  # the `forward` that an installed hook replaces

    def release(self) -> None:
        """Drop the state of an evaluation. Called when the hook is removed, also after an error."""


HookPair = tuple[nn.Module, Hook]


@contextmanager
def installed(hooks: Iterable[HookPair]) -> Iterator[list[Hook]]:
    """Install every hook, yield the hooks, and afterwards restore each `forward` exactly."""
    replaced = []
    try:
        for module, hook in hooks:
            replaced.append((module, hook, module.__dict__.get("forward")))
            hook.original = module.forward
            module.__dict__["forward"] = hook
        yield [hook for _, hook, _ in replaced]
    finally:
        for module, hook, before in reversed(replaced):
            if before is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = before
            del hook.original
            hook.release()


# Merging depends on content, step and shape, and tracing would freeze these in the graph. `outside_graph` keeps a hook
# out of graphs, but not the block that the hook calls. `eager` keeps out a function and all that the function calls.
outside_graph = torch.compiler.disable(recursive=False)
eager = torch.compiler.disable
merge = eager(toma_core.merge)
unmerge = eager(toma_core.unmerge)
