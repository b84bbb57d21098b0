"""Test that keys and values are read from main memory as they were written, even if memory runs out or pinning
fails."""

import functools
import gc
import weakref
from contextlib import nullcontext, suppress
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.loop import loop
from tests.recorded_copies import Copies, RaceError, Recorded
from toma_core import quant4
from toma_core.cache import Cache
from toma_core.host_memory import MAX_STAGED, CudaCopier, HostMemory, Parked

BLOCKS, CONDITIONS = 5, ("a", "b")
NAMES = [f"{what} {block}" for block in range(BLOCKS) for what in ("key", "value")]


def tensor(seed: int, batch: int = 2) -> Tensor:
    return torch.randn(batch, 8, 32, generator=torch.Generator().manual_seed(seed))


SIZE = tensor(0).nbytes
PACKED = quant4.quantize(tensor(0)).nbytes


def caching(
    copies: Copies | None = None, card: float = 0.0, main: float = 1e9, expected: int = SIZE * len(NAMES)
) -> tuple[Copies, Cache, HostMemory]:
    copies = copies or Copies()
    host = HostMemory(copies, expected, card, main)
    return copies, Cache(host=host), host


def keys_of(name: str, conditions: tuple[str, ...] = CONDITIONS) -> Any:
    return tuple((name, condition) for condition in conditions)


def fill(cache: Cache, names: list[str] = NAMES, conditions: tuple[str, ...] = CONDITIONS, seed: int = 0) -> None:
    for n, name in enumerate(names):
        cache.put(keys_of(name, conditions), tensor(n + seed), kv=True)


def parked_in(cache: Cache) -> list[bool]:
    """Return for each tensor whether it is in main memory."""
    return [isinstance(cache._entries[name, "a"].tensor, Parked) for name in NAMES]


def check_filled(cache: Cache) -> None:
    """Check that each tensor is read as `fill` wrote it."""
    for n, name in enumerate(NAMES):
        found = cache.read(keys_of(name), tensor(0))
        assert found is not None
        assert torch.equal(found, tensor(n))


def check_empty(copies: Copies, cache: Cache, host: HostMemory) -> None:
    """Check that a cleared cache holds no memory and no copy."""
    copies.check()
    assert (copies.pinned, copies.unfinished(), copies.staged) == (set(), 0, 0)
    assert (host.in_main, host._buffers, host._lanes, cache.held) == (0, [], {}, 0)


def run(cache: Cache, quantized: bool, steps: int = 3, split: bool = False) -> list[Tensor]:
    """Run a refresh and `steps` merged steps, and return the tensors that the merged steps read. Each merged step also
    writes new tensors. split: each condition comes in a separate call."""
    seen, cache.quantized = [], quantized
    fill(cache)
    cache.free_staging(torch.device("cpu"))
    for step in range(steps):
        for conditions in [(c,) for c in CONDITIONS] if split else [CONDITIONS]:
            cache.read_ahead(conditions)
            for name in NAMES:
                found = cache.read(keys_of(name, conditions), tensor(0, len(conditions)))
                assert found is not None
                seen.append(found.clone())
                fresh = found.roll(step + 1, 2).mul(0.5)
                cache.put(keys_of(name, conditions), fresh, kv=True)
                del found, fresh
            cache.free_staging(torch.device("cpu"))
    return seen


@loop("quantized", [False, True])
@loop("split", [False, True])
@loop("card", [0.0, 0.45])
def test_it_is_the_same_wherever_it_lies(quantized: bool, split: bool, card: float) -> None:
    size = (PACKED if quantized else SIZE) * len(NAMES)
    copies, cache, host = caching(card=card * size, expected=size)
    found, wanted = run(cache, quantized, split=split), run(Cache(), quantized, split=split)
    copies.check()
    assert all(map(torch.equal, found, wanted))
    assert len(found) == 3 * len(NAMES) * (2 if split else 1)
    parked = parked_in(cache)
    assert all(parked) if not card else 0 < sum(parked) < len(parked)
    cache.clear()
    check_empty(copies, cache, host)


WAITS = [("up", "compute"), ("up", "down"), ("compute", "up"), ("compute", "down"), ("down", "compute")]


@loop("deaf", [None, *WAITS])
def test_every_wait_is_needed(deaf: tuple[str, str] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """If one stream ignores its waits for another (`deaf`), the simulated streams must report a race."""
    monkeypatch.setattr(Cache, "free_staging", lambda *_: None)
    copies, cache, _ = caching(Copies(deaf=deaf))
    with nullcontext() if deaf is None else pytest.raises(RaceError):
        run(cache, quantized=False)
        cache.put(keys_of(NAMES[0]), tensor(9), kv=True)
        cache.read(keys_of(NAMES[0]), tensor(0))
        cache.clear()
        copies.check()


def test_the_next_block_is_read_while_this_one_computes() -> None:
    copies, cache, _ = caching()
    fill(cache)
    cache.free_staging(torch.device("cpu"))
    before = copies.count
    cache.read_ahead(CONDITIONS)
    for n, name in enumerate(NAMES):
        ready = copies.count - before
        assert ready == min(n + MAX_STAGED, len(NAMES)), "two tensors were read ahead"
        cache.read(keys_of(name), tensor(0))
    assert copies.count - before == len(NAMES), "nothing is read twice"


def test_the_card_is_filled_and_takes_turns_with_main_memory() -> None:
    _, cache, host = caching(card=5 * SIZE)
    fill(cache)
    parked = parked_in(cache)
    assert sum(parked) == len(NAMES) - 5
    assert not any(a and b for a, b in pairwise(parked)), "no two in main memory in a row"
    assert host.peak == (5 * SIZE, 5 * SIZE)
    cache.put(keys_of("chain"), tensor(0))
    assert isinstance(cache._entries["chain", "a"].tensor, Tensor), "updates stay on the card"


@loop("pinned_meanwhile", [False, True])
def test_without_room_in_main_memory_it_stays_on_the_card(
    pinned_meanwhile: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ComfyUI pins weights while the first step runs, so less main memory may be left than was expected. If main memory
    is full, the host must not wait for the card."""
    copies, cache, host = caching(main=1e9 if pinned_meanwhile else 2.5 * SIZE)
    if pinned_meanwhile:
        host.may_take = lambda size: copies.made + size / SIZE < 2.5
    with monkeypatch.context() as patch:
        patch.setattr(Recorded, "synchronize", lambda _: pytest.fail("the host waits"))
        fill(cache)
        fill(cache)
    assert sum(parked_in(cache)) == copies.made == 2
    check_filled(cache)


def test_buffers_are_made_once_and_used_again() -> None:
    copies, cache, host = caching()
    run(cache, quantized=True)
    made, held = set(copies.pinned), host.in_main
    run(cache, quantized=True)
    assert copies.pinned == made
    cache.drop([key for key in cache.keys if key[0] in NAMES[:4]])
    fill(cache, ["e", "f", "g", "h"], ("c", "d"))
    assert (copies.pinned, host.in_main) == (made, held)
    copies.check()


@loop("fails", [False, True])
def test_unused_buffers_make_room_for_others(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a buffer cannot be unpinned, it is not used again."""
    copies, cache, host = caching(main=2 * SIZE)
    fill(cache, NAMES[:2])
    cache.drop(keys_of(NAMES[0]))

    def failing(*_: Any) -> None:
        raise InterruptedError

    if fails:
        cache.drop(keys_of(NAMES[1]))
        monkeypatch.setattr(Copies, "unpin", failing)
    with pytest.raises(InterruptedError) if fails else nullcontext():
        cache.put(keys_of("other"), torch.ones(2, 4, 32), kv=True)
    copies.check()
    if not fails:
        assert isinstance(cache._entries["other", "a"].tensor, Parked)
        assert host.in_main == SIZE * 3 // 2
    assert all(buffer in host._buffers for buffer in host._unused)


def test_where_a_read_ahead_runs_out_of_memory_it_is_read_when_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    copies, cache, _ = caching()
    fill(cache)

    def short(*_: Any, **__: Any) -> Tensor:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty_like", short)
        cache.read_ahead(CONDITIONS)
        with pytest.raises(torch.OutOfMemoryError):
            cache.read(keys_of(NAMES[0]), tensor(0))
    check_filled(cache)
    copies.check()


def test_another_order_than_that_of_the_refresh() -> None:
    """The tensors lie in main memory, although another pack sets a default device."""
    copies, cache, _ = caching()
    tensors = [tensor(n) for n in range(len(NAMES))]
    with torch.device("meta"):
        for name, each in zip(NAMES, tensors, strict=True):
            cache.put(keys_of(name), each, kv=True)
    for n in (7, 0, 3, 3, 9, 1, 2):
        assert torch.equal(cache.read(keys_of(NAMES[n]), tensor(0)), tensor(n))
    cache.put(keys_of(NAMES[3]), tensor(50), kv=True)  # while this tensor is read ahead
    assert torch.equal(cache.read(keys_of(NAMES[3]), tensor(0)), tensor(50))
    both = cache.read(((NAMES[1], "b"), (NAMES[1], "a")), tensor(0))
    assert both is not None
    assert torch.equal(both, tensor(1).flip(0))
    cache.clear()
    copies.check()
    assert copies.pinned == set()


def test_a_part_has_the_shape_of_the_tensor_it_stands_for() -> None:
    for given in (tensor(0, 5), quant4.quantize(tensor(0, 5))):
        _, _, host = caching()
        parked = host.place(given)
        assert isinstance(parked, Parked)
        for count in (1, 2, 3, 5):
            ours, theirs = parked.chunk(count), given.chunk(count)
            assert [(p.shape, p.dtype, p.device) for p in ours] == [(t.shape, t.dtype, t.device) for t in theirs]


def test_of_300_runs_that_break_off_anywhere_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run ends with the error of a failing copy, while earlier copies are still in progress."""
    copies, copy = Copies(), Copies.copy

    def failing(self: Copies, *args: Any) -> None:
        if self.count == stop:
            raise InterruptedError
        copy(self, *args)

    monkeypatch.setattr(Copies, "copy", failing)
    held = list[weakref.ref[HostMemory]]()
    for n in range(300):
        copies.count, stop = 0, n % 110
        _, cache, host = caching(copies, card=n % 3 * SIZE)
        held.append(weakref.ref(host))
        with suppress(InterruptedError):
            run(cache, quantized=n % 2 == 0, steps=2)
        cache.clear()
        check_empty(copies, cache, host)
        del cache, host
    gc.collect()
    assert not any(each() for each in held)


@loop("failing", ["unpin", "synchronize"])
def test_every_buffer_is_released_where_one_fails(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first call of `failing` raises an error. The cache must still release every buffer."""
    copies, cache, host = caching()
    fill(cache)
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


def test_memory_that_cannot_be_pinned_serves_too_and_is_tried_once() -> None:
    """Pinning is tried once, because at every failure ComfyUI logs a warning and waits for the card."""
    copies, cache, host = caching(Copies(pins=False))
    assert all(map(torch.equal, run(cache, True), run(Cache(), True)))
    assert copies.made == 1
    assert not host.pinned


def test_all_runs_copy_on_the_same_two_streams_of_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch gives out 32 streams in turn. A run that made a new stream could get one on which ComfyUI copies
    weights."""
    made = list[object]()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: made.append(object()) or made[-1])
    monkeypatch.setattr(CudaCopier, "streams", staticmethod(functools.cache(CudaCopier.streams.__wrapped__)))
    copier = CudaCopier(bool, bool)
    found = {copier.streams(torch.device("cuda", card)) for _ in range(20) for card in (0, 1)}
    assert len(made) == 4
    assert len(found) == 2


@loop("quantized", [False, True])
def test_another_condition_beside_one_of_two_lies_in_main_memory_too(quantized: bool) -> None:
    """If the prompt c replaces b during a run, the tensors of a and of c are all in main memory."""
    copies, on_host, _ = caching()
    seen = list[list[Tensor | None]]()
    for cache in (on_host, Cache()):
        cache.quantized = quantized
        fill(cache)
        fill(cache, NAMES, ("a", "c"), 50)
        assert all(isinstance(entry.tensor, Parked) is (cache is on_host) for entry in cache._entries.values())
        seen.append([cache.read(keys_of(name, ("a", "c")), tensor(0)) for name in NAMES])
        cache.clear()
    copies.check()
    assert None not in seen[0]
    assert all(map(torch.equal, *seen))
