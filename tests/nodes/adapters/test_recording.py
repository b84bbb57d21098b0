"""In some models, ComfyUI's compiler records the allocations of an evaluation. ToMA's caches must not be among them."""

from importlib import import_module
from typing import Any

import pytest
import torch
from comfy.cli_args import args
from comfy.model_management import InterruptProcessingException

from testbed import models
from tests.loop import loop
from tests.nodes.adapters.helpers import balanced
from tests.nodes.adapters.kv_helpers import failing
from tests.nodes.adapters.recording import RECORDED, blocks_of, recorded

SIZE = {"h3": (12, 16, 5), "ltx_av": (6, 8, 5), "qwen_image21": (12, 16, 1)}
# Preset, settings, and the first step that is recorded. None: the step after the last merged step.
SETTINGS: dict[str, tuple[str, dict[str, Any], int | None]] = {
    "caches": ("balanced", {}, 5),
    "a part of the schedule": ("balanced", {"end_percent": 0.3}, None),
    "no caches": ("paper", {}, 6),
}


def sampled(kind: str, model: Any, **options: Any) -> list[torch.Tensor]:
    height, width, frames = SIZE[kind]
    return models.sample_streams(model, height, width, **{"frames": frames, "steps": 6, "cfg": 1.0, **options})


@pytest.mark.compat
@loop("kind", RECORDED)
@loop("settings", SETTINGS)
def test_recorded_evaluations_are_own(kind: str, settings: str, model_of: Any, stats_of: Any, monkeypatch: Any) -> None:
    model, (name, options, first) = model_of(kind), SETTINGS[settings]
    merged = balanced(model, name, **options)
    with recorded(kind, monkeypatch) as own:
        sampled(kind, model)
    with recorded(kind, monkeypatch) as found:
        sampled(kind, merged)
    steps = stats_of(merged).merged_steps
    first = max(steps) + 1 if first is None else first
    assert steps
    assert (own.survivors, own.left_open, len(own.evaluations)) == (0, 0, 6)
    assert (found.survivors, found.left_open) == (0, 0)
    assert found.enabled == [step >= first for step in range(6)]
    assert found.evaluations == own.evaluations[first:]


@loop("kind", RECORDED)
@loop(("at", "evaluations"), [(1, 6), (2, 5), (6, 2)])
def test_next_recording_after_no_memory(kind: str, at: int, evaluations: int, model_of: Any, monkeypatch: Any) -> None:
    """Memory runs out in a refresh, in a merged step, and in the last step, which is full and is being recorded."""
    model = model_of(kind)
    with recorded(kind, monkeypatch) as recording, monkeypatch.context() as patch:
        failing(patch, blocks_of(model.model.diffusion_model)[2], at, torch.OutOfMemoryError())
        out = sampled(kind, balanced(model))
    assert (recording.left_open, recording.survivors, len(recording.evaluations)) == (0, 0, evaluations)
    assert recording.ended == [at < 6, *[True] * (evaluations - 1)]
    assert all(each.isfinite().all() for each in out)
    if at == 1:
        assert all(map(torch.equal, out, sampled(kind, model)))


@loop("kind", RECORDED)
@loop("error", [InterruptProcessingException, ValueError])
@loop("at", [1, 2, 6])
def test_a_run_that_ends_early(kind: str, error: type[Exception], at: int, model_of: Any, monkeypatch: Any) -> None:
    model = model_of(kind)
    merged = balanced(model)
    with recorded(kind, monkeypatch) as recording:
        whole = sampled(kind, merged)
        with monkeypatch.context() as patch:
            failing(patch, blocks_of(model.model.diffusion_model)[2], at, error())
            with pytest.raises(error):
                sampled(kind, merged)
        assert args.disable_comfy_compiler is False
        import_module("comfy.model_prefetch").cleanup_prefetch_queues()  # ComfyUI calls this when a node ends
        assert all(map(torch.equal, sampled(kind, merged), whole))
    assert (recording.left_open, recording.survivors) == (0, 0)


@loop("kind", RECORDED)
def test_several_devices(kind: str, new_model: Any, stats_of: Any, on_two_devices: Any, monkeypatch: Any) -> None:
    """Merged evaluations of both devices run with the compiler switched off."""
    merged = on_two_devices(balanced(new_model(kind)), new_model(kind))
    with recorded(kind, monkeypatch) as recording:
        sampled(kind, merged, cfg=3.0)
        assert args.disable_comfy_compiler is False
    assert len(stats_of(merged).merged_steps) == 3
    assert sorted(recording.enabled) == [False] * 10 + [True] * 2
