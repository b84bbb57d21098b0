"""The limit of main memory for keys and values, in the computer or in the container in which ComfyUI runs."""

from __future__ import annotations

from pathlib import Path

import psutil
from comfy import model_management

from .compat import optional_api

SHARE = 0.35  # of main memory for keys and values; ComfyUI needs the remainder for weights and text encoders
_LAST = 1e9  # bytes that keys and values leave free; ComfyUI itself leaves about 2 GB free when it pins weights
# Files with the memory limit and the usage of a container on Linux, for versions 2 and 1 of control groups.
_CGROUPS = Path("/sys/fs/cgroup")
_FILES = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))


def main_room() -> float:
    """Return how many bytes of main memory keys and values may take. The result is a share of the total memory, not of
    the free memory, because a seed must give the same picture in every run."""
    return min(total for total, _ in _memories()) * SHARE


def may_take(size: int) -> bool:
    """Return whether `size` bytes of main memory may be taken now. ComfyUI first gives up weights that it has pinned
    for models that do not run."""
    with optional_api("ensure_pin_budget"):
        make_way = getattr(model_management, "ensure_pin_budget", None)  # ComfyUI before 0.26 has no such function
        if make_way is not None:
            make_way(size)
    return min(available for _, available in _memories()) - _LAST >= size


def _memories() -> list[tuple[float, float]]:
    """Return total and available bytes of the computer, and of the container if its memory is limited."""
    computer = psutil.virtual_memory()
    found = [(computer.total, computer.available)]
    for limit, used in _FILES:
        try:
            total, taken = (float((_CGROUPS / name).read_text()) for name in (limit, used))
            lines = (_CGROUPS / limit).with_name("memory.stat").read_text().splitlines()
        except (OSError, ValueError):  # the files do not exist, or the limit is "max"
            continue
        stat = dict(line.split() for line in lines)
        # Count cached files as available, as psutil does, because Linux drops them when memory is needed.
        files = float(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
        found.append((total, total - taken + files))
        break  # the computer may have the files of both versions
    return found
