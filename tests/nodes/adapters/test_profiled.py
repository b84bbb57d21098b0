"""Test sampling with a profile, which gives ratios by block and sigma."""

from typing import Any

import comfy.samplers
import pytest
import torch
from comfy_extras.nodes_model_advanced import ModelSamplingDiscrete

from scripts.comfy_pack import pack_module
from testbed import models
from tests.loop import loop

run = pack_module("nodes.adapters.patch_model")
identity = pack_module("nodes.adapters.registry")
ToMAConfig = pack_module("toma_core").ToMAConfig
Reason = pack_module("toma_core.reasons").Reason
SIDE, STEPS = 24, 6
CACHED = {"selection_interval": 3, "weight_interval": 3, "full_step_interval": 3}


every_kind = loop("kind", ["unet", "flux", "qwen_image", "wan"])


@pytest.fixture
def model(kind: str, model_of: Any) -> Any:
    return model_of(kind)


def names(model: Any) -> list[str]:
    return [block.name for block in identity.blocks_of(model)]


def profiled(model: Any, *ratio_schedule: tuple[float, dict[str, float]], **settings: Any) -> Any:
    return run.apply_toma(model, ToMAConfig(**{"min_tokens": 4, **settings}), None, ratio_schedule)


def sampled(model: Any, steps: int = STEPS) -> torch.Tensor:
    """Sample a picture, or three frames of a video."""
    frames = 3 if "wan" in type(model.model.diffusion_model).__module__ else 1
    return models.sample(model, SIDE, SIDE, steps=steps, frames=frames)


@every_kind
@pytest.mark.compat
@loop("settings", [{}, CACHED, {"granularity": "module"}, {"granularity": "block"}])
def test_one_ratio_everywhere_is_the_setting_to_the_bit(model: Any, settings: dict[str, Any]) -> None:
    plain = run.apply_toma(model, ToMAConfig(min_tokens=4, ratio=0.4, **settings))
    everywhere = dict.fromkeys(names(model), 0.4)
    same = profiled(model, (5.0, everywhere), (0.5, everywhere), (0.0, everywhere), ratio=0.9, **settings)
    assert torch.equal(sampled(same), sampled(plain))
    assert not torch.equal(sampled(same), sampled(model))


@every_kind
@pytest.mark.compat
def test_a_profile_that_merges_nothing_is_bit_identical(model: Any, stats_of: Any, no_state_left: None) -> None:
    zero_ratios = profiled(model, (0.0, {}), full_step_interval=3)
    assert torch.equal(sampled(zero_ratios), sampled(model))
    assert stats_of(zero_ratios).merged_blocks == set()
    assert stats_of(zero_ratios).cache_bytes == 0


@every_kind
def test_one_block_alone(model: Any, stats_of: Any) -> None:
    chosen = names(model)[1]
    patched = profiled(model, (0.0, {chosen: 0.75}))
    assert sampled(patched).isfinite().all()
    stats = stats_of(patched)
    assert stats.merged_blocks == {chosen}
    assert stats.unmerged_names()[Reason.PROFILE_SKIPS_BLOCK()] == {*names(model)} - {chosen}
    assert set(stats.merged_steps.values()) == {0.75}


def test_skipping_a_kind_equals_the_setting(flux: Any) -> None:
    """A profile without the first block of each kind equals `skip_first_blocks` = 1."""
    ratios = {name: 0.5 for name in names(flux) if not name.endswith(".0")}
    plain = run.apply_toma(flux, ToMAConfig(min_tokens=4, skip_first_blocks=1))
    assert torch.equal(sampled(profiled(flux, (0.0, ratios))), sampled(plain))


def test_blocks_keep_their_plans(unet: Any, stats_of: Any) -> None:
    """Blocks with the same resolution and ratio share one plan, so two ratios need two plans per resolution."""
    by_ratio = {name: 0.25 + 0.5 * (n % 2) for n, name in enumerate(names(unet))}
    patched = profiled(unet, (0.0, by_ratio), selection_interval=100, weight_interval=100)
    sampled(patched)
    assert stats_of(patched).selections == 2 * len(stats_of(patched).grids)


def test_only_blocks_that_use_residuals_cache_them(flux: Any, stats_of: Any) -> None:
    everything = profiled(flux, (0.0, dict.fromkeys(names(flux), 0.5)), full_step_interval=3, kv_cache=True)
    sampled(everything)
    one = profiled(flux, (0.0, {"single.1": 0.5}), full_step_interval=3, kv_cache=True)
    sampled(one)
    assert 0 < stats_of(one).cache_bytes < stats_of(everything).cache_bytes


def test_sigmas_not_steps(unet: Any, decisions: list[Any]) -> None:
    first, sampling = names(unet)[0], unet.get_model_object("model_sampling")
    patched = profiled(unet, (3.0, {first: 0.5}), (0.0, {}))
    for steps in (6, 12):
        decisions.clear()
        sampled(patched, steps)
        made = [d.ratio for d in decisions]
        sigmas = comfy.samplers.calculate_sigmas(sampling, "simple", steps).tolist()[:-1]
        assert made == [0.5 if sigma > 3.0 else 0.0 for sigma in sigmas]
        assert 0 < sum(ratio > 0 for ratio in made) < steps


def test_fingerprints(unet: Any, flux: Any) -> None:
    """A fingerprint also contains what the model predicts, such as EPS or V_PREDICTION."""
    ours = identity.fingerprint(unet)
    assert ours == identity.fingerprint(unet.clone())
    assert ours.startswith("unet with blocks input.4 1, ")
    assert identity.fingerprint(flux) == "flux with blocks double 3, single 3 of width 48, noise CONST up to 1"
    assert identity.fingerprint(models.flux(double=2, single=3)) != identity.fingerprint(flux)
    kinds = [("eps", False), ("v_prediction", False), ("v_prediction", True), ("lcm", False)]
    made = [ModelSamplingDiscrete().patch(unet, kind, zsnr)[0] for kind, zsnr in kinds]
    assert [identity.fingerprint(model).partition(", noise ")[2] for model in made] == [
        "EPS up to 15", "V_PREDICTION up to 15", "V_PREDICTION up to 4.5e+03", "LCM up to 15",
    ]  # fmt: skip
    assert identity.fingerprint(made[0]) == ours


@loop("kind", models.KINDS)
def test_every_family_lists_its_blocks(model: Any, stats_of: Any) -> None:
    patched = run.apply_toma(model, ToMAConfig(min_tokens=4))
    models.sample(patched, SIDE, SIDE, steps=1)
    stats, facts = stats_of(patched), identity.blocks_of(model, torch.empty(1, 1, SIDE, SIDE, device="meta"))
    assert {fact.name for fact in facts} == stats.merged_blocks
    assert len({fact.name for fact in facts}) == len(facts)
    assert {fact.tokens for fact in facts} == {height * width for height, width in stats.grids}
    ratios = {fact.name: 0.25 + 0.25 * (n % 2) for n, fact in enumerate(facts)}
    models.sample(profiled(model, (0.0, ratios)), SIDE, SIDE, steps=1)
