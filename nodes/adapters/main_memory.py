"""The limit of main memory for keys and values, in the computer or in the container in which ComfyUI runs."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import psutil
from comfy import model_management

from .compat import optional_api

# The share of main memory that keys and values may take; ComfyUI needs the remainder for weights and text encoders.
SHARE = 0.35
# Bytes of main memory that keys and values leave free. ComfyUI itself leaves about 2 GB free when it pins weights.
_LAST = 1e9
# Files with the memory limit and the usage of a container on Linux, for versions 2 and 1 of control groups.
_CGROUPS = Path("/sys/fs/cgroup")
_FILES = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))


class _Memory(NamedTuple):
    total: float
    available: float


def main_room() -> float:
    """Return how many bytes of main memory keys and values may take. The result is a share of the total memory, not of
    the free memory, because a seed must give the same picture in every run."""
    return min(each.total for each in _memories()) * SHARE


def may_take(size: int) -> bool:
    """Return whether `size` bytes of main memory may be taken now. ComfyUI first gives up weights that it has pinned
    for models that do not run."""
    with optional_api("ensure_pin_budget"):
        make_way = getattr(model_management, "ensure_pin_budget", None)  # ComfyUI before 0.26 has no such function
        if make_way is not None:
            make_way(size)
    return min(each.available for each in _memories()) - _LAST >= size


def _memories() -> list[_Memory]:
    computer = psutil.virtual_memory()
    container = _container()
    return [_Memory(computer.total, computer.available), *([container] if container else [])]


def _container() -> _Memory | None:
    """Return the memory of the container; None without a container or without a limit."""
    for limit, used in _FILES:
        try:
            total, taken = (float((_CGROUPS / name).read_text()) for name in (limit, used))
            lines = (_CGROUPS / limit).with_name("memory.stat").read_text().splitlines()
        except (OSError, ValueError):  # the files do not exist, or the limit is "max"
            continue
        stat = dict(line.split() for line in lines)
        # Count cached files as available, as psutil does, because Linux drops them when memory is needed.
        files = float(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
        return _Memory(total, total - taken + files)
    return None
