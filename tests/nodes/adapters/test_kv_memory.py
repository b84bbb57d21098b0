"""Test that the KV cache's memory is requested from ComfyUI, that the cache is quantized to 4 bits if memory is scarce,
and that it is released when memory runs out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from scripts.comfy_pack import pack_module
from testbed import models
from tests.loop import loop
from tests.nodes.adapters.families.layouts import HEIGHT, WIDTH
from tests.nodes.adapters.kv_helpers import KEYS, Watch, evaluated, preset, several_calls

Reason = pack_module("toma_core.reasons").Reason
report_text = pack_module("nodes.adapters.report_text")


def without_room(monkeypatch: pytest.MonkeyPatch, room: float) -> None:
    """Simulate a device with `room` bytes of memory."""
    import comfy.model_management

    monkeypatch.setattr(comfy.model_management, "get_total_memory", lambda *_, **__: room)


@pytest.mark.compat
@loop(("kind", "frames"), [("flux", 0), ("z_image", 0), ("omnigen2", 0), ("wan", 3), ("cosmos", 3)])
def test_where_room_is_short_they_are_packed(
    kind: str, frames: int, model_of: Any, stats_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, model, asked = pack_module("nodes.adapters.patch_model"), model_of(kind), list[int]()
    merged, reserved = run.apply_toma(model, preset("balanced")), pack_module("nodes.adapters.kv_memory").reserved
    size = {"steps": 4, **({"frames": frames} if frames else {})}
    with monkeypatch.context() as patch:
        patch.setattr(run, "reserved", lambda m, n: asked.append(n) or reserved(m, n))
        exact, unmerged = models.sample(merged, HEIGHT, WIDTH, **size), models.sample(model, HEIGHT, WIDTH, **size)
        held = stats_of(merged).cache_bytes
        without_room(patch, 4 * held - 1)
        found = models.sample(merged, HEIGHT, WIDTH, **size)
    packed = stats_of(merged)
    assert packed.without_kv_cache is None
    # The requested size is that of a wide model. In this narrow model, smaller quantization groups make the 4-bit cache
    # larger.
    assert asked[0] == held
    assert asked[1] <= packed.cache_bytes <= 0.4 * held
    assert 0 < (found - exact).norm() < 0.5 * (exact - unmerged).norm()


def test_after_out_of_memory_all_steps_are_full(
    model_of: Any, attach: Any, stats_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, trial = model_of("wan"), pack_module("toma_core.kernels.dispatch")
    monkeypatch.setattr(pack_module("nodes.adapters.kv_memory"), "memory_left", lambda *_: 0)
    calls = list[int]()

    def full(x: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) > 3:
            raise torch.OutOfMemoryError
        return quantize(x)

    quantize = trial.quantize
    monkeypatch.setattr(trial, "quantize", full)
    merged = attach(model, **KEYS)
    (own, *_), found = evaluated(model, frames=3), evaluated(merged, frames=3)
    assert all(torch.equal(clip, own) for clip in found)
    stats = stats_of(merged)
    assert stats.cache_disabled
    assert "out of memory for the KV cache" in report_text.summary(stats)


@loop("at", [0, 1, 2, 7])
def test_where_packing_runs_out_of_memory_in_a_merged_step(
    at: int, model_of: Any, attach: Any, stats_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """at: the number of tensors of keys or values that a merged step quantizes before memory runs out. The evaluation
    is repeated as a full evaluation."""
    model, trial = model_of("wan"), pack_module("toma_core.kernels.dispatch")
    monkeypatch.setattr(pack_module("nodes.adapters.kv_memory"), "memory_left", lambda *_: 0)
    calls, quantize = list[int](), trial.quantize
    kept_whole = 2 * len(model.model.diffusion_model.blocks)

    def full(x: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) > kept_whole + at:
            raise torch.OutOfMemoryError
        return quantize(x)

    monkeypatch.setattr(trial, "quantize", full)
    merged, watch = attach(model, **KEYS), Watch(1)
    (own, *_), found = evaluated(model, frames=3), evaluated(watch.on(merged), frames=3)
    assert all(torch.equal(clip, own) for clip in found)
    assert all(k.shape[1] == v.shape[1] for _, k, v in watch.seen)
    stats = stats_of(merged)
    assert stats.cache_disabled
    assert (stats.merged_evaluations, stats.merged_steps) == (0, {})
    assert str(report_text.headline(stats)) == f"Nothing was merged: {Reason.KV_CACHE_DISABLED()}"


@contextmanager
def short_of_memory(layer: Any, *at: int) -> Iterator[None]:
    """Raise an out-of-memory error at these calls of a layer, counted from 1."""
    calls, plain = list[int](), layer.forward

    def short(x: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) in at:
            raise torch.OutOfMemoryError
        return plain(x)

    layer.forward = short
    try:
        yield
    finally:
        del layer.forward


@loop("call", [3, 4, 5, 6])
def test_after_out_of_memory_of_one_condition_the_other_is_full_too(
    call: int, model_of: Any, attach: Any, stats_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Conditions are in separate calls. If only one of two conditions were full, guidance would amplify the error of
    the merged one."""
    model = model_of("wan")
    merged = attach(model, **KEYS)
    monkeypatch.setattr(type(model.model), "memory_required", lambda *_, **__: 1e20)
    with short_of_memory(model.model.diffusion_model.blocks[-1].ffn[0], call):
        found = evaluated(merged, frames=3)
    own, step = evaluated(model, frames=3)[0], (call - 1) // 2
    assert all(torch.equal(clip, own) for clip in found[step:])
    assert stats_of(merged).merged_evaluations == step - 1


@loop("packed", [False, True])
def test_conditions_that_are_split_after_the_full_step_hold_no_more(
    packed: bool, model_of: Any, stats_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ComfyUI joins conditions in one call only while enough memory is free. A cache that a full step has filled may
    leave too little."""
    from comfy.patcher_extension import WrappersMP

    model, evaluations = model_of("wan"), list[int]()
    if packed:
        monkeypatch.setattr(pack_module("nodes.adapters.kv_memory"), "memory_left", lambda *_: 0)
    joined = pack_module("nodes.adapters.patch_model").apply_toma(model, preset("balanced"))
    wanted, held = models.sample(joined, HEIGHT, WIDTH, frames=3, steps=4), stats_of(joined).cache_bytes
    split = joined.clone()

    def counting(executor: Any, *args: Any, **kwargs: Any) -> Any:
        evaluations.append(1)
        return executor(*args, **kwargs)

    split.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, "count", counting)
    monkeypatch.setattr(type(model.model), "memory_required", lambda *_, **__: 0 if len(evaluations) < 2 else 1e20)
    found = models.sample(split, HEIGHT, WIDTH, frames=3, steps=4)
    assert stats_of(split).cache_bytes == held
    torch.testing.assert_close(found, wanted, rtol=0, atol=(1e-2 if packed else 1e-4) * float(wanted.abs().max()))


@loop("call", [3, 4])
def test_where_memory_runs_out_all_calls_of_the_evaluation_are_made_again(
    call: int, model_of: Any, stats_of: Any
) -> None:
    model = several_calls(model_of("wan"))
    own = models.sample(model, HEIGHT, WIDTH, frames=3, steps=4, cfg=5.0)
    merged = pack_module("nodes.adapters.patch_model").apply_toma(model, preset("balanced"))
    with short_of_memory(model.model.diffusion_model.blocks[-1].ffn[0], call):
        assert torch.equal(models.sample(merged, HEIGHT, WIDTH, frames=3, steps=4, cfg=5.0), own)
    stats = stats_of(merged)
    assert (stats.evaluations, stats.merged_evaluations, stats.merged_steps) == (8, 0, {})


@loop("schedule", ["standard_static", "standard_uniform", "looped_uniform"])
def test_context_windows_that_move_keep_no_keys(schedule: str, model_of: Any, stats_of: Any) -> None:
    from comfy_extras.nodes_context_windows import WanContextWindowsManualNode as Windows

    run, model = pack_module("nodes.adapters.patch_model"), model_of("wan")
    windowed = Windows.execute(model, 17, 8, schedule, 1, False, "pyramid", False).result[0]
    merged, without = (run.apply_toma(windowed, preset("balanced", **more)) for more in ({}, {"kv_cache": False}))
    asked: dict[str, Any] = {"frames": 13, "steps": 8, "cfg": 5.0}
    found = models.sample(merged, HEIGHT, WIDTH, **asked)
    moves = stats_of(merged).without_kv_cache == Reason.KV_CONTEXT_WINDOWS()
    assert moves == (schedule != "standard_static")
    if moves:
        assert torch.equal(found, models.sample(without, HEIGHT, WIDTH, **asked))


@loop("step", [0, 2])
def test_where_the_model_runs_out_of_memory_it_runs_again_without(
    step: int, model_of: Any, attach: Any, stats_of: Any
) -> None:
    """Without caches the memory suffices, so the evaluation is repeated without caches."""
    model = model_of("flux")
    merged = attach(model, **KEYS)
    with short_of_memory(model.model.diffusion_model.single_blocks[-1].linear2, step + 1):
        found = evaluated(merged)
    own = evaluated(model)[0]
    assert torch.equal(found[-1], own)
    assert all(torch.equal(picture, own) for picture in found[step:])
    assert stats_of(merged).cache_disabled


def test_also_in_a_last_step_that_is_in_full(model_of: Any, stats_of: Any) -> None:
    """Caches of earlier steps occupy memory in the last step. If memory does not suffice without caches either, the
    model's own error is raised."""
    model = model_of("flux")
    merged = pack_module("nodes.adapters.patch_model").apply_toma(model, preset("balanced"))
    layer, asked = model.model.diffusion_model.single_blocks[-1].linear2, {"steps": 4, "cfg": 1.0}
    wanted = models.sample(merged, HEIGHT, WIDTH, **asked)
    with short_of_memory(layer, 4):
        assert torch.equal(models.sample(merged, HEIGHT, WIDTH, **asked), wanted)
    assert stats_of(merged).cache_disabled
    with short_of_memory(layer, 4, 5), pytest.raises(torch.OutOfMemoryError):
        models.sample(merged, HEIGHT, WIDTH, **asked)


def test_without_room_the_preset_is_as_it_was(model_of: Any, stats_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = pack_module("nodes.adapters.patch_model")
    model = model_of("flux")
    without_room(monkeypatch, 1000)
    merged, without = (
        run.apply_toma(model, preset("balanced")),
        run.apply_toma(model, preset("balanced", kv_cache=False)),
    )
    assert torch.equal(*(models.sample(m, HEIGHT, WIDTH, steps=8) for m in (merged, without)))
    assert stats_of(merged).without_kv_cache.id is Reason.KV_TOO_LARGE
    assert "do not attend to all tokens" in report_text.summary(stats_of(merged))
    assert stats_of(without).without_kv_cache is None


def test_comfyui_receives_the_size_before_it_loads_the_model(
    model_of: Any, monkeypatch: pytest.MonkeyPatch, stats_of: Any
) -> None:
    """ComfyUI must reserve the cache's memory when it loads the model, not later."""
    import comfy.model_management

    model, asked, load = model_of("flux"), list[float](), comfy.model_management.load_models_gpu

    def loading(*args: Any, memory_required: float = 0, **kwargs: Any) -> Any:
        asked.append(memory_required)
        return load(*args, memory_required=memory_required, **kwargs)

    monkeypatch.setattr(comfy.model_management, "load_models_gpu", loading)
    merged = pack_module("nodes.adapters.patch_model").apply_toma(model, preset("balanced"))
    for m in (model, merged):
        models.sample(m, HEIGHT, WIDTH, steps=4)
    assert asked[1] - asked[0] == stats_of(merged).cache_bytes > 0
    assert "memory_required" not in vars(model.model)


def test_room_is_asked_for_with_references_that_are_merged(model_of: Any, attach: Any, stats_of: Any) -> None:
    model = model_of("flux")
    reference = torch.randn(1, 16, HEIGHT, WIDTH, generator=torch.Generator().manual_seed(9))
    conds = [models.conditioning(model, 7, seed, reference_latents=[reference]) for seed in (1, 2)]
    merged, asked = attach(model, **KEYS, merge_references=True), list[int]()
    memory = pack_module("nodes.adapters.kv_memory").reserved
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            pack_module("nodes.adapters.patch_model"), "reserved", lambda m, n: asked.append(n) or memory(m, n)
        )
        models.sample(merged, HEIGHT, WIDTH, steps=4, positive=conds[0], negative=conds[1])
    assert asked == [stats_of(merged).cache_bytes]


def passed_on(args: dict[str, Any]) -> dict[str, Any]:
    return args


@loop("cfg", [1.0, 3.0])
@loop("broken", ["", "vace", "animate", "shown", "replaced"])
def test_room_is_asked_for_every_chain(broken: str, cfg: float, attach: Any, stats_of: Any) -> None:
    """Each chain of blocks caches a residual. Chains end where the model or another node reads all tokens between
    blocks."""
    kinds: dict[str, dict[str, Any]] = {
        "vace": {"base": "WAN21_Vace", "kind": "WAN21_Vace", "vace_layers": 3, "vace_in_dim": 96},
        "animate": {"base": "WAN22_Animate", "kind": "WAN22_Animate"},
    }
    model = models.wan(**{"layers": 6, "model_type": broken, **kinds[broken]} if broken in kinds else {})
    if broken == "shown":
        model.set_model_patch(passed_on, "double_block")
    elif broken == "replaced":
        model.set_model_patch_replace(lambda args, more: more["original_block"](args), "dit", "double_block", 1)
    merged, asked = attach(model, **KEYS), list[int]()
    memory = pack_module("nodes.adapters.kv_memory").reserved
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            pack_module("nodes.adapters.patch_model"), "reserved", lambda m, n: asked.append(n) or memory(m, n)
        )
        models.sample(merged, HEIGHT, WIDTH, frames=3, steps=4, cfg=cfg)
    assert asked == [stats_of(merged).cache_bytes]


def test_other_patches_of_the_same_function_remain(model_of: Any) -> None:
    """Two overlapping runs patch the same function of the model."""
    reserved, model = pack_module("nodes.adapters.kv_memory").reserved, model_of("flux").model
    shape = [1, 16, HEIGHT, WIDTH]
    usual = model.memory_required(shape)
    one, other = reserved(model, 100), reserved(model, 10)
    one.__enter__()
    other.__enter__()
    assert model.memory_required(shape) == usual + 110
    one.__exit__(None, None, None)
    assert model.memory_required(shape) == usual + 10
    other.__exit__(None, None, None)
    assert "memory_required" not in vars(model)
    with reserved(model, 100):
        model.memory_required = theirs = lambda *args, **kwargs: 5
    assert model.memory_required is theirs
    del model.memory_required
