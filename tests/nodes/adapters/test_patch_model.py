"""Test complete runs. A run that merges nothing equals the run without ToMA bit for bit. No run changes the model or a
clone."""

import copy
import gc
import logging
import pickle
from typing import Any

import comfy.model_management
import pytest
import torch
from comfy.patcher_extension import WrappersMP

from scripts.comfy_pack import pack_module
from testbed import models
from tests.loop import loop
from tests.nodes.adapters.helpers import balanced, every_kind
from tests.nodes.adapters.kv_helpers import overridden

run = pack_module("nodes.adapters.patch_model")
Reason = pack_module("toma_core.reasons").Reason
report_text = pack_module("nodes.adapters.report_text")
SIDE = 24


def sampled(model: Any, side: int = SIDE, **options: Any) -> torch.Tensor:
    return models.sample(model, side, side, **options)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    assert a.isfinite().all()
    return torch.equal(a, b)


@every_kind
@pytest.mark.compat
@loop("settings", [{"ratio": 0.0}, {"start_percent": 0.4, "end_percent": 0.4}])
def test_settings_that_never_merge_return_the_very_same_object(model: Any, attach: Any, settings: Any) -> None:
    assert attach(model, **settings) is model


@every_kind
@pytest.mark.compat
@loop(
    ("settings", "reason"),
    [
        ({"start_percent": 0.98}, Reason.EVERY_STEP_FULL()),
        ({"end_percent": 0.0001, "start_percent": 0.00005}, Reason.EVERY_STEP_FULL()),
        ({"min_tokens": 1000}, Reason.TOO_FEW_TOKENS(least=1000)),
        ({"skip_first_blocks": 11}, Reason.SKIP_FIRST_BLOCKS(count=11)),
    ],
)
def test_nothing_to_merge(
    model: Any, attach: Any, stats_of: Any, settings: Any, reason: Any, no_state_left: None
) -> None:
    patched = attach(model, **settings)
    assert same(sampled(patched), sampled(model))
    assert stats_of(patched).merged_blocks == set()
    assert report_text.summary(stats_of(patched)).startswith("Nothing was merged: ")
    assert report_text.headline(stats_of(patched)).id.value == "nothing_merged"
    assert str(reason) in report_text.summary(stats_of(patched))


@every_kind
@pytest.mark.compat
@loop("error", [ValueError, comfy.model_management.InterruptProcessingException])
def test_block_fails(model: Any, attach: Any, hooks_left: Any, no_state_left: None, error: type[BaseException]) -> None:
    calls = 0

    def failing(func: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == fail_at:
            assert hooks_left(model)
            raise error
        return func(*args, **kwargs)

    fail_at = 9 if hasattr(model.model.diffusion_model, "double_blocks") else 45
    patched = attach(overridden(model, failing))
    with pytest.raises(error):
        sampled(patched)
    assert hooks_left(model) == []
    assert calls == fail_at
    fail_at = -1
    assert same(sampled(patched), sampled(attach(model)))


@every_kind
@pytest.mark.compat
def test_branches_of_one_loader_are_each_as_if_alone(model: Any, attach: Any, stats_of: Any) -> None:
    settings = [{"ratio": 0.25}, {"ratio": 0.75, "granularity": "module"}]
    alone = [sampled(attach(model, **s)) for s in settings]
    branches = [attach(model, **s) for s in settings]
    for _ in range(2):
        for branch, expected in zip(branches, alone, strict=True):
            assert same(sampled(branch), expected)
    assert stats_of(branches[0]) is not stats_of(branches[1])
    assert stats_of(branches[0]).grids != stats_of(branches[1]).grids


@every_kind
@pytest.mark.compat
def test_last_settings_count_and_change_no_earlier_ones(model: Any, attach: Any, stats_of: Any) -> None:
    first = attach(model, ratio=0.75, granularity="module")
    expected, twice, removed = sampled(first), attach(first, ratio=0.25), attach(first, ratio=0.0)
    assert same(sampled(twice), sampled(attach(model, ratio=0.25)))
    assert stats_of(twice).evaluations == 3
    assert removed is not model
    assert run.attachment_of(removed) is None
    assert "toma" not in str(removed.wrappers)
    assert same(sampled(removed), sampled(model))
    assert same(sampled(first), expected)


@every_kind
@loop("how", [{"disable_dynamic": True}, {"force_deepcopy": True}], ids=str)
def test_clones_carry_it_along(model: Any, kind: str, new_model: Any, attach: Any, how: dict[str, bool]) -> None:
    patched = attach(model)
    expected = sampled(patched)
    if not how.keys() <= {*patched.clone.__code__.co_varnames}:
        pytest.skip("this ComfyUI has no such clones")
    patched.cached_patcher_init = (lambda **_: new_model(kind), ())
    clone = patched.clone(**how)
    assert clone.model is not model.model or "disable_dynamic" in how
    assert same(sampled(clone), expected)


def without_theirs(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options without the test's own functions, which cannot be pickled."""
    theirs = "patches", "optimized_attention_override", "sampler_post_cfg_function"
    nested = {key: value for key, value in options.items() if key not in theirs}
    if "transformer_options" in nested:
        nested["transformer_options"] = without_theirs(nested["transformer_options"])
    return nested


def pickled(options: dict[str, Any]) -> Any:
    return pickle.loads(pickle.dumps(options))  # noqa: S301 - our own


copies = loop("copied", [copy.copy, copy.deepcopy, pickled])
settings_of = loop("preset", ["", "balanced"])


def with_preset(model: Any, preset: str, attach: Any) -> Any:
    """Apply a preset to a model, as the nodes do, or plain settings if `preset` is empty."""
    return balanced(model, preset) if preset else attach(model)


@every_kind
@copies
@settings_of
def test_options_copied_before_sampling(model: Any, copied: Any, preset: str, attach: Any, stats_of: Any) -> None:
    """Packs copy the model's options. The copy belongs to the same ToMA node and shares its stats."""
    patched = with_preset(model, preset, attach)
    expected, clone = sampled(patched), patched.clone()
    clone.model_options = copied(patched.model_options)
    assert run.attachment_of(clone) == run.attachment_of(patched)
    assert same(sampled(clone), expected)
    assert stats_of(patched) is stats_of(clone)


@every_kind
@copies
@settings_of
def test_options_may_be_copied_while_sampling(model: Any, copied: Any, preset: str, attach: Any, stats_of: Any) -> None:
    """Packs copy the options in a guider and inside a block. A copy belongs to the same run."""

    def after_cfg(args: dict[str, Any]) -> torch.Tensor:
        made.append(copied(without_theirs(args["model_options"])))
        runs.add(made[-1]["transformer_options"]["toma_sampling"])
        return args["denoised"]

    def override(func: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs["transformer_options"] = copied(without_theirs(kwargs["transformer_options"]))
        made.append(kwargs["transformer_options"])
        return func(*args, **kwargs)

    made, runs = list[Any](), set[Any]()
    foreign = overridden(model, override)
    foreign.set_model_sampler_post_cfg_function(after_cfg)
    patched = with_preset(foreign, preset, attach)
    assert same(sampled(patched), sampled(with_preset(model, preset, attach)))
    assert len(made) > 20
    assert len(runs) == 1
    assert stats_of(patched).evaluations == 3


def test_a_pickled_run_that_is_over_is_gone(flux: Any, attach: Any, no_state_left: None) -> None:
    def after_cfg(args: dict[str, Any]) -> torch.Tensor:
        stored.append(pickle.dumps(args["model_options"]["transformer_options"]["toma_sampling"]))
        return args["denoised"]

    stored, foreign = list[bytes](), flux.clone()
    foreign.set_model_sampler_post_cfg_function(after_cfg)
    sampled(attach(foreign))
    gc.collect()
    assert [pickle.loads(each) for each in stored] == [None] * 3  # noqa: S301 - our own


@every_kind
def test_one_log_line_a_run(model: Any, attach: Any, stats_of: Any, caplog: pytest.LogCaptureFixture) -> None:
    patched = attach(model)
    with caplog.at_level(logging.INFO):
        sampled(patched)
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("ToMA")]
    assert lines == [f"ToMA: {report_text.summary(stats_of(patched))}"]
    assert "144 -> 72 (12 x 12)" in lines[0]
    assert "3 of 3 steps" in lines[0]


@every_kind
def test_model_called_outside_a_run_is_as_without(model: Any, attach: Any, no_state_left: None) -> None:
    """Some packs call apply_model directly, with the model's own options."""
    patched, watched, calls = attach(model), model.clone(), list[Any]()

    def record(executor: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append((args[:5], kwargs))
        return executor(*args, **kwargs)

    def call(patcher: Any) -> torch.Tensor:
        options = {**patcher.model_options["transformer_options"], "wrappers": patcher.wrappers}
        args, kwargs = calls[0]
        with torch.inference_mode():
            return patcher.model.apply_model(*args, options, **kwargs)  # type: ignore[no-any-return]

    watched.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "test", record)
    sampled(watched)
    assert same(call(patched), call(model))


@every_kind
def test_auto_leaves_fast_work_to_a_fast_card(model: Any, attach: Any, stats_of: Any, monkeypatch: Any) -> None:
    """An H100 would compute these tiny blocks too fast for merging to pay. On a CPU they are merged from 256 tokens
    on."""
    cost_model = pack_module("toma_core.cost_model")
    patched = attach(model, min_tokens=0)
    sampled(patched, 40, steps=1)
    stats = stats_of(patched)
    assert stats.grids == {(20, 20): 200}
    assert set(stats.unmerged) <= {Reason.TOO_FEW_TOKENS(least=256)}
    monkeypatch.setattr(cost_model, "card_of", lambda device: cost_model.Card("NVIDIA H100", (9, 0), 132))
    assert same(sampled(patched, 40, steps=1), sampled(model, 40, steps=1))
    auto_stats, reason = stats_of(patched), Reason.TOO_LITTLE_WORK()
    assert auto_stats.unmerged_names()[reason] == stats.merged_blocks
    assert report_text.summary(auto_stats).count(str(reason)) <= 2
