"""Test steps with several conditions: a negative prompt, areas, timed prompts, and conditions on several devices."""

import importlib
from typing import Any

import pytest
import torch
from comfy.samplers import sampler_object

from scripts.comfy_pack import pack_module
from testbed import models
from tests.loop import loop

report_text = pack_module("nodes.adapters.report_text")

SIDE = 24
every_kind = loop("kind", ["unet", "flux", "qwen"])


@every_kind
@pytest.mark.compat
def test_cond_and_uncond_share_destinations_and_weights(model: Any, attach: Any, plan_calls: Any) -> None:
    models.sample(attach(model), SIDE, SIDE, batch=2, steps=1)
    assert {call.copies for call in plan_calls} == {((None, None), (None, None))}
    for call in plan_calls:
        for name in ("dest_slots", "merge_weights", "unmerge_weights"):
            uncond, cond = getattr(call.plan, name).chunk(2)
            assert torch.equal(uncond, cond)
        assert not torch.equal(*call.plan.dest_slots[:2]), "two images should not look alike"


SEVERAL_DEVICES = pack_module("toma_core.reasons").Reason.SEVERAL_DEVICES()


def sampling_on_two_devices(sigmas: list[float], **settings: Any) -> tuple[Any, Any]:
    """Return a run and step(sigma, *conditions, width=...), which makes one evaluation and returns its mode."""
    config = pack_module("toma_core.config").ToMAConfig(**settings)
    sampling = pack_module("nodes.adapters.sampling_run").SamplingRun.start(config, None, sigmas)
    latent, options = torch.zeros(1, 4, 8, 8), {"multigpu_clones": {0: None, 1: None}}

    @torch.inference_mode()
    def step(sigma: float, *conds: Any, width: int = 8) -> str:
        timestep, x = torch.tensor([sigma]), torch.zeros(1, 64, 6)
        sampling.next(timestep)
        sampling.observe(timestep, [[c] for c in conds], latent, options)
        evaluation = sampling.evaluation(latent[..., :width], {"uuids": ["cond"]})
        if evaluation.refreshes:
            evaluation.cached("block", x).store(x)
        sampling.predicted(latent)
        return str(evaluation.step_plan.mode.value)

    return sampling, step


def test_several_devices_that_share_no_picture_are_full_where_several_conditions_take_part(pack: Any) -> None:
    cond, uncond = {"uuid": "cond"}, {"uuid": "uncond", "cross_attn": torch.ones(1), "timestep_end": 1.5}
    sampling, step = sampling_on_two_devices([3.0, 2.0, 1.0, 0.0])
    assert step(3.0, cond) == "merged"
    assert step(2.0, cond, uncond) == "full"
    assert step(1.0, cond, uncond) == "merged", "the other has ended"
    stats = sampling.run.stats
    assert (stats.evaluations, stats.merged_in.total(), set(stats.merged_steps)) == (3, 2, {0, 2})
    assert stats.full_reasons == {SEVERAL_DEVICES: {1}}


def test_a_condition_that_begins_on_several_devices_is_refreshed_once(pack: Any) -> None:
    cond, sigmas = {"uuid": "cond"}, [8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 0.0]
    for start, end, modes in ((6.5, 5.5, "rmrmrmf"), (8.5, 6.5, "rmrmrmf"), (4.5, 3.5, "rmmmrmf")):
        _, step = sampling_on_two_devices(sigmas, full_step_interval=4, kv_cache=True)
        uncond = {"uuid": "uncond", "cross_attn": torch.ones(1), "timestep_start": start, "timestep_end": end}
        assert "".join(step(sigma, cond, uncond)[0] for sigma in sigmas[:-1]) == modes


def test_tiles_on_several_devices_are_full(pack: Any) -> None:
    """The first two evaluations get the full latent, the third gets only a tile of the latent."""
    conds = {"uuid": "cond"}, {"uuid": "uncond"}
    sampling, step = sampling_on_two_devices([3.0, 2.0, 1.0, 0.0])
    assert [step(3.0, *conds), step(2.0, *conds), step(1.0, *conds, width=4)] == ["full", "merged", "full"]
    stats = sampling.run.stats
    assert (stats.evaluations, stats.merged_in.total(), set(stats.merged_steps)) == (3, 1, {1})
    assert stats.full_reasons == {SEVERAL_DEVICES: {0, 2}}


@loop("kind", ["unet", "flux"])
def test_conditions_on_several_devices_are_merged_once_a_picture_is_predicted(
    kind: str, model: Any, attach: Any, stats_of: Any, on_two_devices: Any, new_model: Any
) -> None:
    other = new_model(kind)
    asked: dict[str, Any] = {"steps": 4, "cfg": 3.0}
    own = models.sample(on_two_devices(model, other), SIDE, SIDE, **asked)

    settings = {"kv_cache": True, "full_step_interval": 3} if kind == "flux" else {"end_percent": 0.7}
    picture = on_two_devices(attach(model, **settings), other)
    found = models.sample(picture, SIDE, SIDE, **asked)
    stats = stats_of(picture)
    assert set(stats.merged_steps) == {1, 2}
    assert stats.full_reasons == ({SEVERAL_DEVICES: {0}} if kind == "unet" else {})
    assert 0 < (found - own).norm() < 0.5 * own.norm()
    assert torch.equal(models.sample(picture, SIDE, SIDE, **asked), found), "not the same twice"


@every_kind
@pytest.mark.compat
def test_areas_of_one_size_at_two_offsets_have_separate_plans(
    model: Any, attach: Any, plan_calls: Any, stats_of: Any
) -> None:
    """One step evaluates three images: left half, right half and full picture. The halves have equal grids."""
    patched = attach(model)
    half = (SIDE, SIDE // 2)
    positive = [
        *models.conditioning(model, seed=1, area=(*half, 0, 0), strength=1.0),
        *models.conditioning(model, seed=3, area=(*half, 0, SIDE // 2), strength=1.0),
        *models.conditioning(model, seed=4),
    ]
    out = models.sample(patched, SIDE, SIDE, steps=2, positive=positive)
    assert out.isfinite().all()
    assert {(12, 12), (12, 6)} <= set(stats_of(patched).grids)
    halves = [call for call in plan_calls if call.grid == (12, 6)]
    keys = {key for call in halves for key in call.copies}
    assert keys == {((*half, 0, 0), None), ((*half, 0, SIDE // 2), None)}
    for call in halves:
        assert call.plan.dest_slots.shape[0] == len(call.copies)
        if len(call.copies) == 2:
            assert not torch.equal(*call.plan.dest_slots)


@every_kind
@pytest.mark.compat
def test_combined_and_timed_prompts_share_one_plan(
    kind: str, model: Any, attach: Any, plan_calls: Any, stats_of: Any
) -> None:
    """A run makes one plan for each kind of block of a transformer, or for each resolution of a UNet."""
    positive = [
        *models.conditioning(model, seed=1),
        *models.conditioning(model, seed=3),
        *models.conditioning(model, seed=4, start_percent=0.5, end_percent=1.0),
    ]
    patched = attach(model)
    assert models.sample(patched, SIDE, SIDE, steps=3, positive=positive).isfinite().all()
    assert {len(call.copies) for call in plan_calls} >= {3, 4}
    assert len({key for call in plan_calls for key in call.copies}) == 1
    assert stats_of(patched).selections == (1 if kind == "qwen" else 2)


@loop("granularity", ["module", "block"])
def test_negative_model_of_another_class_is_not_merged(
    flux: Any, stranger: Any, attach: Any, stats_of: Any, granularity: str
) -> None:
    """`Guider_DualModel` runs the negative model with the positive model's options, which include ToMA's."""
    nodes = importlib.import_module("comfy_extras.nodes_custom_sampler")
    if not hasattr(nodes, "Guider_DualModel"):
        pytest.skip("this ComfyUI has no guider for two models")

    def run(model: Any) -> torch.Tensor:
        guider = nodes.Guider_DualModel(model, stranger)
        guider.set_conds(models.conditioning(flux, seed=1), models.conditioning(flux, seed=2))
        guider.set_cfg(3.0)
        noise = torch.randn(1, 16, SIDE, SIDE, generator=torch.Generator().manual_seed(4))
        sigmas = torch.tensor([1.0, 0.8, 0.5, 0.0])
        return guider.sample(noise, torch.zeros_like(noise), sampler_object("euler"), sigmas, seed=4, disable_pbar=True)

    patched = attach(flux, granularity=granularity)
    out = run(patched)
    assert out.isfinite().all()
    assert not torch.equal(out, run(flux))
    stats = stats_of(patched)
    (reason,) = stats.unmerged_calls
    assert (reason.id.value, stats.unmerged) == ("unknown_model", {})
    assert "6 of 6 blocks" in str(report_text.headline(stats))
    assert len(stats.merged_blocks) == 6


def test_an_area_outside_of_a_latent_is_no_error() -> None:
    """A node may evaluate a small latent with the areas of a large latent."""
    area_size = pack_module("nodes.adapters.conditions").area_size
    assert area_size(None, (8, 6)) == (8, 6)
    assert area_size((8, 8, 4, 0), (8, 6)) == (4, 6)
    assert area_size((8, 8, 4, 0), (3, 8, 6)) == (3, 4, 6)
    assert area_size((2, 8, 8, 1, 4, 0), (3, 8, 6)) == (2, 4, 6)
    assert min(area_size((8, 8, 16, 0), (8, 6))) < 0
