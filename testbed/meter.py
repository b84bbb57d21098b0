"""Count the FLOPs, bytes and launches of running code, on the meta device as on any other device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

META = torch.device("meta")


@dataclass
class Cost:
    """The counted cost of an evaluation or of a part of it."""

    flops: float = 0.0  # a multiply-add counts as two
    bytes: float = 0.0  # bytes that all operations read and write; attention is one fused operation
    launches: int = 0  # operations except views and allocations
    operations: Counter[str] = field(default_factory=Counter)  # number of operations by name
    products: Counter[str] = field(default_factory=Counter)  # FLOPs by name of the operation
    parts: dict[str, Cost] = field(default_factory=dict)  # cost by part of a step

    def add(self, name: str, flops: float, moved: float) -> None:
        """Add one operation."""
        self.flops += flops
        self.bytes += moved
        self.launches += 1
        self.operations[name] += 1
        self.products[name] += int(flops)


class Meter(TorchDispatchMode):
    """Counts all operations inside the context."""

    def __init__(self) -> None:
        super().__init__()
        self.cost = Cost()
        self.part: str | None = None

    @contextmanager
    def within(self, part: str) -> Iterator[None]:
        """Inside the context, also count operations as cost of `part`, a part of a step."""
        before, self.part = self.part, part
        try:
            yield
        finally:
            self.part = before

    @contextmanager
    def around(self, module: torch.nn.Module, part: str) -> Iterator[None]:
        """Inside the context, also count the module's operations as cost of `part`, a part of a step."""
        entered: list[Any] = []

        def enter(*_: Any) -> None:
            entered.append(self.within(part))
            entered[-1].__enter__()

        def leave(*_: Any) -> None:
            entered.pop().__exit__(None, None, None)

        handles = [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def count(self, name: str, flops: float, moved: float) -> None:
        """Count one operation, also as cost of the part of a step that is in progress."""
        self.cost.add(name, flops, moved)
        if self.part is not None:
            self.cost.parts.setdefault(self.part, Cost()).add(name, flops, moved)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.is_view or func in _FREE:
            return func(*args, **(kwargs or {}))
        out, flops, moved = _computed(func, args, kwargs or {})
        self.count(str(func.overloadpacket).removeprefix("aten."), flops, moved)
        return out

    def attention(self, _: Any, q: Tensor, k: Tensor, v: Tensor, heads: int, *__: Any, **options: Any) -> Tensor:
        """Replace ComfyUI's attention by one fused operation on (B, N, C), or (B, H, N, d) with skip_reshape."""
        if options.get("skip_reshape"):
            batch, _, queries, width = q.shape
            channels, keys = heads * width, k.shape[2]
        else:
            (batch, queries, channels), keys = q.shape, k.shape[1]
        out = torch.empty(batch, queries, channels, dtype=q.dtype, device=q.device)
        self.count("attention", 4.0 * batch * queries * keys * channels, sum(t.nbytes for t in (q, k, v, out)))
        return out


def _known(value: Any) -> Any:
    """Return what `_results` needs to know of an argument. Raises TypeError for a tensor that is not on the meta
    device, because its values may affect the shape of a result."""
    if isinstance(value, Tensor):
        if not value.is_meta:
            raise TypeError
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(map(_known, value))
    return type(value), value


_results: dict[Any, Any] = {}


def _computed(func: Any, args: Any, kwargs: Any) -> tuple[Any, float, float]:
    """Call an operation and return its result, FLOPs and bytes. Shapes of results are cached, because PyTorch computes
    them slowly on the meta device."""
    try:
        key = None if func._schema.is_mutable else (func, _known(args), _known(list(kwargs.items())))
        cached = _results.get(key)
    except TypeError:
        key = cached = None
    if cached is not None:
        shape, stride, dtype, flops, moved = cached
        return torch.empty_strided(shape, stride, dtype=dtype, device=META), flops, moved
    out, packet = func(*args, **kwargs), func.overloadpacket
    flops = flop_registry[packet](*args, **kwargs, out_val=out) if packet in flop_registry else 0
    moved = sum(t.nbytes for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor))
    if key is not None and isinstance(out, Tensor) and out.is_meta:
        _results[key] = out.shape, out.stride(), out.dtype, flops, moved
    return out, flops, moved


_aten = torch.ops.aten
_FREE = {
    _aten.empty.memory_format,
    _aten.new_empty.default,
    _aten.empty_like.default,
    _aten.empty_strided.default,
    _aten._unsafe_view.default,
    _aten.detach.default,
    _aten.lift_fresh.default,
}
