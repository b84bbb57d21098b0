"""Names for torch operators."""

from __future__ import annotations

import itertools

import torch


def free_namespace(name: str, operator: str) -> str:
    """The first of `name`, `name`2, `name`3, ... that has no such operator yet.

    Operator names are global to a process, and the pack may be loaded twice in one: under the path that ComfyUI names
    it by, and as plain `toma_core`. Each copy registers its own operators.
    """
    names = itertools.chain([name], (f"{name}{n}" for n in itertools.count(2)))
    return next(free for free in names if not hasattr(getattr(torch.ops, free), operator))
