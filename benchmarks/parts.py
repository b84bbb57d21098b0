"""Profile the parts of a step that ToMA adds: plans (selection and weights), merges, unmerges."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from scripts.comfy_pack import pack_module

# Modules of the adapters that call the functions in `PARTS`.
ADAPTERS = ("active_chain", "families.unet")
# Function that the adapters call -> the part of a step to which it belongs.
PARTS = {"plan": "plan", "merge": "merge", "reduce": "merge", "unmerge": "unmerge", "restore": "unmerge"}


@contextmanager
def marked(around: Callable[[str], Any]) -> Iterator[None]:
    """Until the `with` block ends, run every call of a function of `PARTS` inside the context manager `around(part)`.
    `part` is the part of a step to which `PARTS` assigns the function."""
    owners: list[Any] = [pack_module(f"nodes.adapters.{name}") for name in ADAPTERS]
    owners.append(pack_module("toma_core.run").RunState)
    saved = []

    def wrapped(function: Any, part: str) -> Any:
        @functools.wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            with around(part):
                return function(*args, **kwargs)

        return inside

    try:
        for owner in owners:
            for name, part in PARTS.items():
                if name in vars(owner):
                    saved.append((owner, name, vars(owner)[name]))
                    setattr(owner, name, wrapped(vars(owner)[name], part))
        yield
    finally:
        for owner, name, function in reversed(saved):
            setattr(owner, name, function)


@dataclass(frozen=True)
class Profile:
    """The profile of one call."""

    shares: dict[str, float]  # shares of `seconds`, by part
    seconds: float  # time of the call, or on a GPU of its kernels
    launches: int  # number of kernels on a GPU, of operators elsewhere
    top: str  # the slowest operations, as text


_LABEL = "toma: "


def profile(call: Callable[[], Any], rows: int = 25) -> Profile:
    """Run the call once under PyTorch's profiler."""
    cuda = torch.cuda.is_available()
    activities = [torch.profiler.ProfilerActivity.CPU]
    if cuda:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    total_label = f"{_LABEL}total"
    # `record_function` would label only the kernels that PyTorch's operators launch. This label also covers Triton's
    # kernels.
    label = torch._C._profiler._RecordFunctionFast
    with marked(lambda part: label(_LABEL + part)), torch.profiler.profile(activities=activities) as profiler:
        with label(total_label):
            call()
        if cuda:
            torch.cuda.synchronize()
    events = profiler.key_averages()
    on_host = [e for e in events if e.device_type == torch.autograd.DeviceType.CPU]
    labels = {e.key: e for e in on_host if e.key.startswith(_LABEL)}

    def microseconds(event: Any) -> float:
        return float(event.device_time_total if cuda else event.cpu_time_total)

    kernels = [e for e in events if e.device_type != torch.autograd.DeviceType.CPU]
    total = float(sum(e.self_device_time_total for e in kernels)) if cuda else microseconds(labels[total_label])
    parts = {k.removeprefix(_LABEL): microseconds(e) / total for k, e in labels.items() if k != total_label}
    counted = kernels if cuda else [e for e in on_host if not e.key.startswith(_LABEL)]
    order = "self_device_time_total" if cuda else "self_cpu_time_total"
    top = events.table(sort_by=order, row_limit=rows, max_name_column_width=60)
    return Profile(dict(sorted(parts.items())), total / 1e6, sum(e.count for e in counted), top)
