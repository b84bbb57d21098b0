"""Merged blocks that look at all tokens, in every family: where nothing moves, a merged step is the model's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import models
from scripts.comfy_pack import pack_module
from tests.nodes.adapters.compiling import Counting, compiled
from tests.nodes.adapters.families.layouts import HEIGHT, LAYOUTS, WIDTH

SHOWN = [name for name in LAYOUTS if name != "ernie"]
KEYS: dict[str, Any] = {
    "all_keys": True, "detail_reuse": True, "plan_from": "prediction", "adaptive_budget": True, "scale": 1000.0,
    "select_every": 1, "weigh_every": 1, "shift_windows": True, "whole_every": 10,
}  # fmt: skip
# What moves between evaluations of one latent, for `evaluated`.
Moves = Callable[[Tensor, int], Tensor]


def standing(x: Tensor, step: int) -> Tensor:
    return x


def evaluated(
    model: Any, moves: Moves = standing, steps: int = 4, batch: int = 1, text: int = 7, frames: int = 0
) -> list[Tensor]:
    """What a model gives in so many evaluations of one latent at one noise level."""
    import comfy.sample
    from comfy.samplers import KSAMPLER

    given: list[Tensor] = []

    def sampler(denoise: Any, x: Tensor, sigmas: Tensor, extra_args: dict[str, Any], **_: Any) -> Tensor:
        for n in range(steps):
            given.append(denoise(moves(x, n), sigmas[n] * x.new_ones(len(x)), **extra_args))
        return x

    channels = model.model.latent_format.latent_channels
    shape = batch, channels, *((frames,) if frames else ()), HEIGHT, WIDTH
    latent = comfy.sample.fix_empty_latent_channels(model, torch.zeros(shape))
    noise, sigmas = comfy.sample.prepare_noise(latent, 5), torch.full((steps + 1,), 0.6)
    conds = [models.conditioning(model, text, seed=seed) for seed in (1, 2)]
    comfy.sample.sample_custom(model, noise, 3.0, KSAMPLER(sampler), sigmas, *conds, latent, seed=5, disable_pbar=True)
    return given


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("kind", SHOWN)
def test_where_nothing_moves_a_merged_step_is_the_models_own(
    kind: str, batch: int, model_of: Any, attach: Any, stats_of: Any
) -> None:
    model = model_of(kind)
    merged = attach(model, **KEYS)
    (own, *_), found = evaluated(model, batch=batch), evaluated(merged, batch=batch)
    assert (stats_of(merged).evaluations, stats_of(merged).merged_evaluations) == (4, 3)
    assert stats_of(merged).left_whole == {}
    for picture in found:
        torch.testing.assert_close(picture, own, rtol=1e-5, atol=1e-5 * float(own.abs().max()))


def drifting(x: Tensor, step: int) -> Tensor:
    return x + 0.1 * step * x.flip(-1)


class Watch:
    """Another node's attention override: what attention is given at last, (B, T, C), by evaluation and block."""

    def __init__(self, calls: int) -> None:
        self.calls, self.seen = calls, list[tuple[Tensor, Tensor, Tensor]]()

    def on(self, model: Any) -> Any:
        model = model.clone()
        model.model_options["transformer_options"]["optimized_attention_override"] = self
        return model

    def __call__(self, function: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        axis = 2 if kwargs.get("skip_reshape") else 1
        self.seen.append(tuple((t.transpose(1, 2) if axis == 2 else t).flatten(2).clone() for t in (q, k, v)))
        return function(q, k, v, *args, **kwargs)

    def evaluations(self) -> list[list[tuple[Tensor, Tensor, Tensor]]]:
        size = len(self.seen) // self.calls
        return [self.seen[n * size : (n + 1) * size] for n in range(self.calls)]


@pytest.mark.parametrize("kind", SHOWN)
def test_keys_are_moved_on_as_their_destinations_move(
    kind: str, model_of: Any, attach: Any, plan_calls: list[Any], dense: Any
) -> None:
    """Queries are of destinations alone, keys and values of all tokens: those kept, and what has changed at their
    destinations since then. What a merged step made is kept for the next."""
    model, layout = model_of(kind), LAYOUTS[kind][0]
    watch = Watch(4)
    evaluated(watch.on(attach(model, **{**KEYS, "adaptive_budget": False, "scale": 10_000.0})), drifting)
    whole, *merged = watch.evaluations()
    # Some models refine text or image before: that is not merged, and looks at what it did.
    block = next(n for n, (q, k, _) in enumerate(merged[0]) if q.shape[1] != k.shape[1])
    before = layout.before + layout.above if kind != "sd3" else 7
    kept, plan = whole[block][1:], plan_calls[-1].plan
    _, U = dense(plan)
    for step in merged:
        q, *fresh = step[block]
        after = before + plan.tokens
        for old, new in zip(kept, fresh, strict=True):
            assert new.shape == old.shape
            assert q.shape[1] == new.shape[1] - plan.tokens + plan.kept
            old_rows, rows = old[:, before:after], new[:, before:after]
            there = plan.destinations[..., None].expand(-1, -1, rows.shape[2])
            moved = rows.gather(1, there) - old_rows.gather(1, there)
            assert moved.abs().max() > 1e-3
            torch.testing.assert_close(rows, old_rows + U @ moved, rtol=1e-3, atol=1e-3 * float(rows.abs().max()))
        kept = fresh


@pytest.mark.parametrize("text", [7, HEIGHT // 2 * (WIDTH // 2) // 2])
def test_text_as_long_as_merged_tokens_is_left_alone(text: int, model_of: Any, attach: Any) -> None:
    """Wan looks at its text in the same block, whose keys are then as many as queries."""
    model = model_of("wan")
    own, *found = evaluated(model, text=text)[:1] + evaluated(attach(model, **KEYS), text=text)
    for picture in found:
        torch.testing.assert_close(picture, own, rtol=1e-5, atol=1e-5 * float(own.abs().max()))


PRESET: dict[str, Any] = {"min_tokens": 4}


def preset(name: str, **settings: Any) -> Any:
    return pack_module("toma_core").Settings(name, {**PRESET, **settings})


@pytest.mark.parametrize("kind", list(LAYOUTS))
def test_presets_keep_keys_where_they_can(kind: str, model_of: Any, stats_of: Any) -> None:
    attach = pack_module("nodes.adapters.run").attach
    merged = attach(model_of(kind), preset("balanced"))
    assert models.sample(merged, HEIGHT, WIDTH, steps=8).isfinite().all()
    stats = stats_of(merged)
    shown = kind != "ernie"
    assert stats.without_keys == ""
    assert sorted(stats.merged_steps) == ([1, 2, 3, 5, 6] if shown else [1, 2, 4, 5])
    assert bool(stats.left_whole) is not shown


@pytest.mark.parametrize("frames", [1, 3])
@pytest.mark.parametrize("kind", ["wan", "hunyuan"])
def test_of_videos_too(kind: str, frames: int, model_of: Any, attach: Any, stats_of: Any) -> None:
    model = model_of(kind)
    merged = attach(model, **KEYS)
    (own, *_), found = evaluated(model, frames=frames), evaluated(merged, frames=frames)
    assert stats_of(merged).left_whole == {}
    for clip in found:
        torch.testing.assert_close(clip, own, rtol=1e-5, atol=1e-5 * float(own.abs().max()))


def without_room(monkeypatch: pytest.MonkeyPatch, room: float) -> None:
    """As if the device had so many bytes in all."""
    import comfy.model_management

    monkeypatch.setattr(comfy.model_management, "get_total_memory", lambda *_, **__: room)


@pytest.mark.parametrize(("kind", "frames"), [("flux", 0), ("z_image", 0), ("wan", 3)])
def test_where_room_is_short_they_are_packed(
    kind: str, frames: int, model_of: Any, stats_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In less than a third of the memory, for nearly the same picture; and ComfyUI is told of it."""
    run, model, asked = pack_module("nodes.adapters.run"), model_of(kind), list[int]()
    merged, reserved = run.attach(model, preset("balanced")), pack_module("nodes.adapters.memory").reserved
    monkeypatch.setattr(run, "reserved", lambda m, n: asked.append(n) or reserved(m, n))
    size = {"steps": 4, **({"frames": frames} if frames else {})}
    exact, whole = models.sample(merged, HEIGHT, WIDTH, **size), models.sample(model, HEIGHT, WIDTH, **size)
    held = stats_of(merged).detail_bytes
    without_room(monkeypatch, 4 * held - 1)
    found = models.sample(merged, HEIGHT, WIDTH, **size)
    packed = stats_of(merged)
    assert packed.without_keys == ""
    # Models so narrow have smaller groups than is reckoned with.
    assert asked[0] == held
    assert asked[1] <= packed.detail_bytes < 0.4 * held
    assert 0 < (found - exact).norm() < 0.5 * (exact - whole).norm()


def test_what_is_packed_is_nobodys_to_write_into(model_of: Any, attach: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("flux")
    monkeypatch.setattr(pack_module("nodes.adapters.memory"), "MOST", 1)
    merged = attach(model, **KEYS)

    def spoiling(function: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = function(q, k, v, *args, **kwargs)
        k.zero_()
        v.zero_()
        return out

    spoiled = merged.clone()
    spoiled.model_options["transformer_options"]["optimized_attention_override"] = spoiling
    for one, other in zip(evaluated(merged), evaluated(spoiled), strict=True):
        assert torch.equal(one, other)


def test_where_memory_runs_out_all_is_whole_from_then_on(
    model_of: Any, attach: Any, stats_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, trial = model_of("wan"), pack_module("toma_core.trial")
    monkeypatch.setattr(pack_module("nodes.adapters.memory"), "MOST", 1)
    calls = list[int]()

    def full(x: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) > 3:
            raise torch.OutOfMemoryError
        return pack(x)

    pack = trial.pack
    monkeypatch.setattr(trial, "pack", full)
    merged = attach(model, **KEYS)
    (own, *_), found = evaluated(model, frames=3), evaluated(merged, frames=3)
    assert all(torch.equal(clip, own) for clip in found)
    stats = stats_of(merged)
    assert stats.detail_given_up
    assert "no room for keys and values" in stats.summary()


@pytest.mark.parametrize("at", [0, 1, 2, 7])
def test_where_packing_runs_out_of_memory_in_a_merged_step(
    at: int, model_of: Any, attach: Any, stats_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At keys and at values, of the first block and of others: no block looks at keys of all tokens and values of some,
    and the evaluation is made again, whole."""
    model, trial = model_of("wan"), pack_module("toma_core.trial")
    monkeypatch.setattr(pack_module("nodes.adapters.memory"), "MOST", 1)
    calls, pack = list[int](), trial.pack
    kept_whole = 2 * len(model.model.diffusion_model.blocks)

    def full(x: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) > kept_whole + at:
            raise torch.OutOfMemoryError
        return pack(x)

    monkeypatch.setattr(trial, "pack", full)
    merged, watch = attach(model, **KEYS), Watch(1)
    (own, *_), found = evaluated(model, frames=3), evaluated(watch.on(merged), frames=3)
    assert all(torch.equal(clip, own) for clip in found)
    assert all(k.shape[1] == v.shape[1] for _, k, v in watch.seen)
    stats = stats_of(merged)
    assert stats.detail_given_up
    assert (stats.merged_evaluations, stats.merged_steps) == (0, {})
    assert stats.headline() == "Nothing was merged: no room for keys and values of all tokens after all"


@contextmanager
def short_of_memory(layer: Any, *at: int) -> Iterator[None]:
    """Memory runs out at these calls of a layer, the first is 1."""
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


@pytest.mark.parametrize("call", [3, 4, 5, 6])
def test_where_memory_runs_out_for_one_condition_the_other_is_whole_too(
    call: int, model_of: Any, attach: Any, stats_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Conditions in calls of their own: guidance would enlarge what only one of them has lost."""
    model = model_of("wan")
    merged = attach(model, **KEYS)
    monkeypatch.setattr(type(model.model), "memory_required", lambda *_, **__: 1e20)
    with short_of_memory(model.model.diffusion_model.blocks[-1].ffn[0], call):
        found = evaluated(merged, frames=3)
    own, step = evaluated(model, frames=3)[0], (call - 1) // 2
    assert all(torch.equal(clip, own) for clip in found[step:])
    assert stats_of(merged).merged_evaluations == step - 1


@pytest.mark.parametrize("packed", [False, True])
def test_conditions_that_are_split_after_the_full_step_hold_no_more(
    packed: bool, model_of: Any, stats_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ComfyUI joins them by free memory, of which the full step leaves less."""
    from comfy.patcher_extension import WrappersMP

    model, evaluations = model_of("wan"), list[int]()
    if packed:
        monkeypatch.setattr(pack_module("nodes.adapters.memory"), "MOST", 1)
    joined = pack_module("nodes.adapters.run").attach(model, preset("balanced"))
    wanted, held = models.sample(joined, HEIGHT, WIDTH, frames=3, steps=4), stats_of(joined).detail_bytes
    split = joined.clone()

    def counting(executor: Any, *args: Any, **kwargs: Any) -> Any:
        evaluations.append(1)
        return executor(*args, **kwargs)

    split.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, "count", counting)
    monkeypatch.setattr(type(model.model), "memory_required", lambda *_, **__: 0 if len(evaluations) < 2 else 1e20)
    found = models.sample(split, HEIGHT, WIDTH, frames=3, steps=4)
    assert stats_of(split).detail_bytes == held
    torch.testing.assert_close(found, wanted, rtol=0, atol=(1e-2 if packed else 1e-4) * float(wanted.abs().max()))


def theirs(q: Tensor, k: Tensor, v: Tensor, heads: int, *_: Any, **__: Any) -> Tensor:
    """Another pack's attention in the place of ComfyUI's, which knows no override."""
    parts = [t.unflatten(2, (heads, -1)).transpose(1, 2) for t in (q, k, v)]
    return torch.nn.functional.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2)


@pytest.fixture
def asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    import comfy.ldm.wan.model as wan

    monkeypatch.setattr(wan, "optimized_attention", theirs)


NOT_ASKED = "another node's attention takes no others"


def test_attention_that_asks_nobody_is_noticed(model_of: Any, stats_of: Any, asks_nobody: None) -> None:
    """Presets are as without then, and it is said."""
    run, model = pack_module("nodes.adapters.run"), model_of("wan")
    asked: dict[str, Any] = {"frames": 3, "steps": 8, "cfg": 5.0}
    own = models.sample(model, HEIGHT, WIDTH, **asked)
    merged, without = (run.attach(model, preset("balanced", **more)) for more in ({}, {"all_keys": False}))
    found, usual = (models.sample(m, HEIGHT, WIDTH, **asked) for m in (merged, without))
    assert NOT_ASKED in stats_of(merged).summary()
    # The second step too is in full: it keeps for other blocks than the first.
    assert sorted(stats_of(merged).merged_steps) == [2, 4, 5]
    assert sorted(stats_of(without).merged_steps) == [1, 2, 4, 5]
    assert (found - own).norm() <= (usual - own).norm()
    assert torch.equal(models.sample(merged, HEIGHT, WIDTH, **asked), found)


def test_inside_graphs_too(stats_of: Any, asks_nobody: None, fresh_compiler: None) -> None:
    run, asked = pack_module("nodes.adapters.run"), {"frames": 3, "steps": 6, "cfg": 1.0}
    model = models.wan(layers=2)
    plain = run.attach(model, preset("balanced"))
    merged = compiled(run.attach(model, preset("balanced")), Counting(), inside=True)
    assert torch.equal(*(models.sample(m, HEIGHT, WIDTH, **asked) for m in (merged, plain)))
    assert stats_of(merged).without_keys == stats_of(plain).without_keys == NOT_ASKED


def several_calls(model: Any) -> Any:
    """ComfyUI's skip layer guidance: a call more in every evaluation, after that for the conditions."""
    from comfy_extras.nodes_slg import SkipLayerGuidanceDiT

    return SkipLayerGuidanceDiT.execute(model, 3.0, 0.0, 1.0, double_layers="2").args[0]


def test_it_is_noticed_where_an_evaluation_begins(
    model_of: Any, stats_of: Any, asks_nobody: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All calls of an evaluation keep, or none: guidance takes their difference."""
    sampling, seen = pack_module("nodes.adapters.sampling").Sampling, list[tuple[int, bool]]()
    observe = sampling.observe

    def observed(self: Any, *args: Any, **kwargs: Any) -> None:
        observe(self, *args, **kwargs)
        seen.append((self.decision.step, self.decision.keeps_detail))

    monkeypatch.setattr(sampling, "observe", observed)
    merged = pack_module("nodes.adapters.run").attach(several_calls(model_of("wan")), preset("balanced"))
    models.sample(merged, HEIGHT, WIDTH, frames=3, steps=4, cfg=5.0)
    assert seen == [(step, step < 2) for step in range(4) for _ in range(2)]
    assert stats_of(merged).without_keys == NOT_ASKED


@pytest.mark.parametrize("call", [3, 4])
def test_where_memory_runs_out_all_calls_of_the_evaluation_are_made_again(
    call: int, model_of: Any, stats_of: Any
) -> None:
    model = several_calls(model_of("wan"))
    own = models.sample(model, HEIGHT, WIDTH, frames=3, steps=4, cfg=5.0)
    merged = pack_module("nodes.adapters.run").attach(model, preset("balanced"))
    with short_of_memory(model.model.diffusion_model.blocks[-1].ffn[0], call):
        assert torch.equal(models.sample(merged, HEIGHT, WIDTH, frames=3, steps=4, cfg=5.0), own)
    stats = stats_of(merged)
    assert (stats.evaluations, stats.merged_evaluations, stats.merged_steps) == (8, 0, {})


@pytest.mark.parametrize("call", [3, 5])
def test_one_of_several_devices_that_runs_out_of_memory_makes_its_own_call_again(
    call: int, stats_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the others compute meanwhile is waited for in the same evaluation; on threads of two devices that are both
    the CPU."""
    multigpu = pytest.importorskip("comfy.multigpu")
    if not hasattr(multigpu, "MultiGPUThreadPool"):
        pytest.skip("this ComfyUI shares no run")
    import comfy.model_management
    from comfy.patcher_extension import WrappersMP

    monkeypatch.setattr(comfy.model_management, "set_torch_device", lambda *_: None, raising=False)
    devices = torch.device("cpu"), torch.device("cpu", 0)
    one, other, calls = models.wan(), models.wan(), list[int]()
    network = one.model.diffusion_model
    forward = type(network).forward

    def short(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self is network:
            calls.append(1)
            if len(calls) == call:
                raise torch.OutOfMemoryError
        return forward(self, *args, **kwargs)

    def shared(executor: Any, *args: Any, **kwargs: Any) -> Any:
        guider, clone = executor.class_obj, other.clone()
        clone.model.current_patcher = clone
        pool = multigpu.MultiGPUThreadPool(list(devices))
        guider.model_options["multigpu_clones"] = dict(zip(devices, (guider.model_patcher, clone), strict=True))
        guider.model_options["multigpu_thread_pool"] = pool
        try:
            return executor(*args, **kwargs)
        finally:
            for name in ("multigpu_clones", "multigpu_thread_pool"):
                guider.model_options.pop(name, None)
            pool.shutdown()

    asked: dict[str, Any] = {"frames": 3, "steps": 8, "cfg": 5.0}
    own = models.sample(one, HEIGHT, WIDTH, **asked)
    merged = pack_module("nodes.adapters.run").attach(one, preset("balanced")).clone()
    merged.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, "shared", shared)
    monkeypatch.setattr(type(network), "forward", short)
    found = models.sample(merged, HEIGHT, WIDTH, **asked)
    assert stats_of(merged).detail_given_up
    assert (found - own).norm() < 0.1 * own.norm(), "no result of another evaluation"


@pytest.mark.parametrize("schedule", ["standard_static", "standard_uniform", "looped_uniform"])
def test_context_windows_that_move_keep_no_keys(schedule: str, model_of: Any, stats_of: Any) -> None:
    from comfy_extras.nodes_context_windows import WanContextWindowsManualNode as Windows

    run, model = pack_module("nodes.adapters.run"), model_of("wan")
    windowed = Windows.execute(model, 17, 8, schedule, 1, False, "pyramid", False).result[0]
    merged, without = (run.attach(windowed, preset("balanced", **more)) for more in ({}, {"all_keys": False}))
    asked: dict[str, Any] = {"frames": 13, "steps": 8, "cfg": 5.0}
    found = models.sample(merged, HEIGHT, WIDTH, **asked)
    moves = "windows that lie elsewhere at each step" in stats_of(merged).without_keys
    assert moves == (schedule != "standard_static")
    if moves:
        assert torch.equal(found, models.sample(without, HEIGHT, WIDTH, **asked))


@pytest.mark.parametrize("step", [0, 2])
def test_where_the_model_runs_out_of_memory_it_runs_again_without(
    step: int, model_of: Any, attach: Any, stats_of: Any
) -> None:
    """In a full step and in a merged one, while anything is kept; without ToMA it would have been enough."""
    model = model_of("flux")
    merged = attach(model, **KEYS)
    with short_of_memory(model.model.diffusion_model.single_blocks[-1].linear2, step + 1):
        found = evaluated(merged)
    own = evaluated(model)[0]
    assert torch.equal(found[-1], own)
    assert all(torch.equal(picture, own) for picture in found[step:])
    assert stats_of(merged).detail_given_up


def test_also_in_a_last_step_that_is_in_full(model_of: Any, stats_of: Any) -> None:
    """What earlier steps kept is in the way there too; where nothing is kept it is the model's own error."""
    model = model_of("flux")
    merged = pack_module("nodes.adapters.run").attach(model, preset("balanced"))
    layer, asked = model.model.diffusion_model.single_blocks[-1].linear2, {"steps": 4, "cfg": 1.0}
    wanted = models.sample(merged, HEIGHT, WIDTH, **asked)
    with short_of_memory(layer, 4):
        assert torch.equal(models.sample(merged, HEIGHT, WIDTH, **asked), wanted)
    assert stats_of(merged).detail_given_up
    with short_of_memory(layer, 4, 5), pytest.raises(torch.OutOfMemoryError):
        models.sample(merged, HEIGHT, WIDTH, **asked)


def test_without_room_the_preset_is_as_it_was(model_of: Any, stats_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = pack_module("nodes.adapters.run")
    model = model_of("flux")
    without_room(monkeypatch, 1000)
    merged, without = run.attach(model, preset("balanced")), run.attach(model, preset("balanced", all_keys=False))
    assert torch.equal(*(models.sample(m, HEIGHT, WIDTH, steps=8) for m in (merged, without)))
    assert "they would take" in stats_of(merged).without_keys
    assert "do not look at all tokens" in stats_of(merged).summary()
    assert stats_of(without).without_keys == ""


def test_comfyui_is_told_before_it_loads_the_model(
    model_of: Any, monkeypatch: pytest.MonkeyPatch, stats_of: Any
) -> None:
    """As many bytes more as the run then holds, for both conditions."""
    import comfy.model_management

    model, asked, load = model_of("flux"), list[float](), comfy.model_management.load_models_gpu

    def loading(*args: Any, memory_required: float = 0, **kwargs: Any) -> Any:
        asked.append(memory_required)
        return load(*args, memory_required=memory_required, **kwargs)

    monkeypatch.setattr(comfy.model_management, "load_models_gpu", loading)
    merged = pack_module("nodes.adapters.run").attach(model, preset("balanced"))
    for m in (model, merged):
        models.sample(m, HEIGHT, WIDTH, steps=4)
    assert asked[1] - asked[0] == stats_of(merged).detail_bytes > 0
    assert "memory_required" not in vars(model.model)


def test_a_full_step_that_a_cache_skips_loses_nothing(
    model_of: Any, attach: Any, stats_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the full step before kept goes on being moved."""
    from comfy.patcher_extension import WrappersMP

    model = attach(model_of("flux"), **{**KEYS, "whole_every": 3})
    outputs: list[Tensor] = []

    def skipping(executor: Any, *args: Any, **kwargs: Any) -> Any:
        outputs.append(outputs[-1] if len(outputs) == 3 else executor(*args, **kwargs))
        return outputs[-1]

    model.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "cache", skipping)
    details = pack_module("toma_core.detail").Details
    kept, found = details.kept, []
    monkeypatch.setattr(details, "kept", lambda *args: found.append(kept(*args)) or found[-1])
    models.sample(model, HEIGHT, WIDTH, steps=7)
    assert sorted(stats_of(model).merged_steps) == [1, 2, 4, 5]
    assert found
    assert all(one is not None for one in found)
    assert stats_of(model).left_whole == {}


@pytest.fixture
def fresh_compiler() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(("kind", "packed"), [*((kind, False) for kind in SHOWN), ("flux", True), ("wan", True)])
def test_the_same_inside_the_graphs_of_a_compiled_model(
    kind: str,
    packed: bool,
    model_of: Any,
    attach: Any,
    stats_of: Any,
    fresh_compiler: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two graphs as without: full steps and merged ones; with what is kept in four bits too."""
    model_of(kind)  # skips what this ComfyUI does not have
    if packed:
        monkeypatch.setattr(pack_module("nodes.adapters.memory"), "MOST", 1)
    model, backend = getattr(models, kind)(), Counting()
    plain, merged = attach(model, **KEYS), compiled(attach(model, **KEYS), backend, inside=True)
    wanted = models.sample(plain, HEIGHT, WIDTH, steps=6)
    assert torch.equal(models.sample(merged, HEIGHT, WIDTH, steps=6), wanted)
    assert stats_of(merged).detail_bytes == stats_of(plain).detail_bytes
    assert stats_of(merged).left_whole == {}
    warm = backend.graphs
    models.sample(merged, HEIGHT, WIDTH, steps=9)
    assert backend.graphs == warm <= 3


def test_other_compilers_are_told_nothing(attach: Any, stats_of: Any, fresh_compiler: None) -> None:
    model = models.flux(double=2, single=2)
    merged = compiled(attach(model, **KEYS), Counting())
    without = models.sample(attach(model, **{**KEYS, "all_keys": False}), HEIGHT, WIDTH, steps=5)
    assert torch.equal(models.sample(merged, HEIGHT, WIDTH, steps=5), without)
    assert "inductor" in stats_of(merged).without_keys


@pytest.mark.parametrize("settings", [{"whole_every": 0}, {"detail_reuse": False}, {"granularity": "module"}])
def test_where_full_steps_keep_nothing_the_preset_is_as_without(
    settings: dict[str, Any], model_of: Any, stats_of: Any
) -> None:
    run, model = pack_module("nodes.adapters.run"), model_of("flux")
    merged, without = (run.attach(model, preset("balanced", **settings, **more)) for more in ({}, {"all_keys": False}))
    assert torch.equal(*(models.sample(m, HEIGHT, WIDTH, steps=4) for m in (merged, without)))
    assert stats_of(merged).without_keys == "full steps keep nothing with these settings"


@pytest.mark.parametrize("kind", ["qwen_image", "hunyuan"])
def test_masked_text_does_not_stand_in_the_way(kind: str, model_of: Any, attach: Any) -> None:
    """Every key after the text is looked at, however many there are."""
    model = model_of(kind)
    mask = torch.ones(1, 7, dtype=torch.long)
    mask[:, 5:] = 0
    conds = [models.conditioning(model, 7, seed, attention_mask=mask) for seed in (1, 2)]

    def sampled(patched: Any) -> Tensor:
        return models.sample(patched, HEIGHT, WIDTH, steps=5, cfg=1.0, positive=conds[0], negative=conds[1])

    watch = Watch(1)
    own, found = sampled(model), sampled(watch.on(attach(model, **KEYS)))
    fewer = [q.shape[1] < k.shape[1] for q, k, _ in watch.seen]
    assert any(fewer), "merged blocks look at all tokens"
    without = sampled(attach(model, **{**KEYS, "all_keys": False}))
    assert (found - own).norm() < (without - own).norm()


@pytest.mark.parametrize("kind", ["wan", "sd3"])
def test_what_is_kept_is_nobodys_to_write_into(kind: str, attach: Any) -> None:
    """Another node's override that works in place, in models whose attention sees nothing but the image."""
    model = models.wan() if kind == "wan" else models.sd3(x_block_self_attn_layers=[0, 1])

    def temper(function: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        k.mul_(1.1)
        return function(q, k, v, *args, **kwargs)

    def tempered(patched: Any) -> Any:
        patched = patched.clone()
        patched.model_options["transformer_options"]["optimized_attention_override"] = temper
        return patched

    own = evaluated(tempered(model))[0]
    for picture in evaluated(tempered(attach(model, **KEYS))):
        torch.testing.assert_close(picture, own, rtol=1e-5, atol=1e-5 * float(own.abs().max()))


def test_room_is_asked_for_every_condition_that_is_evaluated(model_of: Any) -> None:
    from comfy.samplers import CFGGuider, ksampler
    from comfy_extras.nodes_custom_sampler import Guider_DualCFG

    count, model = pack_module("nodes.adapters.memory").conditions_of, model_of("flux")
    first, second, third = (models.conditioning(model, seed=seed) for seed in (1, 2, 3))
    guider = CFGGuider(model)
    guider.conds = {"positive": first, "negative": second}
    for cfg, name, wanted in ((1.0, "euler", 1), (3.0, "euler", 2), (1.0, "euler_cfg_pp", 2)):
        guider.set_cfg(cfg)
        assert count(guider, ksampler(name)) == wanted
    dual = Guider_DualCFG(model)
    dual.conds = {"positive": first, "middle": second, "negative": third}
    dual.set_cfg(1.5, 2.0)
    assert count(dual, ksampler("euler")) == 3


def test_room_is_asked_for_with_references_that_are_merged(model_of: Any, attach: Any, stats_of: Any) -> None:
    model = model_of("flux")
    reference = torch.randn(1, 16, HEIGHT, WIDTH, generator=torch.Generator().manual_seed(9))
    conds = [models.conditioning(model, 7, seed, reference_latents=[reference]) for seed in (1, 2)]
    merged, asked = attach(model, **KEYS, merge_references=True), list[int]()
    memory = pack_module("nodes.adapters.memory").reserved
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pack_module("nodes.adapters.run"), "reserved", lambda m, n: asked.append(n) or memory(m, n))
        models.sample(merged, HEIGHT, WIDTH, steps=4, positive=conds[0], negative=conds[1])
    assert asked == [stats_of(merged).detail_bytes]


def passed_on(args: dict[str, Any]) -> dict[str, Any]:
    return args


@pytest.mark.parametrize("cfg", [1.0, 3.0])
@pytest.mark.parametrize("broken", ["", "vace", "animate", "shown", "replaced"])
def test_room_is_asked_for_every_chain(broken: str, cfg: float, attach: Any, stats_of: Any) -> None:
    """Each keeps an update of its own: where the model itself looks at all tokens, and where another node does."""
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
    memory = pack_module("nodes.adapters.memory").reserved
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pack_module("nodes.adapters.run"), "reserved", lambda m, n: asked.append(n) or memory(m, n))
        models.sample(merged, HEIGHT, WIDTH, frames=3, steps=4, cfg=cfg)
    assert asked == [stats_of(merged).detail_bytes]


def test_what_others_put_in_the_same_place_stays(model_of: Any) -> None:
    """Two runs that begin at once, and another pack in between."""
    reserved, model = pack_module("nodes.adapters.memory").reserved, model_of("flux").model
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
