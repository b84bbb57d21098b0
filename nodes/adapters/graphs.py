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
# Weakly: a place lives as long as its hook, which lives as long as the model.
_places: WeakValueDictionary[int, Any] = WeakValueDictionary()


def numbered(place: Any) -> int:
    """A number by which the operators find the place. It has to have `reduced`, `restored` and `turned`."""
    number = next(_numbers)
    _places[number] = place
    return number


def around(x: Tensor, before: int, tokens: int, image: Tensor) -> Tensor:
    """x with the image in place of so many of its tokens. A new tensor: the graph may write into what it gave."""
    if x.shape[1] == tokens:
        own = image.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
        return image.contiguous() if own else image.clone(memory_format=torch.contiguous_format)
    return torch.cat([x[:, :before], image, x[:, before + tokens :]], 1)


def _enter(x: Tensor, place: int, before: int, tokens: int, kept: int) -> Tensor:
    return around(x, before, tokens, _places[place].reduced(x[:, before : before + tokens]))


def _leave(out: Tensor, reduced: Tensor, x: Tensor, place: int, before: int, tokens: int, kept: int) -> Tensor:
    merged, whole = slice(before, before + kept), slice(before, before + tokens)
    return around(out, before, kept, _places[place].restored(out[:, merged], reduced[:, merged], x[:, whole]))


def _look(t: Tensor, what: str, place: int, before: int, tokens: int, kept: int, axis: int) -> Tensor:
    block, _, what = what.partition(" ")
    looked: Tensor = _places[place].attended(block, t, what, before, axis, always=True)
    return looked.contiguous() if looked is not t else t.clone(memory_format=torch.contiguous_format)


def _turn(rows: Tensor, reduced: Tensor, place: int, before: int, tokens: int, kept: int, axis: int) -> Tensor:
    turned: Tensor = _places[place].turned(rows, before)
    return turned


_namespace = free_namespace("toma_graphs", "enter")
_library = torch.library.Library(_namespace, "FRAGMENT")
# Tensors come as eager code would lay them out, and a recorded CUDA graph has to stop at them.
_tags = tuple(
    getattr(torch.Tag, name) for name in ("needs_fixed_stride_order", "cudagraph_unsafe") if hasattr(torch.Tag, name)
)
_WHERE = "int place, SymInt before, SymInt tokens, SymInt kept"
_library.define(f"enter(Tensor x, {_WHERE}) -> Tensor", tags=_tags)
_library.define(f"leave(Tensor out, Tensor reduced, Tensor x, {_WHERE}) -> Tensor", tags=_tags)
_library.define(f"look(Tensor t, str what, {_WHERE}, int axis) -> Tensor", tags=_tags)
_library.define(f"turn(Tensor rows, Tensor reduced, {_WHERE}, int axis) -> Tensor", tags=_tags)
for _name, _function in (("enter", _enter), ("leave", _leave), ("look", _look), ("turn", _turn)):
    _library.impl(_name, _function, "CompositeExplicitAutograd")
operators = getattr(torch.ops, _namespace)


@torch.library.register_fake(f"{_namespace}::enter", lib=_library)
def _fake_enter(x: Tensor, place: int, before: int, tokens: int, kept: int) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1] - tokens + kept, x.shape[2])


@torch.library.register_fake(f"{_namespace}::leave", lib=_library)
def _fake_leave(out: Tensor, reduced: Tensor, x: Tensor, place: int, before: int, tokens: int, kept: int) -> Tensor:
    return out.new_empty(out.shape[0], out.shape[1] - kept + tokens, out.shape[2])


@torch.library.register_fake(f"{_namespace}::look", lib=_library)
def _fake_look(t: Tensor, what: str, place: int, before: int, tokens: int, kept: int, axis: int) -> Tensor:
    shape = list(t.shape)
    shape[axis] += tokens - kept
    return t.new_empty(shape)


@torch.library.register_fake(f"{_namespace}::turn", lib=_library)
def _fake_turn(rows: Tensor, reduced: Tensor, place: int, before: int, tokens: int, kept: int, axis: int) -> Tensor:
    shape = [reduced.shape[0], *rows.shape[1:]]
    shape[axis] += kept - tokens
    return rows.new_empty(shape)
