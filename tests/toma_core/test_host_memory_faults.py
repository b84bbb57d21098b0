"""Test caches in main memory when pinning or waiting fails, when memory is full, and when a condition changes."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.loop import loop
from tests.recorded_copies import Copies, Recorded, orders
from tests.toma_core.test_host_memory import (
    CONDITIONS,
    NAMES,
    SIZE,
    caching,
    check_empty,
    check_filled,
    filled,
    keys_of,
    run,
    tensor,
)
from toma_core.cache import Cache
from toma_core.host_memory import CudaCopier, Parked


@loop("failing", ["unpin", "synchronize"])
def test_every_buffer_is_released_where_one_fails(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first call of `failing` raises an error. The cache must still release every buffer."""
    copies, cache, host = caching()
    filled(cache)
    owner: Any = Copies if failing == "unpin" else Recorded
    usual, failed = getattr(owner, failing), list[object]()

    def once(self: Any, *args: Any) -> None:
        usual(self, *args)
        if not failed:
            failed.append(self)
            raise RuntimeError(failing)

    monkeypatch.setattr(owner, failing, once)
    with pytest.raises(RuntimeError, match=failing):
        cache.clear()
    check_empty(copies, cache, host)


def test_an_unpin_that_fails_leaves_no_buffer_that_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    _, cache, host = caching(main=2 * SIZE)
    for name in NAMES[:2]:
        cache.put(keys_of(name), tensor(0), kv=True)
    cache.drop([*keys_of(NAMES[0]), *keys_of(NAMES[1])])

    def failing(*_: Any) -> None:
        raise RuntimeError

    with monkeypatch.context() as patch:
        patch.setattr(Copies, "unpin", failing)
        with pytest.raises(RuntimeError):
            cache.put(keys_of("other"), tensor(0)[:, :4], kv=True)
    assert all(buffer in host._buffers for buffer in host._unused)


def test_the_host_waits_for_nothing_where_main_memory_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    _, cache, _ = caching(main=2.5 * SIZE)
    waits, usual = list[object](), Recorded.synchronize
    monkeypatch.setattr(Recorded, "synchronize", lambda self: (waits.append(self), usual(self))[1])
    filled(cache)
    filled(cache)
    assert not waits


def test_the_last_of_main_memory_is_not_taken() -> None:
    """ComfyUI pins weights while the first step runs, so less main memory may be left than the plan assumed. Tensors
    that no longer fit stay on the card."""
    copies, cache, host = caching()
    host.may_take = lambda size: copies.made + size / SIZE < 2.5
    filled(cache)
    assert copies.made == 2
    check_filled(cache)


@loop("order", orders(3))
def test_memory_that_cannot_be_pinned_serves_too_and_is_tried_once(order: Any) -> None:
    """Pinning is tried once, because at every failure ComfyUI logs a warning and waits for the card."""
    copies, cache, host = caching(Copies(order, pins=False))
    filled(cache)
    assert copies.made == 1
    assert all(map(torch.equal, run(cache, True), run(Cache(), True)))
    assert not host.pinned


def test_no_two_buffers_share_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA pins entire pages, and refuses a page that is already pinned. So each buffer needs pages of its own."""
    pages, usual = set[int](), Copies.pin

    def pin(self: Copies, memory: torch.Tensor) -> bool:
        start, end = memory.data_ptr(), memory.data_ptr() + memory.nbytes
        new = set(range(start // 4096, -(-end // 4096)))
        shared = pages & new
        pages.update(new)
        return usual(self, memory) and not shared

    monkeypatch.setattr(Copies, "pin", pin)
    _, cache, host = caching()
    assert all(map(torch.equal, run(cache, True), run(Cache(), True)))
    assert host.pinned


def test_main_memory_is_meant_where_another_pack_sets_a_device() -> None:
    _, cache, _ = caching()
    given = tensor(0)
    with torch.device("meta"):
        cache.put(keys_of(NAMES[0]), given, kv=True)
    found = cache.read(keys_of(NAMES[0]), given)
    assert found is not None
    assert torch.equal(found, given)


def test_all_runs_copy_on_the_same_two_streams_of_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch gives out 32 streams in turn. So a run's new stream could be a stream on which ComfyUI copies weights."""
    made = list[object]()

    class Stream:
        def __init__(self, device: torch.device) -> None:
            made.append(self)

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(CudaCopier, "streams", staticmethod(functools.cache(CudaCopier.streams.__wrapped__)))
    copier = CudaCopier(bool, bool)
    found = {copier.streams(torch.device("cuda", card)) for _ in range(20) for card in (0, 1)}
    assert len(made) == 4
    assert len(found) == 2


@loop("order", orders(5))
@loop("quantized", [False, True])
def test_another_condition_beside_one_of_two_lies_in_main_memory_too(order: Any, quantized: bool) -> None:
    """If the prompt c replaces b during a run, the tensors of a and of c are all in main memory."""
    copies, on_host, _ = caching(Copies(order))
    seen = list[list[torch.Tensor]]()
    for cache in (on_host, Cache()):
        cache.quantized = quantized
        for conditions, seed in ((CONDITIONS, 0), (("a", "c"), 50)):
            for n, name in enumerate(NAMES):
                cache.put(keys_of(name, conditions), tensor(n + seed), kv=True)
        assert all(isinstance(entry.tensor, Parked) is (cache is on_host) for entry in cache._entries.values())
        found = [cache.read(keys_of(name, ("a", "c")), tensor(0)) for name in NAMES]
        seen.append([each for each in found if each is not None])
        cache.clear()
    copies.check()
    assert len(seen[0]) == len(NAMES)
    assert all(map(torch.equal, *seen))
