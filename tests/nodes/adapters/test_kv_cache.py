"""Test the KV cache in every family."""

import functools
from typing import Any

import pytest
import torch
from comfy.patcher_extension import WrappersMP
from torch import Tensor

from scripts.comfy_pack import pack_module
from testbed import models
from tests.loop import loop
from tests.nodes.adapters.families.layouts import ALONE, HEIGHT, LAYOUTS, WIDTH
from tests.nodes.adapters.helpers import balanced, prompts_of
from tests.nodes.adapters.kv_helpers import KEYS, Watch, evaluated, failing, overridden, several_calls

Reason = pack_module("toma_core.reasons").Reason
report_text = pack_module("nodes.adapters.report_text")

SHOWN = list(LAYOUTS)
# One family for each layout of blocks. thorough/test_others.py has the other families.
FEW = ("flux", "z_image", "qwen_image", "sd3", "wan", "h3")
VIDEOS = [("wan", 1, 3), ("ltx", 1, 3), ("h3", 1, 3)]


def close(found: Tensor, own: Tensor) -> None:
    torch.testing.assert_close(found, own, rtol=1e-5, atol=1e-5 * float(own.abs().max()))


@loop(("kind", "batch", "frames"), [*((kind, 1 if kind in ALONE else 2, 0) for kind in FEW), *VIDEOS])
def test_without_changes_a_merged_step_equals_the_models_own(
    kind: str, batch: int, frames: int, model_of: Any, attach: Any, stats_of: Any
) -> None:
    model = model_of(kind)
    merged = attach(model, **KEYS)
    (own, *_), found = (evaluated(each, batch=batch, frames=frames) for each in (model, merged))
    assert (stats_of(merged).evaluations, stats_of(merged).merged_in.total()) == (4, 3)
    assert stats_of(merged).unmerged == {}
    for picture in found:
        close(picture, own)


def hint(message: str) -> str:
    return f"{message}\nDo `before` and `above` of the family's first Layout count all keys before the image?"


@loop("kind", FEW)
def test_keys_are_propagated_as_their_destinations_change(
    kind: str, model_of: Any, attach: Any, plan_calls: list[Any], dense: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the change at the destinations, a merged step estimates the change of all tokens. It adds this change to the
    cached keys and values, and stores the result. The test switches off the regression that would explain a part of the
    change by the latent."""
    monkeypatch.setattr(pack_module("toma_core.coverage").Coverage, "latent_of", lambda *_: None)
    model, layout = model_of(kind), LAYOUTS[kind][0]
    watch = Watch(4)
    lasting = {"selection_interval": 100, "weight_interval": 100, "sharpness": 10_000.0}
    evaluated(overridden(attach(model, **{**KEYS, **lasting}), watch), moves=0.1)
    full, *merged = watch.evaluations()
    # Find the first merged block. Before it, some models run refiner blocks, which are not merged.
    block = next(n for n, (q, k, _) in enumerate(merged[0]) if q.shape[1] != k.shape[1])
    before = layout.before + layout.above
    cached, plan = full[block][1:], plan_calls[0].plan
    _, U = dense(plan)
    for step in merged:
        q, *fresh = step[block]
        after = before + plan.tokens
        for old, new in zip(cached, fresh, strict=True):
            assert new.shape == old.shape
            assert q.shape[1] == new.shape[1] - plan.tokens + plan.num_destinations
            old_rows, rows = old[:, before:after], new[:, before:after]
            there = plan.destinations[..., None].expand(-1, -1, rows.shape[2])
            moved = rows.gather(1, there) - old_rows.gather(1, there)
            assert moved.abs().max() > 1e-3
            atol = 1e-3 * float(rows.abs().max())
            torch.testing.assert_close(rows, old_rows + U @ moved, rtol=1e-3, atol=atol, msg=hint)
        cached = fresh


@loop("text", [7, HEIGHT // 2 * (WIDTH // 2) // 2])
def test_text_as_long_as_merged_tokens_is_left_alone(text: int, model_of: Any, attach: Any) -> None:
    """Image tokens of Wan also attend to the text. A text as long as the merged image must not be taken for image
    tokens."""
    model = model_of("wan")
    own, *found = evaluated(model, text=text)[:1] + evaluated(attach(model, **KEYS), text=text)
    for picture in found:
        close(picture, own)


PRESET_KINDS = ("flux", "ernie", "wan")


@loop("kind", PRESET_KINDS)
def test_presets_keep_keys_where_they_can(kind: str, model_of: Any, stats_of: Any) -> None:
    merged = balanced(model_of(kind))
    assert models.sample(merged, HEIGHT, WIDTH, steps=8).isfinite().all()
    stats = stats_of(merged)
    assert sorted(stats.merged_steps) == [1, 2, 3, 5, 6]
    assert (stats.unmerged, stats.unmerged_calls) == ({}, {})


def theirs(q: Tensor, k: Tensor, v: Tensor, heads: int, *_: Any, **__: Any) -> Tensor:
    """Compute attention in place of ComfyUI's function, as some packs do, without calling overrides."""
    parts = [t.unflatten(2, (heads, -1)).transpose(1, 2) for t in (q, k, v)]
    return torch.nn.functional.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2)


@pytest.fixture
def without_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    import comfy.ldm.wan.model as wan

    monkeypatch.setattr(wan, "optimized_attention", theirs)


NOT_ASKED = Reason.KV_FOREIGN_ATTENTION()


@loop("when", ["before", "after"])
def test_another_packs_code_of_ernies_attention_always_runs(when: str, stats_of: Any, monkeypatch: Any) -> None:
    """Another pack replaces the attention's code in its class, before or after ToMA has made its hooks."""
    model = models.TRANSFORMERS["ernie"]()
    cls = type(model.model.diffusion_model.layers[0].self_attention)
    forward = cls.forward

    def halved(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        return 0.5 * forward(self, *args, **kwargs)

    if when == "after":
        models.sample(balanced(model), HEIGHT, WIDTH, steps=1)
    monkeypatch.setattr(cls, "forward", halved)
    merged = balanced(model)
    assert torch.equal(*(models.sample(m, HEIGHT, WIDTH, steps=6) for m in (model, merged)))
    assert str(report_text.headline(stats_of(merged))) == f"Nothing was merged: {NOT_ASKED}"


def test_one_block_whose_attention_another_pack_replaces(flux: Any, stats_of: Any, monkeypatch: Any) -> None:
    """Perturbed guidance replaces the attention of single blocks. The run is merged."""
    block = flux.model.diffusion_model.double_blocks[1]
    run = type(block).forward

    def perturbed(self: Any, *args: Any, transformer_options: Any, **kwargs: Any) -> Any:
        options = {} if self is block else transformer_options
        return run(self, *args, transformer_options=options, **kwargs)

    monkeypatch.setattr(type(block), "forward", functools.wraps(run)(perturbed))
    merged = balanced(flux)
    models.sample(merged, HEIGHT, WIDTH, steps=6)
    assert stats_of(merged).merged_steps


def test_settings_that_skip_all_blocks_are_named(flux: Any, stats_of: Any) -> None:
    merged = balanced(flux, skip_first_blocks=1000)
    assert torch.equal(*(models.sample(m, HEIGHT, WIDTH, steps=4) for m in (merged, flux)))
    assert "skip first blocks" in str(report_text.headline(stats_of(merged)))


def test_attention_without_overrides_is_noticed(model_of: Any, stats_of: Any, without_overrides: None) -> None:
    """If attention calls no overrides, a run with a KV cache merges nothing."""
    model = model_of("wan")
    asked: dict[str, Any] = {"frames": 3, "steps": 8, "cfg": 5.0}
    own = models.sample(model, HEIGHT, WIDTH, **asked)
    merged = balanced(model)
    for _ in range(2):
        assert torch.equal(models.sample(merged, HEIGHT, WIDTH, **asked), own)
        assert str(report_text.headline(stats_of(merged))) == f"Nothing was merged: {NOT_ASKED}"


def test_it_is_noticed_where_an_evaluation_begins(
    model_of: Any, stats_of: Any, without_overrides: None, monkeypatch: Any
) -> None:
    """Both calls of an evaluation must have the same mode, because guidance takes the difference of their results."""
    sampling, seen = pack_module("nodes.adapters.sampling_run").SamplingRun, list[tuple[int, bool]]()
    observe = sampling.observe

    def observed(self: Any, *args: Any, **kwargs: Any) -> None:
        observe(self, *args, **kwargs)
        seen.append((self.step_plan.step, self.step_plan.mode.value == "refresh"))

    monkeypatch.setattr(sampling, "observe", observed)
    merged = balanced(several_calls(model_of("wan")))
    models.sample(merged, HEIGHT, WIDTH, frames=3, steps=4, cfg=5.0)
    assert seen == [(step, step < 1) for step in range(4) for _ in range(2)]
    assert list(stats_of(merged).unmerged_calls) == [NOT_ASKED]


def test_a_full_step_that_a_cache_skips_loses_nothing(flux: Any, attach: Any, stats_of: Any, monkeypatch: Any) -> None:
    """A step cache of another pack skips the full step 3."""
    model = attach(flux, **{**KEYS, "full_step_interval": 3})
    outputs: list[Tensor] = []

    def skipping(executor: Any, *args: Any, **kwargs: Any) -> Any:
        outputs.append(outputs[-1] if len(outputs) == 3 else executor(*args, **kwargs))
        return outputs[-1]

    model.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "cache", skipping)
    details = pack_module("toma_core.cache").Cache
    cached, found = details.read, []
    monkeypatch.setattr(details, "read", lambda *args: found.append(cached(*args)) or found[-1])
    models.sample(model, HEIGHT, WIDTH, steps=7)
    assert sorted(stats_of(model).merged_steps) == [1, 2, 5]
    assert found
    assert all(one is not None for one in found)
    assert stats_of(model).unmerged == {}


@loop(("granularity", "ran"), [("stack", 0), ("block", 0), ("block", 1)])
def test_a_refresh_follows_a_merged_step_in_which_a_cache_skips_later_blocks(
    granularity: str, ran: int, flux: Any, attach: Any, stats_of: Any, monkeypatch: Any
) -> None:
    """In the merged step 2, a step cache of another pack runs only the first blocks. These blocks update their cached
    tensors. The other blocks' cached tensors still belong to step 1, so step 3 is a refresh."""
    merged = attach(flux, **KEYS, granularity=granularity)
    outputs: list[Tensor] = []

    def skipping(executor: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            outputs.append(executor(*args, **kwargs))
        except StopIteration:
            outputs.append(outputs[-1])
        return outputs[-1]

    merged.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "cache", skipping)
    failing(monkeypatch, flux.model.diffusion_model.double_blocks[ran], 3, StopIteration())
    models.sample(merged, HEIGHT, WIDTH, steps=7)
    assert sorted(stats_of(merged).merged_steps) == [1, 2, 4, 5]
    assert stats_of(merged).full_reasons == {Reason.NOT_CACHED(): {3}}


@loop("kind", ["qwen_image", "hunyuan"])
def test_masked_text_is_no_obstacle(kind: str, model_of: Any, attach: Any) -> None:
    model = model_of(kind)
    mask = torch.ones(1, 7, dtype=torch.long)
    mask[:, 5:] = 0
    conds = prompts_of(model, attention_mask=mask)

    def sampled(patched: Any) -> Tensor:
        return models.sample(patched, HEIGHT, WIDTH, steps=5, cfg=1.0, **conds)

    watch = Watch(1)
    own, found = sampled(model), sampled(overridden(attach(model, **KEYS), watch))
    fewer = [q.shape[1] < k.shape[1] for q, k, _ in watch.seen]
    assert any(fewer), "merged blocks look at all tokens"
    without = sampled(attach(model, **{**KEYS, "kv_cache": False}))
    assert (found - own).norm() < (without - own).norm()


@loop(("kind", "packed"), [("wan", False), ("sd3", False), ("flux", True)])
def test_the_cache_is_read_only(kind: str, packed: bool, attach: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another node's override overwrites the keys and values that it gets. packed: whether the cache has 4 bits. The
    two models with a cache in full precision have attention over image tokens alone."""
    model = {"wan": models.wan, "sd3": lambda: models.sd3(x_block_self_attn_layers=[0, 1]), "flux": models.flux}[kind]()
    if packed:
        monkeypatch.setattr(pack_module("nodes.adapters.kv_memory"), "memory_left", lambda *_: 0)
    merged, spoiled = attach(model, **KEYS), list[bool]()

    def spoiling(function: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = function(q, k, v, *args, **kwargs)
        spoiled.append(q.shape != k.shape)
        k.zero_()
        v.zero_()
        return out

    assert all(map(torch.equal, evaluated(merged), evaluated(overridden(merged, spoiling))))
    assert any(spoiled)
