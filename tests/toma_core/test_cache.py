"""Test that a `Cache` stores tensors by key, and that it stores and counts each tensor once."""

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
    cache, update, keys = run_of().cache, features(0, 2), (("", "cond"), ("", "uncond"))
    cache.put(keys, update)
    assert cache.read(keys, update) is update
    assert torch.equal(read(cache, keys[::-1], update), update.flip(0))
    cache.put(keys[:1], features(1))
    assert torch.equal(read(cache, keys, update), torch.cat([features(1), update[1:]])), "the newer one"


def test_devices_that_keep_at_once_lose_nothing() -> None:
    """Two devices compute one condition each. The second begins its call before the first has ended its call."""
    run = run_of()
    both = "cond", "uncond"
    first, second = (at(run, 0, condition, takes_part=both) for condition in both)
    for evaluation, seed in ((second, 1), (first, 0)):
        detail = evaluation.cached("block", features(seed))
        assert detail is not None
        detail.store(features(seed))
    found = read(run.cache, tuple(("block", condition) for condition in both), features(0, 2))
    assert torch.equal(found, torch.cat([features(0), features(1)]))


def test_memory_is_counted_and_freed() -> None:
    run, one = run_of(), features(0, 2).nbytes
    for step, name in ((0, "a"), (0, "b"), (3, "a")):
        passed(features(0, 2), at(run, step, "cond", "uncond"), name)
    assert run.cache.peak_bytes == 2 * one
    held = [weakref.ref(update) for update, _, _ in run.cache._entries.values()]
    assert len(held) == 2
    assert run.close().cache_bytes == 2 * one
    assert [ref() for ref in held] == [None, None]


@loop("packs", [False, True])
def test_parts_of_a_joint_residual_are_held_once(packs: bool) -> None:
    """Two conditions come in one call at first and in separate calls later. The memory in use must not grow."""
    cache, first, keys = run_of().cache, torch.randn(2, 8, 64), (("", "a"), ("", "b"))
    cache.quantized, atol = packs, 0.9 * packs
    cache.put(keys, first.clone(), kv=True)
    held = cache.peak_bytes
    for factor in (2, 3):
        for n, key in enumerate(keys):
            moved = factor * first[n : n + 1]
            cache.put((key,), moved, kv=True)
            torch.testing.assert_close(read(cache, (key,), moved), moved, rtol=0, atol=atol)
    assert cache.peak_bytes == cache.held == held
    torch.testing.assert_close(read(cache, keys[::-1], first), 3 * first.flip(0), rtol=0, atol=atol)


@loop("quantized", [False, True])
def test_a_condition_that_takes_the_place_of_another_holds_its_own_memory_alone(quantized: bool) -> None:
    """Two prompts alternate with the same negative prompt. The cache must hold one tensor for each of the three
    prompts."""
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
