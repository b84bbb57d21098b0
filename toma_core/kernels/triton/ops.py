"""The kernels as torch operators, so that torch.compile and fake tensors know their shapes without running them.

Each copy of the pack in a process registers its own, see `free_namespace`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..namespace import free_namespace
from .agreement import agreement, parts_of
from .assign import merge_hard, unmerge_hard
from .launch import INTERPRETED
from .product import merge, reuse, unmerge
from .select import select_weigh, weigh

NAMESPACE = free_namespace("toma", "merge")
_library = torch.library.Library(NAMESPACE, "FRAGMENT")

_library.define(
    "select_weigh(Tensor x, Tensor source, Tensor? valid, Tensor? used, int K, float scale) -> (Tensor, Tensor, Tensor)"
)
_library.define(
    "weigh(Tensor x, Tensor picks, Tensor source, Tensor? valid, Tensor? used, float scale) -> (Tensor, Tensor)"
)
_library.define("merge(Tensor x, Tensor weights, Tensor source, Tensor? used, Tensor? expand, SymInt D) -> Tensor")
_library.define(
    "unmerge(Tensor y, Tensor? reduced, Tensor? x, Tensor weights, Tensor source, Tensor? valid, Tensor? expand,"
    " SymInt N) -> Tensor"
)
_library.define("agreement(Tensor out, Tensor reduced, Tensor kept, Tensor destinations) -> Tensor")
_library.define(
    "reuse(Tensor out, Tensor reduced, Tensor x, Tensor kept, Tensor sums, Tensor destinations, Tensor weights,"
    " Tensor source, Tensor? valid, Tensor? expand, float trust) -> Tensor"
)
_library.define(
    "merge_hard(Tensor x, Tensor owners, Tensor source, Tensor? valid, Tensor? used, Tensor? expand, int K, SymInt D)"
    " -> Tensor"
)
_library.define("unmerge_hard(Tensor y, Tensor? reduced, Tensor? x, Tensor owners) -> Tensor")
# On the CPU the kernels run in Triton's interpreter only.
for _key in ("CUDA", "CPU") if INTERPRETED else ("CUDA",):
    for _function in (select_weigh, weigh, merge, unmerge, agreement, reuse, merge_hard, unmerge_hard):
        _library.impl(_function.__name__, _function, _key)


def _fake_weigh(
    x: Tensor, picks: Tensor, source: Tensor, valid: Tensor | None, used: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    (batch, windows, K), slots = picks.shape, source.shape[1]
    return x.new_empty(batch, windows, K, slots), x.new_empty(batch, windows, slots, K)


def _fake_select_weigh(
    x: Tensor, source: Tensor, valid: Tensor | None, used: Tensor | None, K: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    picks = x.new_empty(x.shape[0], source.shape[0], K, dtype=torch.int64)
    return picks, *_fake_weigh(x, picks, source, valid, used, scale)


def _fake_merge(
    x: Tensor, weights: Tensor, source: Tensor, used: Tensor | None, expand: Tensor | None, D: int
) -> Tensor:
    return x.new_empty(x.shape[0], D, x.shape[2])


def _fake_unmerge(y: Tensor, *rest: Any) -> Tensor:
    return y.new_empty(y.shape[0], rest[-1], y.shape[2])  # N comes last


def _fake_agreement(out: Tensor, reduced: Tensor, kept: Tensor, destinations: Tensor) -> Tensor:
    return out.new_empty(out.shape[0], 2, parts_of(out.shape[1]), dtype=torch.float32)


def _fake_reuse(out: Tensor, reduced: Tensor, x: Tensor, *_: object) -> Tensor:
    return out.new_empty(x.shape)


def _fake_merge_hard(
    x: Tensor, owners: Tensor, source: Tensor, valid: Tensor | None, used: Tensor | None, expand: Tensor | None, K: int,
    D: int,
) -> Tensor:  # fmt: skip
    return x.new_empty(x.shape[0], D, x.shape[2])


def _fake_unmerge_hard(y: Tensor, reduced: Tensor | None, x: Tensor | None, owners: Tensor) -> Tensor:
    return y.new_empty(*owners.shape, y.shape[2])


torch.library.register_fake(f"{NAMESPACE}::weigh", _fake_weigh, lib=_library)
torch.library.register_fake(f"{NAMESPACE}::select_weigh", _fake_select_weigh, lib=_library)
torch.library.register_fake(f"{NAMESPACE}::merge", _fake_merge, lib=_library)
torch.library.register_fake(f"{NAMESPACE}::unmerge", _fake_unmerge, lib=_library)
torch.library.register_fake(f"{NAMESPACE}::agreement", _fake_agreement, lib=_library)
torch.library.register_fake(f"{NAMESPACE}::reuse", _fake_reuse, lib=_library)
torch.library.register_fake(f"{NAMESPACE}::merge_hard", _fake_merge_hard, lib=_library)
torch.library.register_fake(f"{NAMESPACE}::unmerge_hard", _fake_unmerge_hard, lib=_library)

operators = getattr(torch.ops, NAMESPACE)
