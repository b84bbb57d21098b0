"""Test Qwen-Image 2.1. It calls its blocks in several ways, may have references, and is tested with nodes that change
blocks."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from scripts.comfy_pack import pack_module
from testbed import models
from tests.loop import loop
from tests.nodes.adapters.families.layouts import HEIGHT, TEXT, WIDTH, errors, noise
from tests.nodes.adapters.kv_helpers import KEYS, Watch, evaluated, overridden

REFERENCES = ((8, 12), (24, 30), (HEIGHT, WIDTH))  # smaller than the image, larger, and equally large
CACHES = ("off", "auto", "cpu")
PLACES = (*CACHES, "gpu")
# Whether blocks change their input in place, as in all releases of the model but the first. Such blocks are called
# twice while the prefix cache is filled.
FORMS = (False, True)
IMAGE = HEIGHT * WIDTH


@pytest.fixture(scope="module")
def made(pack: Any) -> Any:
    """made(in_place): return a small model. in_place: whether its blocks change their input in place. ComfyUI's own
    class has only one of these forms."""
    found: dict[bool, Any] = {}

    def of(in_place: bool) -> Any:
        from comfy.ldm.qwen_image21.model import QwenImage21Transformer2DModel as Model

        if in_place not in found:
            known = "in_place" in inspect.signature(Model).parameters
            found[in_place] = models.qwen_image21(**({"in_place": in_place} if known else {}))
        return found[in_place]

    return of


def conds(model: Any, references: tuple[tuple[int, int], ...] = (), **options: Any) -> dict[str, Any]:
    if references:
        options["reference_latents"] = [noise(1, 64, *sides) for sides in references]
    positive, negative = (models.conditioning(model, TEXT, seed, **options) for seed in (1, 2))
    return {"positive": positive, "negative": negative}


def sampled(model: Any, **options: Any) -> Tensor:
    return models.sample(model, HEIGHT, WIDTH, **{"steps": 3, "cfg": 4.0, **options})


def at(model: Any, cache: str, dtype: str = "default") -> Any:
    """Return the model with ComfyUI's prefix cache on the given device and in the given dtype."""
    model = model.clone()
    model.model_options["transformer_options"]["qwen_image21_cache"] = {"device": cache, "dtype": dtype}
    return model


@loop("in_place", FORMS)
@loop("references", [REFERENCES[1:2], REFERENCES])
def test_comfyuis_cache_changes_nothing(
    in_place: bool, references: Any, made: Any, attach: Any, stats_of: Any, hooks_left: Any
) -> None:
    model = made(in_place)
    merged, given = attach(model, **KEYS), conds(model, references)
    plain = sampled(at(model, "auto"), **given)
    found = {cache: sampled(at(merged, cache), **given) for cache in PLACES}
    for cache in PLACES[1:]:
        assert errors([found[cache]], [found["off"]])[0] < 1e-5
    stats = stats_of(at(merged, "auto"))
    assert stats.unmerged == {}
    assert set(stats.grids) == {(HEIGHT, WIDTH)}
    assert 0 < errors([found["off"]], [plain])[0] < 0.5
    assert torch.equal(sampled(at(merged, "auto"), **given), found["auto"])
    assert torch.equal(sampled(at(model, "auto"), **given), plain)
    assert hooks_left(model) == []


@loop("in_place", FORMS)
@loop("cache", CACHES)
@loop("references", [(), REFERENCES[:2]])
def test_without_changes_a_merged_step_equals_the_models_own(
    in_place: bool, cache: str, references: Any, made: Any, attach: Any, stats_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = at(made(in_place), cache)
    given = conds(model, references)
    monkeypatch.setattr(models.sampling, "conditioning", lambda *_, seed, **__: list(given.values())[seed - 1])
    merged = attach(model, **KEYS)
    (own, *_), found = evaluated(model, batch=2), evaluated(merged, batch=2)
    assert (stats_of(merged).evaluations, stats_of(merged).merged_in.total()) == (4, 3)
    assert stats_of(merged).unmerged == {}
    for picture in found:
        torch.testing.assert_close(picture, own, rtol=1e-5, atol=1e-5 * float(own.abs().max()))


@loop("in_place", FORMS)
@loop(("dtype", "most"), [("int8", 0.02), ("int4", 0.3)])
def test_comfyuis_cache_in_fewer_bits(
    in_place: bool, dtype: str, most: float, made: Any, attach: Any, stats_of: Any
) -> None:
    """A prefix cache in 8 or 4 bits changes merged pictures about as much as it changes unmerged pictures."""
    model, given = made(in_place), conds(made(in_place), REFERENCES[:2])
    merged = attach(model, **KEYS)
    alone = errors([sampled(at(model, "auto", dtype), **given)], [sampled(at(model, "auto"), **given)])[0]
    exact = sampled(at(merged, "auto"), **given)
    found = [sampled(at(merged, cache, dtype), **given) for cache in ("auto", "cpu", "gpu")]
    assert stats_of(merged).unmerged == {}
    assert all(torch.equal(each, found[0]) for each in found)
    assert 0 < alone < most
    assert 0 < errors(found[:1], [exact])[0] < 2 * most


@loop("in_place", FORMS)
@loop("cache", CACHES)
def test_queries_of_destinations_see_keys_of_all(in_place: bool, cache: str, made: Any, attach: Any) -> None:
    """Text attends to text only, and destinations attend to the keys of all tokens."""
    model = at(made(in_place), cache)
    watch = Watch(1)
    evaluated(overridden(attach(model, ratio=0.5, **KEYS), watch))
    (seen,) = watch.evaluations()
    last = [(q.shape[1], k.shape[1]) for q, k, _ in seen[-8 if cache == "off" else -4 :]]
    image = IMAGE // 2, TEXT + IMAGE
    assert last == ([(TEXT, TEXT), image] * 4 if cache == "off" else [image] * 4)


@loop("in_place", FORMS)
@loop("cache", CACHES)
@loop("patch", ["a replaced block", "after each block", "a control branch"])
def test_nodes_between_blocks_see_all_tokens(in_place: bool, cache: str, patch: str, made: Any, attach: Any) -> None:
    model = at(made(in_place), cache)
    seen: list[int] = []
    changed = {
        "a replaced block": replaced, "after each block": patched, "a control branch": controlled
    }[patch](model.clone(), seen)  # fmt: skip
    own = sampled(changed)
    assert set(seen) == {TEXT + IMAGE}
    found = sampled(attach(changed, ratio=0.5, **KEYS))
    assert set(seen) == {TEXT + IMAGE}
    assert 0 < errors([found], [own])[0] < 0.5


def replaced(model: Any, seen: list[int]) -> Any:
    def replacement(args: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
        seen.append(args["img"].shape[1])
        out: dict[str, Any] = extra["original_block"](args)
        seen.append(out["img"].shape[1])
        return out

    model.set_model_patch_replace(replacement, "dit", "single_block", 2)
    return model


def patched(model: Any, seen: list[int]) -> Any:
    def patch(args: dict[str, Any]) -> dict[str, Any]:
        seen.append(args["img"].shape[1])
        return args

    model.set_model_patch(patch, "single_block")
    return model


def controlled(model: Any, seen: list[int]) -> Any:
    """Run a separate branch of blocks on all tokens and add the branch's output after every second block, as Fun
    ControlNet does."""
    blocks = copy.deepcopy(model.model.diffusion_model.transformer_blocks[:2])
    state: dict[str, Tensor] = {}

    def replacement(args: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
        index = args["transformer_options"]["block_index"]
        stream = state["stream"] if index else args["img"] + 0.1
        seen.append(stream.shape[1])
        given = {name: args[name] for name in ("mod", "pe", "attn_fn", "prefix_len", "transformer_options")}
        out = extra["original_block"](args)["img"]
        state["stream"] = blocks[index // 2](stream.clone(), *given.values())
        return {"img": out + 0.1 * state["stream"]}

    for index in (0, 2):
        model.set_model_patch_replace(replacement, "dit", "single_block", index)
    return model


def test_comfyuis_cache_is_counted_beside_the_kv_cache(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """ComfyUI's prefix cache holds keys and values of text and references in every block, for each condition of a
    step."""
    from comfy.sampler_helpers import convert_cond
    from comfy.samplers import CFGGuider, sampler_object

    memory, model = pack_module("nodes.adapters.kv_memory"), made(True)
    prefix = (TEXT + 24 * 30) * 2 * 4 * 48 * 4  # tokens * (keys and values) * blocks * width * bytes

    def planned(cache: str, dtype: str, cfg: float, room: float) -> bool:
        """Return whether the KV cache fits in full precision. room: free memory that the KV cache leaves, as a multiple
        of one condition's prefix cache."""
        placed = at(model, cache, dtype)
        guider = CFGGuider(placed)
        guider.set_cfg(cfg)
        guider.conds = {name: convert_cond(cond) for name, cond in conds(model, REFERENCES[1:2]).items()}
        config, latent = pack_module("toma_core.config").ToMAConfig(**KEYS), torch.zeros(1, 64, HEIGHT, WIDTH)
        asked = config, guider, latent, sampler_object("euler"), latent.shape, (1.0, 0.7, 0.4, 0.0)
        monkeypatch.setattr(memory, "memory_left", lambda *_: 1e12)
        needed = memory.plan_kv_cache(*asked).bytes
        monkeypatch.setattr(memory, "memory_left", lambda *_: needed + room * prefix)
        return not memory.plan_kv_cache(*asked).quantized

    for cfg in (1.0, 4.0):
        number = 1 if cfg == 1.0 else 2
        assert planned("auto", "default", cfg, number)
        assert not planned("auto", "default", cfg, number - 0.01)
        assert planned("gpu", "int8", cfg, number / 2)
        assert not planned("gpu", "int4", cfg, number / 4 - 0.01)
        assert planned("cpu", "default", cfg, 0)
        assert planned("off", "default", cfg, 0)
