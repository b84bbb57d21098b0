"""Merge inside the graphs of torch.compile, through operators that the compiler does not trace.

Merging depends on the tokens' content, the step and the run. Tracing would freeze all three in the graph. Merging
outside of graphs would break the graph at every block, and guards would then cost most of the time that compiling
saves. So a graph contains operators, which get shapes and a number, and find their `chain.ChainSite` by this number.
"""

from __future__ import annotations

import itertools
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ...toma_core.kernels.layout import free_namespace

_GRAPHS = 64  # maximum number per function: enough for a few dozen image sizes and prompt lengths
_MODES = (None, "default", "max-autotune-no-cudagraphs")


def compiled(model_options: dict[str, Any]) -> bool:
    """Whether tokens are merged inside of this model's graphs: only if ComfyUI compiles the model with Inductor, in a
    known mode and without CUDA graphs. A CUDA graph would repeat the merge of the step in which it was recorded."""
    kwargs = model_options.get("torch_compile_kwargs") or {}
    options = kwargs.get("options") or {}
    return kwargs.get("backend") == "inductor" and kwargs.get("mode") in _MODES and not options.get("triton.cudagraphs")


def in_one_piece(model_options: dict[str, Any]) -> bool:
    """Whether torch.compile must make one graph of the model, so that a merge outside of graphs raises an error."""
    return bool((model_options.get("torch_compile_kwargs") or {}).get("fullgraph"))


def allow_more_graphs() -> None:
    """Raise PyTorch's limit of eight graphs per function, because every image size and prompt length needs two graphs,
    one for full steps and one for merged steps. The limit stays raised after a run, because graphs remain in memory."""
    from torch._dynamo import config  # imported here, because the import takes seconds

    for name in ("recompile_limit", "cache_size_limit"):  # PyTorch before 2.6 has only `cache_size_limit`
        if hasattr(config, name):
            setattr(config, name, max(getattr(config, name), _GRAPHS))
            return


_numbers = itertools.count()
# Sites by number. Weak references let a site live only as long as its hook, and a hook only as long as its model.
_sites: WeakValueDictionary[int, Any] = WeakValueDictionary()


def numbered(site: Any) -> int:
    """Return a number by which the operators find a `chain.ChainSite`."""
    number = next(_numbers)
    _sites[number] = site
    return number


def enter(x: Tensor, site: int, destinations: int) -> Tensor:
    return _own(_sites[site].reach().reduce(x), x)


def leave(out: Tensor, reduced: Tensor, x: Tensor, site: int) -> Tensor:
    """Unmerge `out`, (B, D, C), to (B, N, C). x, (B, N, C): the input of `enter`. reduced, (B, D, C): its result."""
    return _sites[site].chain.restore(out, reduced, x)


def _leave(out: Tensor, reduced: Tensor, x: Tensor, site: int) -> Tensor:
    return _own(leave(out, reduced, x, site), out, reduced, x)


def _attend(t: Tensor, what: str, site: int, before: int, tokens: int, destinations: int, axis: int) -> Tensor:
    block, _, what = what.partition(" ")
    return _own(_sites[site].chain.attend(block, t, what, before, axis, always=True), t)


def _own(result: Tensor, *inputs: Tensor) -> Tensor:
    """Return a contiguous tensor that shares no memory with the inputs, because a graph may write into the result."""
    if any(result.untyped_storage().data_ptr() == each.untyped_storage().data_ptr() for each in inputs):
        return result.clone(memory_format=torch.contiguous_format)
    return result.contiguous()


def _rope(rope: Tensor, reduced: Tensor, site: int, before: int, tokens: int, destinations: int, axis: int) -> Tensor:
    chain = _sites[site].chain
    merged = chain.rope(rope, before)
    chain.note_positions(rope, merged, before)
    return merged


def _fake_enter(x: Tensor, site: int, destinations: int) -> Tensor:
    return x.new_empty(x.shape[0], destinations, x.shape[2])


def _fake_leave(out: Tensor, reduced: Tensor, x: Tensor, site: int) -> Tensor:
    return x.new_empty(x.shape)


def _fake_attend(t: Tensor, what: str, site: int, before: int, tokens: int, destinations: int, axis: int) -> Tensor:
    shape = list(t.shape)
    shape[axis] += tokens - destinations
    return t.new_empty(shape)


def _fake_rope(
    rope: Tensor, reduced: Tensor, site: int, before: int, tokens: int, destinations: int, axis: int
) -> Tensor:
    shape = [reduced.shape[0], *rope.shape[1:]]
    shape[axis] += destinations - tokens
    return rope.new_empty(shape)


_namespace = free_namespace("toma_graphs", "enter")
_library = torch.library.Library(_namespace, "FRAGMENT")
# With these tags operators get tensors with the strides of eager mode, and stay out of CUDA graphs.
_KNOWN = ("needs_fixed_stride_order", "cudagraph_unsafe")
_TAGS = [getattr(torch.Tag, name) for name in _KNOWN if hasattr(torch.Tag, name)]
_SIZES = "int site, SymInt before, SymInt tokens, SymInt destinations, int axis"
for _schema, _function, _fake in (
    ("enter(Tensor x, int site, SymInt destinations) -> Tensor", enter, _fake_enter),
    ("leave(Tensor out, Tensor reduced, Tensor x, int site) -> Tensor", _leave, _fake_leave),
    (f"attend(Tensor t, str what, {_SIZES}) -> Tensor", _attend, _fake_attend),
    (f"rope(Tensor rope, Tensor reduced, {_SIZES}) -> Tensor", _rope, _fake_rope),
):
    _name = _schema.partition("(")[0]
    _library.define(_schema, tags=_TAGS)
    _library.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{_namespace}::{_name}", _fake, lib=_library)
operators = getattr(torch.ops, _namespace)
