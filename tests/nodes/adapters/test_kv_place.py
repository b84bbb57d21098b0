"""Test which keys and values are stored on the card, and which in main memory."""

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import comfy.model_management as management
import pytest
import torch
from comfy.sampler_helpers import convert_cond
from comfy.samplers import CFGGuider

from scripts.comfy_pack import pack_module
from testbed import models
from tests.loop import loop
from tests.nodes.adapters.cards import a_card, sampled
from tests.nodes.adapters.helpers import balanced
from tests.recorded_copies import Copies

memory = pack_module("nodes.adapters.kv_memory")
Reason = pack_module("toma_core.reasons").Reason
report_text = pack_module("nodes.adapters.report_text")


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """planned(left, main, **settings): return the config and the `KVCachePlan` of a run at cfg 1, with `left` free
    bytes on the card and room for `main` bytes in main memory."""
    run, model = pack_module("nodes.adapters.patch_model"), models.z_image(layers=10)
    monkeypatch.setattr(memory, "copier_of", lambda device: Copies())

    def plan(left: float, main: float = 1e12, **settings: Any) -> Any:
        monkeypatch.setattr(memory, "memory_left", lambda *_: left)
        monkeypatch.setattr(memory, "main_room", lambda: main)
        merged = balanced(model, **settings)
        guider = CFGGuider(merged)
        guider.conds = {"positive": convert_cond(models.conditioning(model, seed=1))}
        guider.set_cfg(1.0)
        return run.run_config(run.attachment_of(merged), guider, torch.zeros(1, 16, 32, 32), None)

    return plan


def test_what_is_stored_does_not_follow_free_memory_and_where_does(planned: Any) -> None:
    _, full = planned(1e12)
    assert (full.quantized, full.in_main, full.on_card) == (False, 0, full.bytes)
    _, packed = planned(full.bytes - 1)
    updates = packed.bytes - packed.keys
    assert (packed.quantized, packed.in_main, packed.on_card) == (True, 0, packed.bytes)
    # If ComfyUI fails to estimate an evaluation's memory, `left` is -inf, so nothing fits on the card.
    for left in (packed.bytes - 1, packed.bytes // 2, updates, 0, -1e12, -math.inf):
        _, found = planned(left)
        assert (found.bytes, found.quantized, found.skipped) == (packed.bytes, True, 0.0)
        assert found.staging == pytest.approx(found.keys / 5, abs=2), "keys and values of two of ten blocks"
        assert 0 < found.in_main <= found.keys
        # Only residuals, which every run caches, and the memory for copies may push weights off the card.
        assert found.on_card <= max(left, updates + found.staging)


def test_on_the_card_only(planned: Any) -> None:
    _, packed = planned(0)
    for share, fits in ((1, True), (0.9, True), (0.3, False), (-math.inf, False)):
        config, found = planned(packed.bytes * share, kv_cache="on the card only")
        assert (bool(found.bytes), found.reason is None) == (fits, fits)
        assert (found.in_main, found.main_room) == (0, 0.0)
        assert memory.host_of(found, torch.device("cpu")) is None
        assert config.skip_first_blocks == (0.15 if share == 0.9 else 0.0)
    assert not planned(0, kv_cache="off")[0].kv_cache


def test_of_fewer_blocks_before_none_at_all(planned: Any) -> None:
    config, all_of_them = planned(0)
    assert config.skip_first_blocks == 0.0
    for main, skipped in ((1.0, 0.0), (0.9, 0.15), (0.75, 0.3), (0.6, 0.5)):
        config, found = planned(0, all_of_them.keys * main)
        assert config.skip_first_blocks == found.skipped == skipped
        assert found.in_main == found.keys <= all_of_them.keys * main
    for main in (0.4, 0.0):
        _, found = planned(0, all_of_them.keys * main)
        assert (found.bytes, found.reason.id) == (0, Reason.KV_TOO_LARGE)
    for asked, skipped in ((0.2, 0.3), (5, 5)):
        assert planned(0, all_of_them.keys * 0.75, skip_first_blocks=asked)[0].skip_first_blocks == skipped


def test_a_run_skips_these_blocks_and_says_so(stats_of: Any) -> None:
    model = models.z_image(layers=10)
    merged = balanced(model)
    with a_card(0.0, quantized=True) as card:
        sampled("z_image", merged, cfg=1.0)
    with a_card(0.0, quantized=True, main=0.75 * card.peak[1]) as other:
        sampled("z_image", merged, cfg=1.0)
    other.ended()
    stats = stats_of(merged)
    assert len(stats.merged_blocks) == 7
    assert other.peak[1] == pytest.approx(0.7 * card.peak[1])
    assert "the first 30 % of the blocks are not merged" in report_text.summary(stats)
    with a_card(0.0, quantized=True, main=0.75 * card.peak[1]) as unused:
        sampled("z_image", merged, cfg=1.0, sampler="ipndm_v")
    assert "% of the blocks are not merged" not in report_text.summary(stats_of(merged)), "all steps are full"
    assert not unused.hosts


def test_the_report_says_where_they_lie(stats_of: Any) -> None:
    merged = balanced(models.z_image())
    with a_card(0.5, quantized=True, pins=False) as card:
        sampled("z_image", merged, cfg=1.0)
    card.ended()
    stats = stats_of(merged)
    assert 0.0 not in stats.kv_place
    stats.kv_place = tuple(1000 * each for each in stats.kv_place)
    on_card, in_main = (f"{each / 1e9:.1f} GB" for each in stats.kv_place)
    assert f"keys and values: {on_card} on the card, {in_main} in main memory" in report_text.summary(stats)
    assert "could not be pinned" in report_text.summary(stats)
    with a_card(1.0, quantized=True):
        sampled("z_image", merged, cfg=1.0)
    assert "keys and values" not in report_text.summary(stats_of(merged))


@pytest.fixture
def main_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """main_has(total, available): simulate main memory outside of a container."""
    monkeypatch.setattr(memory, "_CGROUPS", tmp_path)

    def simulate(total: float, available: float) -> None:
        found = SimpleNamespace(total=total, available=available)
        monkeypatch.setattr(memory, "psutil", SimpleNamespace(virtual_memory=lambda: found))

    return simulate


def has_limits(room: float, available: float) -> None:
    assert memory.main_room() == pytest.approx(room)
    assert memory.may_take(int(available - 1.1e9))
    assert not memory.may_take(int(available - 0.9e9))


def test_main_memory_has_limits(main_has: Any) -> None:
    """The room for keys and values depends on the total main memory, not on the free main memory."""
    for total, available in ((64e9, 60e9), (32e9, 9e9), (16e9, 3e9)):
        main_has(total, available)
        has_limits(0.35 * total, available)


def test_pinned_weights_of_other_models_make_way(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[int]()
    monkeypatch.setattr(management, "ensure_pin_budget", asked.append, raising=False)
    assert memory.may_take(1000)
    assert asked == [1000]


@loop(
    ("limit", "used", "files"),
    [(16e9, 4e9, 0), (16e9, 14e9, 4e9), (16e9, 15e9, 0), (math.inf, 15e9, 0), (9.2e18, 15e9, 0), (512e9, 15e9, 0)],
)
@loop("version", [1, 2])
def test_in_a_container_its_own_limit_counts(
    limit: float, used: float, files: float, version: int, main_has: Any, tmp_path: Path
) -> None:
    """psutil reports the memory of the host, not the limit of the container."""
    main_has(256e9, 200e9)
    folder = tmp_path if version == 2 else tmp_path / "memory"
    folder.mkdir(exist_ok=True)
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    texts = ("max" if limit == math.inf else int(limit), int(used))
    for name, text in zip((*names, "memory.stat"), (*texts, f"anon 1\ninactive_file {int(files)}"), strict=True):
        (folder / name).write_text(f"{text}\n")
    has_limits(0.35 * min(limit, 256e9), min(200e9, limit - used + files))


@loop(
    ("device", "available", "integrated", "copies"),
    [
        ("cuda", True, False, True),
        ("cuda", True, True, False),  # DGX Spark, Jetson and Strix Halo share main memory with their GPU
        ("cuda", False, False, True),
        *((device, True, False, False) for device in ("cpu", "mps", "xpu")),
    ],
)
def test_only_cards_with_cuda_streams_and_memory_of_their_own_use_main_memory(
    device: str, available: bool, integrated: bool, copies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace(is_integrated=int(integrated))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert (memory.copier_of(torch.device(device)) is not None) is copies


@loop("free", [1e12, 0.5, 0.0])
@loop("share", [1.0, 0.25])
@loop("by_block", [False, True])
def test_free_memory_decides_where_they_lie_once_the_model_is_loaded(
    free: float, share: float, by_block: bool, model_of: Any, monkeypatch: Any
) -> None:
    """free: how much of the keys and values fits on the card now. share: how much was planned for the card. If ComfyUI
    loads weights block by block, the weights soon fill the free memory, so the planned share is not exceeded."""
    model = model_of("z_image")
    host = pack_module("toma_core.host_memory").HostMemory(Copies(), 1000, share * 1000, 1e9, 50)
    monkeypatch.setattr(memory, "estimate_memory", lambda *_: (7e9, 5e9))
    monkeypatch.setattr(type(model), "get_free_memory", lambda *_: need + 50 + free * 1000)
    monkeypatch.setattr(type(model), "is_dynamic", lambda *_: by_block)
    need = 7e9 + management.extra_reserved_memory()
    memory.measure_room(host, model, (1, 16, 32, 32), {"positive": []})
    wanted = min(free, share) if by_block else free
    assert host.card_room == pytest.approx(wanted * 1000, abs=1e-3)


def test_pinning_that_fails_raises_nothing() -> None:
    copier, failing = pack_module("toma_core.host_memory").CudaCopier, Mock(side_effect=RuntimeError("out of handles"))
    for pin_memory, pinned in ((failing, False), (lambda _: False, False), (lambda _: True, True)):
        assert copier(pin_memory, failing).pin(torch.zeros(1)) is pinned
