"""Test Qwen-Image 2.1 with ComfyUI's prefix cache, with references, and with nodes that change blocks."""

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
from tests.nodes.adapters.helpers import prompts_of
from tests.nodes.adapters.kv_helpers import KEYS, Watch, evaluated, overridden

REFERENCES = ((8, 12), (24, 30), (HEIGHT, WIDTH))  # smaller than the image, larger, and equally large
CACHES = ("off", "auto", "cpu")
PLACES = (*CACHES, "gpu")
IMAGE = HEIGHT * WIDTH


@pytest.fixture(scope="module", params=[False, True], ids=["copies", "in place"])
def model(request: pytest.FixtureRequest, pack: Any) -> Any:
    """Return a small model. With `in_place`, blocks change their input and are called twice while the prefix cache is
    filled, as in all releases of the model but the first. The stand-in for older ComfyUIs has both forms. ComfyUI's own
    class has one of them."""
    from comfy.ldm.qwen_image21.model import QwenImage21Transformer2DModel as Model

    known = "in_place" in inspect.signature(Model).parameters
    return models.qwen_image21(**({"in_place": request.param} if known else {}))


def conds(model: Any, references: tuple[tuple[int, int], ...] = ()) -> dict[str, Any]:
    latents = [noise(1, 64, *sides) for sides in references]
    return prompts_of(model, **({"reference_latents": latents} if latents else {}))


def sampled(model: Any, **options: Any) -> Tensor:
    return models.sample(model, HEIGHT, WIDTH, **{"steps": 3, "cfg": 4.0, **options})


def at(model: Any, cache: str, dtype: str = "default") -> Any:
    """Return the model with ComfyUI's prefix cache on the given device and in the given dtype."""
    model = model.clone()
    model.model_options["transformer_options"]["qwen_image21_cache"] = {"device": cache, "dtype": dtype}
    return model


@loop("references", [REFERENCES[1:2], REFERENCES])
def test_comfyuis_cache_changes_nothing(
    references: Any, model: Any, attach: Any, stats_of: Any, hooks_left: Any
) -> None:
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


@loop("cache", CACHES)
@loop("references", [(), REFERENCES[:2]])
def test_without_changes_a_merged_step_equals_the_models_own(
    cache: str, references: Any, model: Any, attach: Any, stats_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = at(model, cache)
    given = conds(model, references)
    monkeypatch.setattr(models.sampling, "conditioning", lambda *_, seed, **__: list(given.values())[seed - 1])
    merged = attach(model, **KEYS)
    (own, *_), found = evaluated(model, batch=2), evaluated(merged, batch=2)
    assert (stats_of(merged).evaluations, stats_of(merged).merged_in.total()) == (4, 3)
    assert stats_of(merged).unmerged == {}
    for picture in found:
        torch.testing.assert_close(picture, own, rtol=1e-5, atol=1e-5 * float(own.abs().max()))


@loop(("dtype", "most"), [("int8", 0.02), ("int4", 0.3)])
def test_comfyuis_cache_in_fewer_bits(dtype: str, most: float, model: Any, attach: Any, stats_of: Any) -> None:
    """A prefix cache in 8 or 4 bits changes merged pictures about as much as it changes unmerged pictures."""
    merged, given = attach(model, **KEYS), conds(model, REFERENCES[:2])
    alone = errors([sampled(at(model, "auto", dtype), **given)], [sampled(at(model, "auto"), **given)])[0]
    exact = sampled(at(merged, "auto"), **given)
    found = [sampled(at(merged, cache, dtype), **given) for cache in ("auto", "cpu", "gpu")]
    assert stats_of(merged).unmerged == {}
    assert all(torch.equal(each, found[0]) for each in found)
    assert 0 < alone < most
    assert 0 < errors(found[:1], [exact])[0] < 2 * most


@loop("cache", CACHES)
def test_queries_of_destinations_see_keys_of_all(cache: str, model: Any, attach: Any) -> None:
    """Text attends to text only, and destinations attend to the keys of all tokens."""
    model = at(model, cache)
    watch = Watch(1)
    evaluated(overridden(attach(model, ratio=0.5, **KEYS), watch))
    (seen,) = watch.evaluations()
    last = [(q.shape[1], k.shape[1]) for q, k, _ in seen[-8 if cache == "off" else -4 :]]
    image = IMAGE // 2, TEXT + IMAGE
    assert last == ([(TEXT, TEXT), image] * 4 if cache == "off" else [image] * 4)


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


@loop("cache", CACHES)
@loop("patch", [replaced, patched, controlled])
def test_nodes_between_blocks_see_all_tokens(cache: str, patch: Any, model: Any, attach: Any) -> None:
    seen: list[int] = []
    changed = patch(at(model, cache), seen)
    own = sampled(changed)
    assert set(seen) == {TEXT + IMAGE}
    found = sampled(attach(changed, ratio=0.5, **KEYS))
    assert set(seen) == {TEXT + IMAGE}
    assert 0 < errors([found], [own])[0] < 0.5


def test_comfyuis_cache_is_counted_beside_the_kv_cache(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """ComfyUI's prefix cache holds keys and values of text and references in every block, for each condition of a
    step."""
    from comfy.sampler_helpers import convert_cond
    from comfy.samplers import CFGGuider, sampler_object

    memory = pack_module("nodes.adapters.kv_memory")
    prefix = (TEXT + 24 * 30) * 2 * 4 * 48 * 4  # tokens * (keys and values) * blocks * width * bytes

    def planned(cache: str, dtype: str, cfg: float, room: float) -> bool:
        """Return whether the KV cache fits in full precision. room: free memory beyond the KV cache, as a multiple of
        one condition's prefix cache."""
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
