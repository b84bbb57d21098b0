"""If merging runs out of memory, a video continues without merging, and a picture without a KV cache ends with the
error."""

from typing import Any
from unittest.mock import Mock

import comfy.model_management
import pytest
import torch

from scripts.comfy_pack import pack_module
from testbed import models
from tests.loop import loop
from tests.nodes.adapters.compiling import compiled
from tests.nodes.adapters.families.layouts import HEIGHT, WIDTH
from tests.nodes.adapters.helpers import balanced
from tests.nodes.adapters.kv_helpers import KEYS, failing

Reason = pack_module("toma_core.reasons").Reason
RunState = pack_module("toma_core.run").RunState
VIDEO: dict[str, Any] = {"frames": 3, "steps": 3, "cfg": 3.0}


def without_memory(monkeypatch: pytest.MonkeyPatch, since: int) -> list[Any]:
    """Raise an out-of-memory error after `since` plans. Return a list that grows with each attempt to make a plan."""
    made, own = list[Any](), RunState._selected

    def selected(*args: Any, **kwargs: Any) -> Any:
        made.append(None)
        if len(made) > since:
            raise torch.OutOfMemoryError
        return own(*args, **kwargs)

    monkeypatch.setattr(RunState, "_selected", selected)
    return made


@loop("kind", ["wan", "hunyuan"])
@loop("plans", [0, 1])
def test_where_a_plan_does_not_fit_the_evaluation_is_repeated_as_a_full_one(
    kind: str, plans: int, model_of: Any, attach: Any, stats_of: Any, monkeypatch: Any
) -> None:
    """plans: number of plans that fit into memory."""
    made, held, close = without_memory(monkeypatch, plans), list[int](), RunState.close

    def closed(run: Any) -> Any:
        held.append(len(run._plans) + len(run.cache._entries))
        return close(run)

    monkeypatch.setattr(RunState, "close", closed)
    monkeypatch.setattr(comfy.model_management, "soft_empty_cache", emptied := Mock())
    merged = attach(model_of(kind), granularity="block", selection_interval=1, weight_interval=1)
    out = models.sample(merged, HEIGHT, WIDTH, **VIDEO)
    stats = stats_of(merged)
    # If one plan fits, a model with one plan per evaluation merges the first step before memory runs out.
    assert set(stats.merged_steps) <= {0}
    if not stats.merged_steps:
        assert torch.equal(out, models.sample(model_of(kind), HEIGHT, WIDTH, **VIDEO))
    assert out.isfinite().all()
    assert plans or not stats.merged_steps
    assert held == [0]
    assert Reason.OUT_OF_MEMORY() in stats.unmerged_calls
    assert len(made) == plans + 1
    emptied.assert_called()


@loop("kind", ["flux", "unet", "wan"])
def test_where_the_models_own_memory_is_short(kind: str, model_of: Any, attach: Any, monkeypatch: Any) -> None:
    """A full evaluation of a picture needs at least as much memory as a merged one, so it is not tried. The evaluation
    of a video is repeated once in full."""
    model, short = model_of(kind), Mock(side_effect=torch.OutOfMemoryError)
    merged = attach(model)
    monkeypatch.setattr(type(model.model.diffusion_model), "forward", short)
    with pytest.raises(torch.OutOfMemoryError):
        models.sample(merged, HEIGHT, WIDTH, steps=2, cfg=1.0, **({"frames": 3} if kind == "wan" else {}))
    assert short.call_count == (2 if kind == "wan" else 1)


@loop("call", [3, 5])
def test_one_device_that_runs_out_of_memory(call: int, stats_of: Any, on_two_devices: Any, monkeypatch: Any) -> None:
    """Only this device repeats its call. If the other device repeated its call too, ComfyUI would use that device's old
    result."""
    one, other = models.wan(), models.wan()
    asked: dict[str, Any] = {"frames": 3, "steps": 8, "cfg": 5.0}
    own = models.sample(one, HEIGHT, WIDTH, **asked)
    merged = on_two_devices(balanced(one), other)
    failing(monkeypatch, one.model.diffusion_model, call, torch.OutOfMemoryError())
    found = models.sample(merged, HEIGHT, WIDTH, **asked)
    assert Reason.KV_CACHE_DISABLED() in stats_of(merged).unmerged_calls
    assert (found - own).norm() < 0.1 * own.norm(), "no result of another evaluation"


def test_without_memory_for_a_plan_a_picture_ends_its_run(model_of: Any, attach: Any, monkeypatch: Any) -> None:
    """A picture is not sampled again without merging, because free memory must not change pictures."""
    without_memory(monkeypatch, 0)
    with pytest.raises(torch.OutOfMemoryError):
        models.sample(attach(model_of("wan")), HEIGHT, WIDTH, steps=2)


def test_a_compiled_plan_without_memory(attach: Any, monkeypatch: pytest.MonkeyPatch, no_state_left: None) -> None:
    """If memory runs out, the evaluation is repeated with the compiled graph of full steps. The next run has enough
    memory and is merged."""
    model, asked = models.wan(layers=2), {"frames": 3, "steps": 2, "cfg": 1.0}
    merged = compiled(attach(model), "eager", inside=True)
    torch._dynamo.reset()
    with monkeypatch.context() as patch:
        without_memory(patch, 0)
        full = models.sample(merged, HEIGHT, WIDTH, **asked)
        torch.testing.assert_close(full, models.sample(model, HEIGHT, WIDTH, **asked), rtol=1e-4, atol=1e-4)
    out = models.sample(merged, HEIGHT, WIDTH, **asked)
    assert torch.equal(out, models.sample(attach(model), HEIGHT, WIDTH, **asked))


def test_the_cache_of_a_video_has_a_limit(model_of: Any, attach: Any, stats_of: Any, monkeypatch: Any) -> None:
    """Only the cache of a video has a limit. The test sets the limit far below the reserved size."""
    monkeypatch.setattr(pack_module("toma_core.coverage"), "MAX_CACHE_BYTES", -(1 << 40))
    merged = attach(model_of("wan"), **KEYS)
    for frames in (1, 3):
        models.sample(merged, HEIGHT, WIDTH, frames=frames, steps=4, cfg=1.0)
        assert (Reason.KV_CACHE_DISABLED() in stats_of(merged).unmerged_calls) is (frames == 3)
