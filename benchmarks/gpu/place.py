"""Time a merged step with its KV cache on the card and in main memory, and time copies between the two."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks import bench, variants
from benchmarks.variants import Variant
from scripts.comfy_pack import pack_module

HOST = "in main memory"
_COPIED = 256 << 20  # bytes of the copies that are timed


def _copier(device: torch.device) -> Any:
    """Return the pack's copier. On a device without streams (a dry run), return a copier that copies immediately."""
    if found := pack_module("nodes.adapters.kv_memory").copier_of(device):
        return found
    copier = mock.MagicMock()
    copier.copy = lambda stream, target, source, pinned: target.copy_(source)
    copier.pin.return_value = False
    copier.streams.return_value = mock.Mock(), mock.Mock()
    return copier


def host_memory(device: torch.device) -> Any:
    """Return a `HostMemory` with no room on the card."""
    return pack_module("nodes.adapters.kv_memory").HostMemory(_copier(device), 1, 0.0, 1e12)


def chosen(ratio: float, **settings: Any) -> list[Variant]:
    """Return variants of `balanced` whose keys and values have full precision or four bits, on the card or in main
    memory."""
    full = variants.preset("balanced", ratio=ratio, **settings)
    four_bits = replace(full, name=f"{full.name}, keys in four bits", packs=True)
    away = (replace(each, name=f"{each.name}, {HOST}", in_host_memory=True) for each in (full, four_bits))
    return [full, four_bits, *away]


def copy_speeds(device: torch.device, dry: bool) -> str:
    """Return the speed of copies of 256 MiB in GB/s: from the card (down), to the card (up), and in both directions at
    once."""
    size = _COPIED >> 12 if dry else _COPIED
    card = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
    host = [torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda") for _ in range(2)]
    copier = _copier(device)
    streams = copier.streams(device)
    down, up = (0, host[0], card[0]), (1, card[1], host[1])
    ways = {"down": [down], "up": [up], "both at once": [down, up]}

    def copied(way: str) -> Any:
        def run() -> Tensor:
            now = copier.current(device)
            ready, ends = now.record_event(), []
            for number, target, source in ways[way]:
                streams[number].wait_event(ready)
                copier.copy(streams[number], target, source, True)
                ends.append(streams[number].record_event())
            for end in ends:
                now.wait_event(end)
            return card[1][:1]

        return run

    timings = bench.interleave({way: copied(way) for way in ways}, 1 if dry else 9, device, limit=10)
    rates = (f"{way} {len(ways[way]) * size / timing.quantile(0.5) / 1e9:.1f}" for way, timing in timings.items())
    return f"copies of {size >> 20} MiB, pinned, GB/s: {', '.join(rates)}"
