"""Simulate a GPU on the CPU. tests/recorded_copies.py simulates copies between GPU memory and main memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from scripts.comfy_pack import pack_module
from testbed import models
from tests.nodes.adapters.families.layouts import HEIGHT, WIDTH
from tests.recorded_copies import Copies

VIDEOS = ("wan", "ltx", "h3", "cosmos")


class Card:
    """A run on the simulated GPU. copies: the record of its copies. peak: the largest size of its KV cache, as (bytes
    on the GPU, bytes in main memory)."""

    def __init__(self, copies: Copies) -> None:
        self.copies, self.peak, self.hosts = copies, (0, 0), list[Any]()

    def ended(self) -> None:
        """Check that after the run no copy is unfinished and no buffer is left."""
        copies = self.copies
        copies.check()
        assert (copies.pinned, copies.unfinished(), copies.staged) == (set(), 0, 0)
        for host in self.hosts:
            assert (host.in_main, host._lanes, host._on_card, host._buffers, host._unused) == (0, {}, {}, [], [])


@contextmanager
def a_card(share: float, quantized: bool, main: float = 1e12, **options: Any) -> Iterator[Card]:
    """Simulate a GPU that holds a `share` (0 to 1) of all keys and values, beside `main` bytes of main memory."""
    memory = pack_module("nodes.adapters.kv_memory")
    card, plan, make = Card(Copies(**options)), memory._four_bits, memory.HostMemory

    def planned(updates: int, keys: int, left: float, *args: Any) -> Any:
        return plan(updates, keys, updates + share * keys if share < 1 else 1e12, 0.0, *args[1:])

    def measured(host: Any, *estimated: Any) -> None:
        assert memory._inference_memory(*estimated) < float("inf"), "ComfyUI's estimate fails"
        if not quantized:
            host.card_room = share * host.expected if share < 1 else 1e12

    def made(*args: Any) -> Any:
        card.hosts.append(make(*args))
        return card.hosts[-1]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(memory, "copier_of", lambda device: card.copies)
        patched.setattr(memory, "main_room", lambda: main)
        patched.setattr(memory, "memory_left", lambda *_: 0.0 if quantized else 1e12)
        patched.setattr(memory, "_four_bits", planned)
        patched.setattr(memory, "HostMemory", made)
        patched.setattr(pack_module("nodes.adapters.patch_model"), "measure_room", measured)
        yield card
    card.peak = max((host.peak for host in card.hosts), default=(0, 0))


def sampled(kind: str, model: Any, **options: Any) -> list[Tensor]:
    usual: dict[str, Any] = {"steps": 5, "cfg": 3.0, "frames": 3 if kind in VIDEOS else 1}
    return models.sample_streams(model, HEIGHT, WIDTH, **{**usual, **options})


def compared(kind: str, merged: Any, quantized: bool, share: float = 0.0, **options: Any) -> Card:
    """Sample with all keys and values on the simulated GPU, then with a `share` of them there. Check that the latents
    are equal. Return the record of the second run."""
    with a_card(1.0, quantized):
        wanted = sampled(kind, merged, **options)
    with a_card(share, quantized) as card:
        found = sampled(kind, merged, **options)
    card.ended()
    assert all(map(torch.equal, found, wanted))
    assert card.copies.count
    return card
