"""Probes: they measure what merging one site would change, and the run that they ride on is the unmerged one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import models
from scripts.comfy_pack import pack_module
from tests.loop import loop

probing = pack_module("nodes.adapters.probe")
run = pack_module("nodes.adapters.patch_model")
identity = pack_module("nodes.adapters.fingerprint")
core = pack_module("toma_core")
BlockFacts = pack_module("nodes.adapters.blocks").BlockFacts
SIDE = 24
CLOSE = {"selection_interval": 3, "weight_interval": 3}


@pytest.fixture(params=["unet", "flux"])
def model(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


def probed(model: Any, steps: int = 8, most: int = 1000, **settings: Any) -> tuple[Any, torch.Tensor, Any]:
    sites = probing.sites_of(identity.blocks_of(model), 12)
    probes = probing.Probes(sites, most)
    patched = run.apply_toma(model, core.ToMAConfig(**{"min_tokens": 4, **settings}))
    return probes, models.sample(probes.on(patched), SIDE, SIDE, steps=steps), patched


@pytest.mark.compat
@loop("settings", [{}, {**CLOSE, "full_step_interval": 3}, {"similarity_from": "prediction"}])
def test_the_run_is_the_unmerged_one(model: Any, settings: dict[str, Any], no_state_left: None) -> None:
    probes, latent, _ = probed(model, **settings)
    assert torch.equal(latent, models.sample(model, SIDE, SIDE, steps=8))
    assert probes.done == len(probes.sites) * len(probes.bands) + len(probes.bands) + 2
    assert len(probes.site_errors) == len(probes.sites) * len(probes.bands)
    assert all(error > 0 for error in (*probes.site_errors.values(), *probes.joint_errors.values()))


def test_a_probe_is_what_the_run_would_do(flux: Any, apart: Any) -> None:
    """With one site merged, and the rest of the run whole, the first merged evaluation differs by what was measured.
    Plans are each block's own here: else a probe uses the one that is there, as the run to come does. It is of the
    first condition alone, where a run takes the tokens of the negative."""
    pictures: list[torch.Tensor] = []

    def keep(args: dict[str, Any]) -> torch.Tensor:
        pictures.append(args["cond_denoised"].clone())
        return args["denoised"]

    listening = flux.clone()
    listening.set_model_sampler_post_cfg_function(keep)
    apart(flux)
    probes, _, _ = probed(listening, steps=3)
    step = probes.bands[0].probed
    assert step == 0
    whole = pictures[0]
    for site, blocks in probes.sites.items():
        ratio_schedule = ((0.0, dict.fromkeys(blocks, 0.5)),)
        pictures.clear()
        alone = run.apply_toma(listening, core.ToMAConfig(min_tokens=4), None, ratio_schedule)
        models.sample(alone, SIDE, SIDE, steps=3)
        change = float((pictures[0] - whole).double().square().sum())
        assert probes.site_errors[site, 0] == pytest.approx(change, rel=0.15), site


def test_few_evaluations_tell_the_most_important(unet: Any) -> None:
    probes, *_ = probed(unet, most=1)
    assert len(probes.bands) == 3
    assert set(probes.site_errors) == {(site, level) for site in probes.sites for level in (0, 1)}
    assert set(probes.joint_errors) == {(0, 0.5), (1, 0.5), (2, 0.5), (1, 0.75)}
    assert probes.done == 2 * len(probes.sites) + 4


def test_interrupted_without_a_trace(unet: Any, no_state_left: None) -> None:
    import comfy.model_management

    def cancelled() -> None:
        raise comfy.model_management.InterruptProcessingException

    probes = probing.Probes(probing.sites_of(identity.blocks_of(unet), 12), 100, cancelled)
    patched = run.apply_toma(unet, core.ToMAConfig(min_tokens=4))
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        models.sample(probes.on(patched), SIDE, SIDE, steps=4)
    assert probes.done == 0


def test_samplers_that_read_the_negative_get_the_unmerged_one(unet: Any, no_state_left: None) -> None:
    """CFG++ takes the negative's picture of the same evaluation; 2S asks twice a step, and so does Heun."""
    for sampler in ("euler_cfg_pp", "dpmpp_2m_cfg_pp", "dpmpp_2s_ancestral", "heun"):
        probes = probing.Probes(probing.sites_of(identity.blocks_of(unet), 6), 100)
        patched = run.apply_toma(unet, core.ToMAConfig(min_tokens=4))
        latent = models.sample(probes.on(patched), SIDE, SIDE, steps=6, sampler=sampler)
        assert torch.equal(latent, models.sample(unet, SIDE, SIDE, steps=6, sampler=sampler)), sampler
        assert len(probes.site_errors) == len(probes.sites) * len(probes.bands), sampler
        assert all(error > 0 for error in (*probes.site_errors.values(), *probes.joint_errors.values())), sampler


def test_what_merged_nothing_is_not_free(unet: Any) -> None:
    """The first step runs whole where plans await a picture, and is in no band; coarser stacks are too small."""
    probes, *_ = probed(unet, steps=3, similarity_from="prediction")
    assert 0 not in [step for band in probes.bands for step in band.steps]
    assert probes.done > 0
    assert all(error > 0 for error in (*probes.site_errors.values(), *probes.joint_errors.values()))
    probes, *_ = probed(unet, min_tokens=(SIDE // 2) ** 2)
    fine = {site for site, _ in probes.site_errors}
    assert {site for site in probes.sites if probes.measured(site)} == fine
    assert 0 < len(fine) < len(probes.sites)
    assert all(error > 0 for error in (*probes.site_errors.values(), *probes.joint_errors.values()))


def test_a_condition_that_begins_on_the_way(unet: Any, no_state_left: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation with somebody new is whole after all: it is measured in the step after, and all are with detail."""
    sites = probing.sites_of(identity.blocks_of(unet), 6)
    settings = core.ToMAConfig(min_tokens=4, **{**CLOSE, "full_step_interval": 3})
    first = probing.Probes(sites, 0)
    patched = run.apply_toma(unet, settings)
    models.sample(first.on(patched), SIDE, SIDE, steps=12)
    begins = first.bands[1].probed
    level = unet.get_model_object("model_sampling").percent_to_sigma
    start = next(n / 1000 for n in range(1000) if level(n / 1000) < first.sigmas[begins - 1])
    assert level(start) >= first.sigmas[begins]
    later = models.conditioning(unet, seed=3, start_percent=start, end_percent=1.0)
    probes = probing.Probes(sites, 1000)
    both = [*models.conditioning(unet, seed=1), *later]
    details = pack_module("toma_core.cache").ResidualCache
    kept, lacking = details.read, []

    def watched(self: Any, keys: Any, like: torch.Tensor) -> Any:
        found = kept(self, keys, like)
        lacking.extend([keys] if found is None else [])
        return found

    monkeypatch.setattr(details, "read", watched)
    latent = models.sample(probes.on(patched), SIDE, SIDE, steps=12, positive=both)
    assert torch.equal(latent, models.sample(unet, SIDE, SIDE, steps=12, positive=both))
    assert {*probes.site_errors} == {(site, level) for site in sites for level in range(len(probes.bands))}
    assert probes.evaluations > probes.done + len(probes.bands)
    assert lacking == []


def test_a_video_whose_detail_is_too_much_is_not_asked_again(
    model_of: Any, no_state_left: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack_module("toma_core.cache"), "MAX_CACHE_BYTES", 1)
    wan = model_of("wan")
    probes = probing.Probes(probing.sites_of(identity.blocks_of(wan), 4), 1000)
    patched = probes.on(run.apply_toma(wan, core.ToMAConfig(min_tokens=4, **{**CLOSE, "full_step_interval": 3})))
    models.sample(patched, SIDE, SIDE, steps=12, frames=3)
    assert probes.done == 0
    assert probes.evaluations <= 2


def test_values_that_are_no_numbers(unet: Any) -> None:
    """A site that makes them is not to be merged; the others are measured."""
    probes, *_ = probed(unet)
    site = next(iter(probes.sites))
    broken = next(probe for probe in probes._errors if probe.site == site)
    probes._errors[broken] = torch.tensor(float("nan"))
    assert not probes.measured(site)
    assert len(probes.site_errors) == (len(probes.sites) - 1) * len(probes.bands)


def test_a_probe_that_fails_leaves_the_run_as_it_was(unet: Any, no_state_left: None) -> None:
    """Whoever catches it, as packs do that try again with less memory, samples on by the run's own schedule."""
    caught: list[bool] = []

    def fail() -> None:
        raise MemoryError

    probes = probing.Probes(probing.sites_of(identity.blocks_of(unet), 6), 100, fail)
    patched = probes.on(run.apply_toma(unet, core.ToMAConfig(min_tokens=4)))

    def retried(executor: Any, *args: Any, **kwargs: Any) -> Any:
        sampling = args[4]["transformer_options"]["toma_sampling"]
        before = sampling.run.schedule
        try:
            return executor(*args, **kwargs)
        except MemoryError:
            seen = not sampling.step_plan.ratio and sampling.run.schedule == before
            caught.append(seen)
            return executor(*args, **kwargs)

    kind = probing.WrappersMP.CALC_COND_BATCH
    wrappers = patched.wrappers.pop(kind)
    patched.add_wrapper_with_key(kind, "another", retried)
    for key, each in wrappers.items():
        for wrapper in each:
            patched.add_wrapper_with_key(kind, key, wrapper)
    assert torch.equal(models.sample(patched, SIDE, SIDE, steps=6), models.sample(unet, SIDE, SIDE, steps=6))
    assert len(caught) >= len(probes.bands)
    assert all(caught)


def schedule(steps: int, **settings: Any) -> Any:
    sigmas = tuple(float(steps - n) for n in range(steps))
    return core.Schedule(core.ToMAConfig(**settings), sigmas, finishes=True)


def test_bands_of_equal_size() -> None:
    ratio_schedule = probing.bands_of(schedule(8))
    assert [band.steps for band in ratio_schedule] == [(0, 1, 2), (3, 4), (5, 6, 7)]
    assert [band.probed for band in ratio_schedule] == [1, 4, 6]
    assert [round(band.above, 3) for band in ratio_schedule] == [
        round((6 * 5) ** 0.5, 3),
        round((4 * 3) ** 0.5, 3),
        0.0,
    ]
    assert [band.steps for band in probing.bands_of(schedule(2))] == [(0,), (1,)]


def test_bands_follow_whole_steps() -> None:
    """20 steps: whole are 0, 3, ..., 18 and the last. Six times two merged ones, two of these in each band."""
    given = schedule(20, full_step_interval=3)
    ratio_schedule = probing.bands_of(given)
    assert [band.steps for band in ratio_schedule] == [(1, 2, 4, 5), (7, 8, 10, 11), (13, 14, 16, 17)]
    # In a schedule with these bands every step has the ratio of its own.
    profiled = core.Schedule(
        given.config,
        given.sigmas,
        finishes=True,
        ratio_schedule=tuple((b.above, {"a": 0.1 * n}) for n, b in enumerate(ratio_schedule, 1)),
    )
    for n, band in enumerate(ratio_schedule, 1):
        assert {profiled.decide(given.sigmas[step]).of("a").ratio for step in band.steps} == {0.1 * n}


def test_plans_of_pictures_are_made_where_the_run_makes_them() -> None:
    """A step that keeps detail makes none, though it is the first of its selection: the next one does."""
    every = {"full_step_interval": 5, "selection_interval": 5, "weight_interval": 5}
    told = schedule(20, **every, similarity_from="prediction")
    probes = probing.Probes({"a": ("a",)}, 1000)
    probes._begin(told)
    early = {step for step, todo in probes.pending.items() if any(not probe.measured for probe in todo)}
    assert early, "some are made before the step that is measured"
    assert early <= {1, 6, 11, 16}, "0, 5, 10 and 15 keep detail"


def test_nothing_to_measure() -> None:
    assert probing.bands_of(schedule(2, full_step_interval=2)) == ()
    assert probing.bands_of(core.Schedule(core.ToMAConfig())) == ()


def test_sites_are_runs_of_blocks() -> None:
    work = pack_module("toma_core.cost_model").FLUX_DOUBLE
    blocks = [BlockFacts(f"double.{n}", "double", work, 64, 8) for n in range(3)]
    blocks += [BlockFacts(f"single.{n}", "single", work, 64, 8) for n in range(9)]
    sites = probing.sites_of(blocks, 4)
    assert [len(names) for names in sites.values()] == [3, 3, 3, 3]
    assert list(sites) == ["double.0 - double.2", "single.0 - single.2", "single.3 - single.5", "single.6 - single.8"]
    assert [name for names in sites.values() for name in names] == [block.name for block in blocks]
    assert len(probing.sites_of(blocks, 100)) == 12
    assert list(probing.sites_of(blocks, 1)) == ["double.0 - single.8"]


def test_more_homes_than_sites() -> None:
    """The smallest neighbours of one resolution join, others do not before them."""
    work = pack_module("toma_core.cost_model").UNET_BLOCK
    tokens = {"input.1": 64, "input.2": 64, "middle.0": 16, "output.0": 64}
    blocks = [BlockFacts(f"{home}.{n}", home, work, tokens[home], 8) for home in tokens for n in range(2)]
    assert list(probing.sites_of(blocks, 4)) == [f"{home}.0 - {home}.1" for home in tokens]
    three = probing.sites_of(blocks, 3)
    assert list(three) == ["input.1.0 - input.2.1", "middle.0.0 - middle.0.1", "output.0.0 - output.0.1"]
    for most in range(1, 9):
        sites = probing.sites_of(blocks, most)
        assert len(sites) == most
        assert [name for names in sites.values() for name in names] == [block.name for block in blocks]
