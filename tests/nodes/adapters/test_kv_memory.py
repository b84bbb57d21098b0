"""Test that ComfyUI reserves the KV cache's memory. Also test 4-bit caches, and full steps after memory has run out."""

from inspect import signature
from typing import Any

import comfy.model_management as management
import pytest
import torch
from torch import Tensor

from scripts.comfy_pack import pack_module
from testbed import models
from tests.loop import loop
from tests.nodes.adapters.families.layouts import HEIGHT, WIDTH, noise
from tests.nodes.adapters.helpers import balanced, prompts_of, split_calls, split_calls_when
from tests.nodes.adapters.kv_helpers import KEYS, Watch, evaluated, failing, overridden, several_calls

Reason = pack_module("toma_core.reasons").Reason
report_text = pack_module("nodes.adapters.report_text")
kv_memory = pack_module("nodes.adapters.kv_memory")


@pytest.mark.compat
@loop(("kind", "frames"), [("flux", 1), ("z_image", 1), ("omnigen2", 1), ("wan", 3), ("cosmos", 3)])
def test_where_room_is_short_they_are_packed(
    kind: str, frames: int, model_of: Any, stats_of: Any, requested: list[int], monkeypatch: Any
) -> None:
    model, size = model_of(kind), {"steps": 4, "frames": frames}
    merged = balanced(model)
    exact, unmerged = (models.sample(each, HEIGHT, WIDTH, **size) for each in (merged, model))
    held = stats_of(merged).cache_bytes
    monkeypatch.setattr(management, "get_total_memory", lambda *_, **__: 4 * held - 1)
    found = models.sample(merged, HEIGHT, WIDTH, **size)
    packed = stats_of(merged)
    assert packed.unmerged_calls == {}
    # The requested size assumes the quantization groups of a wide model. This narrow model has smaller groups, so its
    # 4-bit cache is larger.
    assert requested[0] == held
    assert requested[1] <= packed.cache_bytes <= 0.4 * held
    assert 0 < (found - exact).norm() < 0.5 * (exact - unmerged).norm()


@loop("at", [-2, 0, 1, 2, 7])
def test_where_packing_runs_out_of_memory_all_steps_are_full(
    at: int, model_of: Any, attach: Any, stats_of: Any, monkeypatch: Any
) -> None:
    """at: the number of tensors of keys or values that a merged step quantizes before memory runs out. At -2, memory
    runs out before the last two tensors of the refresh. Then the evaluation is repeated in full."""
    monkeypatch.setattr(kv_memory, "memory_left", lambda *_: 0)  # so the cache has 4 bits
    model, trial = model_of("wan"), pack_module("toma_core.kernels.dispatch")
    calls, quantize = list[int](), trial.quantize
    kept_whole = 2 * len(model.model.diffusion_model.blocks)

    def full(x: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) > kept_whole + at:
            raise torch.OutOfMemoryError
        return quantize(x)

    monkeypatch.setattr(trial, "quantize", full)
    merged, watch = attach(model, **KEYS), Watch(1)
    (own, *_), found = evaluated(model, frames=3), evaluated(overridden(merged, watch), frames=3)
    assert all(torch.equal(clip, own) for clip in found)
    assert all(k.shape[1] == v.shape[1] for _, k, v in watch.seen)
    stats = stats_of(merged)
    assert (stats.merged_in.total(), stats.merged_steps) == (0, {})
    assert str(report_text.headline(stats)) == f"Nothing was merged: {Reason.KV_CACHE_DISABLED()}"


@loop(("several", "call"), [(False, 3), (False, 4), (False, 5), (False, 6), (True, 3), (True, 4)])
def test_where_memory_runs_out_all_calls_of_the_evaluation_are_made_again(
    several: bool, call: int, model_of: Any, attach: Any, stats_of: Any, monkeypatch: Any
) -> None:
    """If one of two calls remained merged, guidance would amplify its error. several: whether another node adds the
    second call. If not, the two conditions have separate calls."""
    model = several_calls(model_of("wan")) if several else model_of("wan")
    merged, step = attach(model, **KEYS), (call - 1) // 2
    if not several:
        split_calls(monkeypatch, model)
    failing(monkeypatch, model.model.diffusion_model.blocks[-1], call, torch.OutOfMemoryError())
    found, own = evaluated(merged, frames=3), evaluated(model, frames=3)[0]
    assert all(torch.equal(clip, own) for clip in found[step:])
    stats = stats_of(merged)
    assert (stats.evaluations, stats.merged_in.total()) == (4 * (1 + several), step - 1)


@loop("quantized", [False, True])
def test_conditions_that_are_split_after_the_full_step_hold_no_more(
    quantized: bool, model_of: Any, stats_of: Any, monkeypatch: Any
) -> None:
    """A cache that a full step has filled may leave too little memory to join conditions in one call."""
    model = model_of("wan")
    if quantized:
        monkeypatch.setattr(kv_memory, "memory_left", lambda *_: 0)
    joined = balanced(model)
    wanted, held = models.sample(joined, HEIGHT, WIDTH, frames=3, steps=4), stats_of(joined).cache_bytes
    split = joined.clone()
    split_calls_when(monkeypatch, split, lambda evaluation: evaluation > 1)
    found = models.sample(split, HEIGHT, WIDTH, frames=3, steps=4)
    assert stats_of(split).cache_bytes == held
    torch.testing.assert_close(found, wanted, rtol=0, atol=(1e-2 if quantized else 1e-4) * float(wanted.abs().max()))


@loop("schedule", ["standard_static", "standard_uniform", "looped_uniform"])
def test_context_windows_that_move_keep_no_keys(schedule: str, model_of: Any, stats_of: Any) -> None:
    from comfy_extras.nodes_context_windows import WanContextWindowsManualNode as Windows

    windowed = Windows.execute(model_of("wan"), 17, 8, schedule, 1, False, "pyramid", False).result[0]
    merged = balanced(windowed)
    asked: dict[str, Any] = {"frames": 13, "steps": 4, "cfg": 5.0}
    found = models.sample(merged, HEIGHT, WIDTH, **asked)
    moves = list(stats_of(merged).unmerged_calls) == [Reason.KV_CONTEXT_WINDOWS()]
    assert moves == (schedule != "standard_static") != bool(stats_of(merged).merged_steps)
    if moves:
        assert torch.equal(found, models.sample(windowed, HEIGHT, WIDTH, **asked))


def test_also_in_a_last_step_that_is_in_full(model_of: Any, stats_of: Any, monkeypatch: Any) -> None:
    """Memory runs out in the last step, which is full, so the step is repeated. If the repetition fails too, the error
    is raised."""
    model = model_of("flux")
    merged = balanced(model)
    block, asked = model.model.diffusion_model.single_blocks[-1], {"steps": 4, "cfg": 1.0}
    wanted = models.sample(merged, HEIGHT, WIDTH, **asked)
    failing(monkeypatch, block, 4, torch.OutOfMemoryError())
    assert torch.equal(models.sample(merged, HEIGHT, WIDTH, **asked), wanted)
    assert list(stats_of(merged).unmerged_calls) == [Reason.KV_CACHE_DISABLED()]
    failing(monkeypatch, block, 4, torch.OutOfMemoryError(), times=2)
    with pytest.raises(torch.OutOfMemoryError):
        models.sample(merged, HEIGHT, WIDTH, **asked)


def test_without_room_nothing_is_merged(flux: Any, stats_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(management, "get_total_memory", lambda *_, **__: 1000)
    merged = balanced(flux)
    assert torch.equal(*(models.sample(m, HEIGHT, WIDTH, steps=8) for m in (merged, flux)))
    assert "Nothing was merged: the KV cache would take" in str(report_text.headline(stats_of(merged)))


def test_comfyui_receives_the_size_before_it_loads_the_model(flux: Any, monkeypatch: Any, stats_of: Any) -> None:
    """ComfyUI must reserve the cache's memory when it loads the model, not later."""
    asked, load = list[float](), management.load_models_gpu

    def loading(*args: Any, memory_required: float = 0, **kwargs: Any) -> Any:
        asked.append(memory_required)
        return load(*args, memory_required=memory_required, **kwargs)

    monkeypatch.setattr(management, "load_models_gpu", loading)
    merged = balanced(flux)
    for model in (flux, merged):
        models.sample(model, HEIGHT, WIDTH, steps=4)
    assert asked[1] - asked[0] == stats_of(merged).cache_bytes > 0
    assert "memory_required" not in vars(flux.model)


@loop("cfg", [1.0, 3.0])
@loop("broken", ["", "vace", "animate", "shown", "replaced", "references"])
def test_room_is_asked_for_every_chain(
    broken: str, cfg: float, flux: Any, attach: Any, stats_of: Any, requested: Any
) -> None:
    """Chains of blocks end where the model or another node reads all tokens. Each chain caches a residual. Merged
    references have cache entries of their own."""
    kinds: dict[str, dict[str, Any]] = {
        "vace": {"base": "WAN21_Vace", "kind": "WAN21_Vace", "vace_layers": 3, "vace_in_dim": 96},
        "animate": {"base": "WAN22_Animate", "kind": "WAN22_Animate"},
    }
    model = models.wan(**{"layers": 6, "model_type": broken, **kinds[broken]} if broken in kinds else {})
    settings, asked = KEYS, {"frames": 3, "steps": 4, "cfg": cfg}
    if broken == "shown":
        model.set_model_patch(lambda args: args, "double_block")
    elif broken == "replaced":
        model.set_model_patch_replace(lambda args, more: more["original_block"](args), "dit", "double_block", 1)
    elif broken == "references":
        model, settings = flux, {**KEYS, "merge_references": True}
        asked = {"steps": 4, "cfg": cfg, **prompts_of(model, reference_latents=[noise(1, 16, HEIGHT, WIDTH)])}
    merged = attach(model, **settings)
    models.sample(merged, HEIGHT, WIDTH, **asked)
    assert requested == [stats_of(merged).cache_bytes]


def test_other_patches_of_the_same_function_remain(model_of: Any) -> None:
    """Two overlapping runs patch the same function of the model."""
    reserved, model = kv_memory.reserved, model_of("flux").model
    shape = [1, 16, HEIGHT, WIDTH]
    usual, parameters = model.memory_required(shape), signature(model.memory_required)
    one, other = reserved(model, 100), reserved(model, 10)
    one.__enter__()
    assert signature(model.memory_required) == parameters  # ComfyUI passes only what a model's own function takes
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
