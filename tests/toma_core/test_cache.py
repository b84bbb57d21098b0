"""Test that a `Cache` stores tensors by key, and that it stores and counts each tensor once."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from tests.loop import loop
from tests.toma_core.cached_runs import at, features, passed, run_of
from toma_core import RunState, Schedule, ToMAConfig
from toma_core.cache import Cache, Keys


def read(cache: Cache, keys: Keys, like: Tensor) -> Tensor:
    found = cache.read(keys, like)
    assert found is not None
    return found


def test_parts_in_the_cached_order_are_not_copied() -> None:
    run, update = run_of(), features(0, 2)
    run.cache.put((("", "cond"), ("", "uncond")), update)
    assert run.cache.read((("", "cond"), ("", "uncond")), update) is update
    assert torch.equal(read(run.cache, (("", "uncond"), ("", "cond")), update), update.flip(0))
    run.cache.put((("", "cond"),), features(1))
    assert torch.equal(read(run.cache, (("", "cond"), ("", "uncond")), update), torch.cat([features(1), update[1:]])), (
        "the newer one"
    )


def test_devices_that_keep_at_once_lose_nothing() -> None:
    """The second device begins its call before the first device has ended its own."""
    run = run_of()
    first, second = (
        at(run, 0, "cond", takes_part=("cond", "uncond")),
        at(run, 0, "uncond", takes_part=("cond", "uncond")),
    )
    for evaluation, seed in ((second, 1), (first, 0)):
        detail = evaluation.cached("block", features(seed))
        assert detail is not None
        detail.store(features(seed))
    assert torch.equal(
        read(run.cache, (("block", "cond"), ("block", "uncond")), features(0, 2)), torch.cat([features(0), features(1)])
    )


def test_memory_is_counted_and_freed() -> None:
    run = run_of()
    for name in ("a", "b"):
        passed(features(0, 2), at(run, 0, "cond", "uncond"), name)
    one = features(0, 2).nbytes
    passed(features(0, 2), at(run, 3, "cond", "uncond"), "a")
    assert run.cache.peak_bytes == 2 * one
    held = [weakref.ref(update) for update, _, _ in run.cache._entries.values()]
    assert len(held) == 2
    assert run.close().cache_bytes == 2 * one
    assert [ref() for ref in held] == [None, None]


def test_a_residual_is_held_and_counted_as_long_as_one_of_its_parts() -> None:
    run, first = run_of(), features(0, 2)
    held = weakref.ref(first)
    one = features(0).nbytes
    run.cache.put((("", "a"), ("", "b")), first)
    del first
    run.cache.put((("", "c"), ("", "d")), features(1, 2))
    assert held() is not None
    assert run.cache.peak_bytes == 4 * one, "memory of a part is that of the joint residual"
    run.cache.put((("", "a"), ("", "b")), features(2, 2))
    assert held() is None
    assert run.cache.peak_bytes == 4 * one


@loop("packs", [False, True])
def test_parts_of_a_joint_residual_are_held_once(packs: bool) -> None:
    """Two conditions come in one call at first and in separate calls later. The memory in use must not grow."""
    run, first = run_of(), torch.randn(2, 8, 64)
    run.cache.quantized = packs
    run.cache.put((("", "a"), ("", "b")), first.clone(), kv=True)
    held = run.cache.peak_bytes
    for step in range(2):
        for n, key in enumerate("ab"):
            moved = first[n : n + 1] * (step + 2)
            run.cache.put((("", key),), moved, kv=True)
            torch.testing.assert_close(
                read(run.cache, (("", key),), moved), moved, rtol=0, atol=0.3 * (step + 2) if packs else 0.0
            )
    assert run.cache.peak_bytes == held
    torch.testing.assert_close(
        read(run.cache, (("", "b"), ("", "a")), first), 3 * first.flip(0), rtol=0, atol=0.9 if packs else 0.0
    )


@loop("quantized", [False, True])
def test_a_condition_that_takes_the_place_of_another_holds_its_own_memory_alone(quantized: bool) -> None:
    """Two prompts alternate with the same negative prompt. The cache must hold one tensor for each of the three."""
    cache, (one, two) = RunState(Schedule(ToMAConfig())).cache, torch.randn(2, 2, 8, 64)
    cache.quantized = quantized
    cache.put((("a", "negative"), ("a", "first")), one, kv=True)
    each = cache.held // 2
    cache.put((("a", "negative"), ("a", "second")), two, kv=True)
    assert (cache.held, cache.peak_bytes) == (3 * each, 3 * each)
    for name, wanted in (("negative", two[:1]), ("first", one[1:]), ("second", two[1:])):
        assert torch.allclose(read(cache, (("a", name),), wanted), wanted, atol=0.4 if quantized else 0)
    cache.drop([("a", "second")])
    assert cache.held == 2 * each
