"""Merging inside the graphs of torch.compile, by operators that the compiler takes as they are.

Merging chooses by content, step and run, and a traced graph would freeze those choices. Left out of the graph, they
break it: around every stack of a UNet, in the middle of the loops over its blocks, so that each block becomes a graph
of its own and most of what compiling gains is lost to their guards. So a graph holds operators that know only a place
in the model, by number, and their shapes; what they do is looked up when they run.
"""

from __future__ import annotations

import itertools
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ...toma_core.kernels.namespace import free_namespace

# Of one code: whole and merged, for a few dozen sizes of picture and lengths of prompt.
_GRAPHS = 64
_MODES = (None, "default", "max-autotune-no-cudagraphs")


def compiled(model_options: dict[str, Any]) -> bool:
    """Whether ComfyUI was told to compile the model with Inductor. Recorded CUDA graphs would replay what the operators
    did when they were recorded: there, and where nobody knows, merging stays outside."""
    told = model_options.get("torch_compile_kwargs") or {}
    options = told.get("options") or {}
    return told.get("backend") == "inductor" and told.get("mode") in _MODES and not options.get("triton.cudagraphs")


def in_one_piece(model_options: dict[str, Any]) -> bool:
    """Whether torch.compile was told to fail where it would have to leave a graph, as merging has to when it meets
    something that it does not know."""
    return bool((model_options.get("torch_compile_kwargs") or {}).get("fullgraph"))


def allow_more_graphs() -> None:
    """As many graphs of one code as sizes, prompts and references ask for. Whole and merged steps need one each where
    PyTorch by itself allows eight together, and then gives up compiling. For good: the graphs stay, and a lower limit
    would be met by the next run."""
    from torch._dynamo import config  # takes seconds, which a run that compiles nothing is spared

    for name in ("recompile_limit", "cache_size_limit"):  # before PyTorch 2.6
        if hasattr(config, name):
            setattr(config, name, max(getattr(config, name), _GRAPHS))
            return


_numbers = itertools.count()
# Weakly: a site lives as long as its hook, which lives as long as the model.
_sites: WeakValueDictionary[int, Any] = WeakValueDictionary()


def numbered(site: Any) -> int:
    """Return a number by which the operators find a `chain.ChainSite`."""
    number = next(_numbers)
    _sites[number] = site
    return number


def enter(x: Tensor, site: int, destinations: int) -> Tensor:
    """(B, N, C) -> (B, D, C). A new tensor: the graph may write into it."""
    reduced: Tensor = _sites[site].reduce(x)
    own = reduced.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    return reduced.contiguous() if own else reduced.clone(memory_format=torch.contiguous_format)


def leave(out: Tensor, reduced: Tensor, x: Tensor, site: int) -> Tensor:
    """(B, D, C), (B, D, C) and (B, N, C) -> (B, N, C)."""
    there = _sites[site]
    restored: Tensor = there.reduction.restore(out, reduced, x, there.attends)
    return restored


def _leave(out: Tensor, reduced: Tensor, x: Tensor, site: int) -> Tensor:
    restored, inputs = leave(out, reduced, x, site), (out, reduced, x)
    shared = any(restored.untyped_storage().data_ptr() == each.untyped_storage().data_ptr() for each in inputs)
    return restored.clone(memory_format=torch.contiguous_format) if shared else restored.contiguous()


def _attend(t: Tensor, what: str, site: int, before: int, tokens: int, destinations: int, axis: int) -> Tensor:
    block, _, what = what.partition(" ")
    attended: Tensor = _sites[site].reduction.attend(block, t, what, before, axis, always=True)
    return attended.contiguous() if attended is not t else t.clone(memory_format=torch.contiguous_format)


def _rope(rope: Tensor, reduced: Tensor, site: int, before: int, tokens: int, destinations: int, axis: int) -> Tensor:
    merged: Tensor = _sites[site].reduction.rope(rope, before)
    return merged


_namespace = free_namespace("toma_graphs", "enter")
_library = torch.library.Library(_namespace, "FRAGMENT")
# Tensors come as eager code would lay them out, and a recorded CUDA graph has to stop at them.
_tags = tuple(
    getattr(torch.Tag, name) for name in ("needs_fixed_stride_order", "cudagraph_unsafe") if hasattr(torch.Tag, name)
)
_SIZES = "int site, SymInt before, SymInt tokens, SymInt destinations, int axis"
_library.define("enter(Tensor x, int site, SymInt destinations) -> Tensor", tags=_tags)
_library.define("leave(Tensor out, Tensor reduced, Tensor x, int site) -> Tensor", tags=_tags)
_library.define(f"attend(Tensor t, str what, {_SIZES}) -> Tensor", tags=_tags)
_library.define(f"rope(Tensor rope, Tensor reduced, {_SIZES}) -> Tensor", tags=_tags)
for _name, _function in (("enter", enter), ("leave", _leave), ("attend", _attend), ("rope", _rope)):
    _library.impl(_name, _function, "CompositeExplicitAutograd")
operators = getattr(torch.ops, _namespace)


@torch.library.register_fake(f"{_namespace}::enter", lib=_library)
def _fake_enter(x: Tensor, site: int, destinations: int) -> Tensor:
    return x.new_empty(x.shape[0], destinations, x.shape[2])


@torch.library.register_fake(f"{_namespace}::leave", lib=_library)
def _fake_leave(out: Tensor, reduced: Tensor, x: Tensor, site: int) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.register_fake(f"{_namespace}::attend", lib=_library)
def _fake_attend(t: Tensor, what: str, site: int, before: int, tokens: int, destinations: int, axis: int) -> Tensor:
    shape = list(t.shape)
    shape[axis] += tokens - destinations
    return t.new_empty(shape)


@torch.library.register_fake(f"{_namespace}::rope", lib=_library)
def _fake_rope(
    rope: Tensor, reduced: Tensor, site: int, before: int, tokens: int, destinations: int, axis: int
) -> Tensor:
    shape = [reduced.shape[0], *rope.shape[1:]]
    shape[axis] += destinations - tokens
    return rope.new_empty(shape)
