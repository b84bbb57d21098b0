"""Test the `KVCachePlan`, which follows from the memory that ComfyUI leaves beside the model."""

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import comfy.model_management as management
import pytest
import torch
from comfy.controlnet import ControlBase
from comfy.sampler_helpers import convert_cond
from comfy.samplers import CFGGuider
from comfy_extras.nodes_model_advanced import ModelComputeDtype

from scripts.comfy_pack import pack_module
from testbed import models
from tests.loop import loop
from tests.nodes.adapters.families.layouts import HEIGHT, WIDTH
from tests.nodes.adapters.helpers import balanced, prompts_of

kv_memory, run = pack_module("nodes.adapters.kv_memory"), pack_module("nodes.adapters.patch_model")
SHAPE = (1, 16, HEIGHT, WIDTH)


def guider_of(model: Any, **options: Any) -> Any:
    guider = CFGGuider(model)
    guider.conds = {name: convert_cond(cond) for name, cond in prompts_of(model, **options).items()}
    return guider


def left(model: Any, **options: Any) -> float:
    result: float = kv_memory.memory_left(guider_of(model, **options), SHAPE)
    return result


def give_total(monkeypatch: pytest.MonkeyPatch, total: float) -> None:
    monkeypatch.setattr(management, "get_total_memory", lambda *_, **__: total)


def without_reserves(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("minimum_inference_memory", "extra_reserved_memory"):
        monkeypatch.setattr(management, name, lambda: 0)


@pytest.fixture
def cache_plans(pack: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    decided, decide = list[Any](), run.plan_kv_cache
    monkeypatch.setattr(run, "plan_kv_cache", lambda *a, **k: decided.append(decide(*a, **k)) or decided[-1])
    return decided


@pytest.fixture
def planned(cache_plans: list[Any], monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, float], Any]:
    """planned(model, total): return the `KVCachePlan` of a run on a device with `total` bytes."""

    def plan(model: Any, total: float) -> Any:
        give_total(monkeypatch, total)
        run.run_config(run.attachment_of(model), guider_of(model), torch.zeros(SHAPE), None)
        return cache_plans[-1]

    return plan


def test_full_precision_only_where_all_of_it_fits_beside_the_weights(flux: Any, planned: Any, monkeypatch: Any) -> None:
    """The plan is full precision, 4 bits or no cache. The memory that is free at the moment does not matter."""
    merged = balanced(flux)
    full = planned(merged, 2**34).bytes
    used = 2**34 - left(merged)
    assert used == pytest.approx(flux.model_size() * 1.1 + management.minimum_inference_memory())
    monkeypatch.setattr(management, "get_free_memory", lambda *_, **__: 1e4)
    for total, quantized in ((used + full + 1, False), (used + full - 1, True), (used, True), (full, True)):
        plan = planned(merged, total)
        assert (plan.quantized, plan.bytes == full) == (quantized, not quantized)
    assert planned(merged, plan.bytes).bytes == 0


def test_four_bits_may_fill_what_is_left_of_the_card(flux: Any, planned: Any, monkeypatch: Any) -> None:
    """A 4-bit cache may fill all memory that the weights leave. A cache that pushes weights off the card has a lower
    limit."""
    merged = balanced(flux)
    without_reserves(monkeypatch)
    monkeypatch.setattr(type(merged.model), "memory_required", lambda *_, **__: 0)
    monkeypatch.setattr(merged, "model_size", lambda: 0)
    full = planned(merged, 1e9)
    assert not full.quantized
    packed = planned(merged, full.bytes // 2)
    assert packed.quantized
    assert packed.bytes > 0.55 * (full.bytes // 2)


def test_what_is_loaded_with_the_model_counts(model_of: Any) -> None:
    """A ControlNet needs memory for its weights. Its activations may need more than the minimum that ComfyUI keeps
    free. `Guider_DualModel` has a second model; a clone of the first model shares its weights and needs no memory."""
    model, other = model_of("flux"), model_of("wan")

    class Control(ControlBase):
        needs = 0

        def get_models(self) -> list[Any]:
            return [other]

        def inference_memory_requirements(self, dtype: torch.dtype) -> int:
            return self.needs

    control, alone = Control(), left(model)
    assert alone - left(model, control=control) == pytest.approx(1.1 * other.model_size())
    control.needs = 10_000_000_000
    least = management.minimum_inference_memory() - management.extra_reserved_memory()
    activations = model.model.memory_required([2, *SHAPE[1:]])
    more = control.needs + activations - least
    assert alone - left(model, control=control) == pytest.approx(1.1 * other.model_size() + more)
    guider = guider_of(model)
    for second, size in ((model.clone(), 0), (other, other.model_size())):
        guider.uncond_model_patcher = second
        assert alone - kv_memory.memory_left(guider, SHAPE) == pytest.approx(1.1 * size)


@pytest.mark.compat
def test_the_estimate_of_a_later_comfyui_may_read_all_that_a_patcher_has(
    flux: Any, stats_of: Any, cache_plans: list[Any], warnings: Any, monkeypatch: Any
) -> None:
    """The estimate in ComfyUI's pull request 16116 reads the model's options. If the estimate fails, the run is still
    merged."""
    estimate_memory, read = kv_memory.estimate_memory, list[dict[str, Any]]()

    def later(patcher: Any, *args: Any) -> Any:
        read.append(patcher.model_options)
        assert (patcher.load_device, patcher.model_size()) == (flux.load_device, flux.model_size())
        assert patcher.get_model_object("diffusion_model") is flux.model.diffusion_model
        return estimate_memory(patcher, *args)

    merged = balanced(flux)
    out = models.sample(merged, HEIGHT, WIDTH, steps=4)
    monkeypatch.setattr(kv_memory, "estimate_memory", later)
    assert torch.equal(models.sample(merged, HEIGHT, WIDTH, steps=4), out)
    assert "transformer_options" in read[0]
    for error in (AttributeError("new"), ValueError("new"), RuntimeError()):
        monkeypatch.setattr(kv_memory, "estimate_memory", Mock(side_effect=error))
        models.sample(merged, HEIGHT, WIDTH, steps=4)
        assert stats_of(merged).merged_steps
    assert [plan.quantized for plan in cache_plans] == [False, False, True, True, True]
    assert len(warnings()) == 2
    assert "with a smaller KV cache, or with none" in warnings()[0]


@loop("dtype", ["fp32", "bf16"])
def test_the_dtype_is_that_of_the_run(dtype: str, stats_of: Any, cache_plans: list[Any]) -> None:
    """ModelComputeDtype changes the dtype only when the model is loaded. The first run must nevertheless request enough
    memory."""
    model = models.flux(dtype=torch.bfloat16)
    model.model.diffusion_model.to(torch.bfloat16)
    merged = balanced(ModelComputeDtype().patch(model, dtype)[0])
    for _ in range(2):
        models.sample(merged, HEIGHT, WIDTH, steps=4)
        assert cache_plans[-1].bytes == stats_of(merged).cache_bytes
    other = balanced(model)
    models.sample(other, HEIGHT, WIDTH, steps=4)
    assert cache_plans[-1].bytes == stats_of(other).cache_bytes == cache_plans[0].bytes // (2 if dtype == "fp32" else 1)


def test_activations_are_counted_in_the_dtype_of_the_run(model_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """ComfyUI estimates activations when ModelComputeDtype has not yet changed the model's dtype."""
    monkeypatch.setattr(management, "pytorch_attention_flash_attention", lambda: True)
    without_reserves(monkeypatch)
    give_total(monkeypatch, 1e12)
    model = model_of("flux")
    weights = model.model_size() * 1.1
    single, half = (1e12 - weights - left(m) for m in (model, ModelComputeDtype().patch(model, "bf16")[0]))
    assert single == pytest.approx(2 * half)
    assert model.model.manual_cast_dtype is None


def test_the_page_has_the_tables_and_no_cache_pushes_out_weights(pack: Any) -> None:
    """If this test fails, run `python -m benchmarks.memory_table`."""
    from benchmarks import memory_table
    from benchmarks.performance import filled

    text, chosen = memory_table.PAGE.read_text(encoding="utf-8"), memory_table.chosen()
    tables = {memory_table.TABLE: memory_table.table, memory_table.ADVICE: memory_table.advice}
    assert filled(text, tables) == text
    choices = [choice for _, each in chosen for choice in each]
    # Only residuals, which every run caches, and the memory for copies may push weights off the card.
    assert all(choice.pushed_out < 1.3e9 for choice in choices)
    for case, each in chosen:
        in_main = [choice.in_main / (1 - choice.skipped) for choice in each]
        assert in_main == sorted(in_main, reverse=True), case.title
    assert {choice.kind for choice in choices} == {"4-bit", "full"}
    assert {choice.advice for choice in choices} == {"use", "smaller", "off"}
